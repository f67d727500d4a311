"""Answer questions with SmolLM2-135M, here and with the back end that `lm-eval` has for `transformers`."""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.figure import Figure
from drivers.exported import export_run
from drivers.fetch import WHEELS, fetch
from drivers.trained import Trained, open_model
from ironfn.data.readers import Row
from ironfn.evals.accuracy import Answer, answer, share
from ironfn.evals.items import Question, question
from ironfn.evals.likelihood import log_likelihoods
from ironfn.evals.texts import Subject, Text

ITEMS, TURN = 200, 40
NAME = "smollm2-135m"
PIQA = Path(__file__).parents[2] / "shared/data/eval/piqa.jsonl"


def figures() -> Iterator[Figure]:
    """Yield how many times as fast the questions are answered, and whether the answers are the same.

    They are the first 200 of PIQA where that is at hand, taken in turns of 40 so that a noisy machine is fair to both.
    Both sides encode the texts, and score them in float32 on the same threads; theirs has the batch that it is quickest
    with here. The note tells the processor's seconds too.
    """
    model = Path("models") / NAME
    fetch(WHEELS[NAME], model, lambda _: None)
    source, asked = questions()
    ours = ironfn(open_model(model, lambda _: None))
    with tempfile.TemporaryDirectory() as folder:
        export_run(model, Path(folder) / "hf", None, None, 5 << 30, lambda _: None)
        theirs = lm_eval(Path(folder) / "hf")
    answers: list[Answer] = []
    found: list[list[float]] = []
    clocks = [(time.perf_counter(), time.process_time())]
    for start in range(0, ITEMS, TURN):
        part = asked[start : start + TURN]
        for call, kept in ((ours, answers), (theirs, found)):
            kept += call(part)
            clocks.append((time.perf_counter(), time.process_time()))
    spent = [[b - a for a, b in itertools.pairwise(clock)] for clock in zip(*clocks, strict=True)]
    (wall, their_wall), (cpu, their_cpu) = ((sum(each[::2]), sum(each[1::2])) for each in spent)
    note = f"ironfn {wall:.1f} s ({cpu:.1f} s of processor), lm-eval {their_wall:.1f} s ({their_cpu:.1f} s)"
    yield Figure("evaluation_ratio", their_wall / wall, ">= 1.5", f"{note}; {ITEMS} items of {source}")
    yield from _equal(answers, found)


def _equal(answers: list[Answer], found: list[list[float]]) -> Iterator[Figure]:
    same = sum(one.by_sum == sums.index(max(sums)) for one, sums in zip(answers, found, strict=True)) / len(answers)
    acc, norm = (
        share([choice == one.question.gold for one, choice in zip(answers, chosen, strict=True)])
        for chosen in ([one.by_sum for one in answers], [one.by_character for one in answers])
    )
    note = f"acc {acc.value:.3f} ± {acc.stderr:.3f}, acc_norm {norm.value:.3f} ± {norm.stderr:.3f}"
    yield Figure("evaluation_same_choices", same, "== 1.0", note)
    apart = [
        (abs(a - b), abs(a - b) / tokens)
        for one, sums in zip(answers, found, strict=True)
        for a, b, tokens in zip(one.log_likelihoods, sums, one.tokens, strict=True)
    ]
    note = f"largest of {len(apart)} sums, {max(apart)[0]:.1e}; a token of them here"
    yield Figure("evaluation_difference", max(each for _, each in apart), "<= 1e-4", note)


def questions() -> tuple[str, list[Question]]:
    """Return where the questions are from, and them: without PIQA, which sentence comes next in Python's help."""
    if PIQA.exists():
        rows = [json.loads(line) for line in PIQA.read_text(encoding="utf-8").splitlines()[:ITEMS]]
    else:
        from pydoc_data.topics import topics

        text = " ".join(" ".join(topics.values()).split())
        lines = [line for line in text.split(". ") if 40 < len(line) < 200]
        rows = [{"query": lines[i], "choices": [lines[i + 1], lines[i + 9]], "gold": 0} for i in range(ITEMS)]
    return PIQA.stem if PIQA.exists() else "help", [question(Row(row, f"{n}"), " ") for n, row in enumerate(rows, 1)]


def ironfn(model: Trained) -> Callable[[list[Question]], list[Answer]]:
    """Return what answers questions here."""

    def encode(text: str, around: bool) -> list[int]:
        return model.tokenizer.encode(text, add_special_tokens=around).ids

    def score(groups: Sequence[Sequence[Text]]) -> Iterator[list[float]]:
        return log_likelihoods(model.params, model.arch, groups, how=model.how)

    subject = Subject(score, encode, model.eos, model.arch.context)
    return lambda asked: answer(asked, subject)[1]


def lm_eval(folder: Path) -> Callable[[list[Question]], list[list[float]]]:
    """Return what scores the choices of questions with `lm-eval`."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    back_end: Any = HFLM
    lm = back_end(pretrained=str(folder), device="cpu", dtype="float32", batch_size=8)

    def call(asked: list[Question]) -> list[list[float]]:
        requests = [Instance("loglikelihood", {}, pair, 0) for each in asked for pair in each.pairs]
        sums = iter(lm.loglikelihood(requests, disable_tqdm=True))
        return [[next(sums)[0] for _ in each.pairs] for each in asked]

    return call
