"""Learn from pairs with SmolLM2-135M through LoRA, here and with `trl.DPOTrainer`: speed and memory."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

from attrs import evolve

from bench.figure import Figure
from bench.finetuning import DOLLY, NAME, alternating
from bench.rankers import LENGTH, shared
from bench.tuners import lesson
from drivers.exported import export_run
from drivers.fetch import WHEELS, fetch
from ironfn.data.preparation import prepare

PAIRS = 24
SHARES = MappingProxyType({"half": (1.0, ">= 2.2"), "tenth": (1 / 9, ">= 1.6")})
"""How long a prompt is beside its completions, and how many times as fast as theirs ours has to be."""


def figures() -> Iterator[Figure]:
    """Yield, for prompts that are a half and a tenth of the tokens, pairs a second and peaks beside TRL's.

    And an epoch whose references were computed beforehand, beside one with the reference at each step.
    """
    answers = [json.loads(line)["response"].split() for line in DOLLY.read_text(encoding="utf-8").splitlines()]
    answers = [words for words in answers if 25 <= len(words) <= 150][: 3 * PAIRS]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = Path("models") / NAME
        fetch(WHEELS[NAME], model, lambda _: None)
        export_run(model, folder / "hf", None, None, 5 << 30, lambda _: None)
        for which, (share, bar) in SHARES.items():
            rows = [pair(answers[3 * n : 3 * n + 3], share) for n in range(PAIRS)]
            (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
            spec, how = lesson(folder, LENGTH)
            prepare(spec, lesson=evolve(how, holds="pairs"))
            kept = ["dpo_kept"] if which == "half" else []
            tuners = alternating(["dpo", "trl_dpo", *kept], folder, "bench.rankers")
            found = {tuner.name: tuner for tuner in tuners}
            mine, other = found["dpo"], found["trl_dpo"]
            note = f"prompts {shared(folder):.2f} of the tokens; {mine}; {other}"
            yield Figure(f"dpo_{which}_speed_trl", mine.speed / other.speed, bar, note)
            yield Figure(f"dpo_{which}_memory_trl", mine.peak / other.peak, "<= 0.5", note)
            if kept:
                yield Figure("dpo_kept_epoch", mine.speed / found["dpo_kept"].speed, "<= 0.7", str(found["dpo_kept"]))


def pair(answers: list[list[str]], share: float) -> dict[str, str]:
    """Return a pair of two answers, after a prompt that is so long beside them."""
    asked, chosen, rejected = answers
    size = max(1, round(share * (len(chosen) + len(rejected)) / 2))
    words = (asked * (size // len(asked) + 1))[:size]
    return {"prompt": " ".join(words), "chosen": " " + " ".join(chosen), "rejected": " " + " ".join(rejected)}
