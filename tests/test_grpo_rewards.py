"""Every kind of reward from a spec to a step; what fails, stalls or dies on the way, and what is told of it."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from drivers.doubts import PATIENCE, Doubts
from tests.hf_models import quiet
from tests.test_convert import add_tokenizer, done
from tests.test_grpo import LORA, _here, final, folder, rows, spec_file, texts
from tests.test_judge import Server, dies, hangs, says, serving, status
from tests.test_rewards import GYM
from tests.tuning import TEMPLATE, refused, same

__all__ = ["_here", "folder"]

SHORT = ("train.steps=2", "report.eval_rows=2", "grpo.tries=0", "report.prompts=[]")


def spec_of(name: str, *of: str) -> Path:
    """Write a spec with other rewards."""
    path = spec_file(name)
    text = path.read_text()
    begin, end = text.index("  rewards:"), text.index("optim:")
    path.write_text(text[:begin] + f"  rewards: {{{', '.join(of)}}}\n" + text[end:])
    return path


def run(name: str, *of: str, more: tuple[str, ...] = ()) -> str:
    return done("grpo", spec_of(name, *of), *(word for each in (*SHORT, *more) for word in ("-s", each)))


def fails(name: str, *of: str, more: tuple[str, ...] = ()) -> str:
    return refused("grpo", spec_of(name, *of), *(word for each in (*SHORT, *more) for word in ("-s", each)))


def first(name: str) -> dict[str, Any]:
    return next(row for row in rows(name) if row["kind"] == "train")


def written(name: str) -> list[dict[str, Any]]:
    return [
        one | {"prompt": row["prompt"]} for row in map(json.loads, texts(name).splitlines())
        for one in row["completions"]
    ]  # fmt: skip


def judge(server: Server, **settings: Any) -> str:
    told = {"url": server.url, "model": "judge-1", "key": "RWD_TEST_KEY", "fields": ["answer"], **settings}
    return f"good: {{kind: judge, seconds: 2, judge: {json.dumps(told)}}}"


def test_a_judge_that_fails_stalls_and_wants_to_be_left_alone_is_asked_until_it_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RWD_TEST_KEY", "sk-most-secret")
    slow = status(429, Retry_After="0.2")
    with serving(status(500, b"sk-most-secret"), slow, dies, slow, says("Score: 3"), hangs, says("Score: 5")) as server:
        said = run("judged", judge(server, low=1, high=5, prompt="Rate {low} to {high}. Score: N", together=2))
    system, user = server.seen[-1]["body"]["messages"]
    assert (system["content"], server.seen[-1]["key"]) == ("Rate 1 to 5. Score: N", "Bearer sk-most-secret")
    assert set(json.loads(user["content"])) == {"prompt", "completion", "answer"}
    given = {one["good"] for one in written("judged")}
    assert 1.0 in given
    assert all(one in (0.5, 1.0) or str(one).startswith(("timeout: ", "refused: ")) for one in given)
    files = [path for path in Path("runs/judged").rglob("*") if path.is_file()]
    assert not [path for path in files if b"sk-most-secret" in path.read_bytes()]
    assert "sk-most-secret" not in said


def test_a_judge_that_is_down_stops_the_run_in_time_and_the_run_goes_on_when_it_is_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RWD_TEST_KEY", "sk-most-secret")
    with serving(says("Score: 7")) as server:
        good = judge(server, tries=2, failures=3)
        run("down", good, more=("train.steps=4", "grpo.epochs=1", "checkpoint.every=2"))
        server.acts[:] = [status(503, b"no sk-most-secret")]
        more = ("train.steps=8", "grpo.epochs=1", "checkpoint.every=2")
        began = time.monotonic()
        said = fails("down", good, more=more)
        assert time.monotonic() - began < 30
        assert "no text of the rollout of step 5 has a reward" in said
        assert re.search(r"'good' failed 16 of 16 times, first by refused: .* answered 503: no \*\*\*", said)
        assert "goes on from its last checkpoint" in said
        assert "sk-most-secret" not in said
        server.acts[:] = [says("Score: 7")]
        assert "resuming at step 4" in done(
            "grpo", "down.yaml", *(word for each in (*SHORT, *more) for word in ("-s", each))
        )
    assert [row["step"] for row in rows("down") if row["kind"] == "train"] == list(range(1, 9))


@pytest.mark.parametrize("split", [0.0, 0.3])
def test_a_grader_that_always_fails_stops_the_run_before_the_first_step(folder: Path, split: float) -> None:
    bad, good = "odd: {kind: function, path: 'tests.own_rewards:always_fails'}", "vowels: {kind: pattern, pattern: a}"
    said = fails(f"dead-{split}", good, bad, more=(f"data.split.validation={split}",))
    where, count = ("the evaluation before the first step", 2) if split else ("the rollout of step 1", 16)
    assert f"no text of {where} has a reward" in said
    assert f"'odd' failed {count} of {count} times" in said
    assert "no service" in said
    assert "vowels" not in said
    assert not Path(f"runs/dead-{split}/checkpoints").exists()


def scores(directory: Path, pairs: list[tuple[str, str]]) -> list[float]:
    """Return what transformers gives texts, each alone: after a prompt as a message where there is a template."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory).eval()
    found: list[float] = []
    for prompt, text in pairs:
        told = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
        ids = tokenizer.apply_chat_template(told, return_dict=False)
        with torch.no_grad():
            found.append(model(torch.tensor([ids])).logits[0, 0].item())
    return found


@pytest.mark.parametrize("squash", [True, False])
def test_a_reward_model_of_hugging_faces_form_gives_what_transformers_does(folder: Path, squash: bool) -> None:
    import transformers

    where = folder / "scorer"
    if not where.exists():
        with quiet():
            torch.manual_seed(1)
            config = transformers.LlamaConfig(
                vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
                max_position_embeddings=128, bos_token_id=0, eos_token_id=1, initializer_range=0.5,
            )  # fmt: skip
            config.num_labels = 1
            transformers.LlamaForSequenceClassification(config).save_pretrained(where)
        add_tokenizer(where)
        (where / "chat_template.jinja").write_text(TEMPLATE)
    name, of = f"modelled-{squash}", f"squash: {str(squash).lower()}" + (", low: -1000, high: 1000" * (not squash))
    run(name, f"liked: {{kind: model, path: scorer, {of}}}")
    told = [one for one in written(name) if isinstance(one["liked"], float) and one["text"].strip()]
    assert len(told) > 8
    with quiet():
        expected = scores(where, [(one["prompt"], one["text"]) for one in told])
    for one, raw in zip(told, expected, strict=True):
        assert one["liked"] == pytest.approx(1 / (1 + math.exp(-raw)) if squash else raw, rel=1e-4, abs=1e-5)
    assert len({one["liked"] for one in told}) > 4


def test_a_reward_model_of_ours_grades(folder: Path) -> None:
    pairs = [{"prompt": f"{n} the", "chosen": " a fox", "rejected": " dog dog"} for n in range(40)]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    Path("scoring.yaml").write_text(
        "name: scoring\nmodel: {init_from: base, score: true}\n"
        "data: {form: pairs, dir: scoring, length: 48, sets: {p: {sources: [pairs.jsonl]}}, split: {validation: 0}}\n"
        "optim: {lr: 1e-3}\ntrain: {steps: 6, batch: 4, threads: 1}\n"
    )
    done("reward-model", "scoring.yaml")
    run("ours", "liked: {kind: model, path: runs/scoring}", more=("sft.prompts=text",))
    assert 0 < first("ours")["rewards/liked"] < 1
    assert first("ours")["failed"] == 0
    assert "predicts tokens and gives no reward" in fails("wrong", "liked: {kind: model, path: base}")
    assert "no directory nowhere" in fails("wrong", "liked: {kind: model, path: nowhere}")


def test_questions_of_reasoning_gym_are_written_answered_and_graded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reasoning_gym.py").write_text(GYM)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "reasoning_gym", raising=False)
    said = done("data", "gym", "sums", "gym.jsonl", "--size", 20, "--seed", 3, "-s", "top=8")
    assert said == "gym.jsonl: 8 questions of sums, 12 that came again left out\n"
    indices = [json.loads(line)["gym"]["index"] for line in Path("gym.jsonl").read_text().splitlines()]
    assert indices == [*range(8)]
    assert "there already" in refused("data", "gym", "sums", "gym.jsonl")
    assert "cannot make 1000 of 'other'" in refused("data", "gym", "other", "more.jsonl")
    assert "NAME=VALUE" in refused("data", "gym", "sums", "more.jsonl", "-s", "size=3")
    run("gym", "right: {kind: gym}", more=("data.sets.mine.sources=[gym.jsonl]",))
    assert first("gym")["failed"] == 0
    assert first("gym")["rewards/right"] == pytest.approx(0.05)
    assert "prompts.jsonl:1: the field 'gym', which grpo.rewards.right reads" in fails("wrong", "right: {kind: gym}")


def test_a_worker_that_is_killed_at_its_work_loses_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's SIGKILL, in the middle of a rollout: the process is started again and asked the same again."""
    grader = "slow: {kind: function, path: 'tests.own_rewards:waits_once', seconds: 60}"
    none = ("data.split.validation=0",)  # it is a rollout that is disturbed
    monkeypatch.setenv("RWD_MARK", str(folder / "undisturbed"))
    Path("undisturbed").write_text("")
    run("quiet", grader, more=none)
    mark = folder / "disturbed"
    monkeypatch.setenv("RWD_MARK", str(mark))
    killed: list[int] = []

    def kill() -> None:
        end = time.monotonic() + 60
        while not (mark.exists() and mark.read_text().endswith("\n")) and time.monotonic() < end:
            time.sleep(0.01)
        killed.append(int(mark.read_text()))
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    run("killed", grader, more=none)
    killer.join()
    assert killed[0] != os.getpid()
    assert rows("killed") == rows("quiet")
    assert texts("killed") == texts("quiet")
    assert first("killed")["failed"] == 0


def test_a_function_that_kills_its_own_process_is_a_failure_and_no_loop(folder: Path) -> None:
    said = fails("suicide", "bad: {kind: function, path: 'tests.own_rewards:kills_itself'}")
    assert "'bad' failed 2 of 2 times" in said
    assert "signal 9" in said


def test_what_is_useless_and_no_error_is_told_once() -> None:
    doubts = Doubts()
    fine, cut = {"alike": 0.5, "truncated": 0.5}, {"alike": 1.0, "truncated": 1.0}
    assert list(doubts.about(fine, 8)) == []
    said = [list(doubts.about(cut, 8)) for _ in range(PATIENCE - 1)]
    assert [len(each) for each in said] == [1] + [0] * (PATIENCE - 2)
    assert "within 8 tokens: raise grpo.tokens" in said[0][0]
    assert list(doubts.about(fine, 8)) == []
    said = [list(doubts.about(cut, 8)) for _ in range(2 * PATIENCE)]
    assert [len(each) for each in said] == [0] * (PATIENCE - 1) + [1] + [0] * PATIENCE
    assert "from which nothing is learned" in said[PATIENCE - 1][0]


def test_a_run_of_texts_that_are_all_cut_off_says_so(folder: Path) -> None:
    said = run("short", "a: {kind: pattern, pattern: a}", more=("grpo.tokens=1", "train.steps=4", "grpo.epochs=1"))
    assert said.count("raise grpo.tokens") == 1


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("a: {kind: judge}", "a.judge.url: '' is no address of an API"),
        ("a: {kind: judge, judge: {url: 'http://u:pw@host/v1', model: m}}", "is no address of an API"),
        ("a: {kind: judge, judge: {url: 'http://host/v1'}}", "names no model"),
        ("a: {kind: judge, judge: {url: 'http://host/v1', model: m, key: sk-secret}}", "the name of an environment"),
        ("a: {kind: judge, judge: {url: 'http://host/v1', model: m, key: RWD_NONE}}", "RWD_NONE holds no key"),
        ("a: {kind: judge, judge: {url: 'http://host/v1', model: m, low: 10}}", "10 is not below 10"),
        ("a: {kind: judge, judge: {url: 'http://host/v1', model: m, tries: 0}}", "0 has to be at least 1"),
        ("a: {kind: judge, judge: {url: 'http://host/v1', model: m, rest: -1}}", "-1 cannot be negative"),
        ("a: {kind: model}", "names no directory"),
        ("a: {kind: model, path: base, squash: false}", "set low and high"),
        ("a: {kind: gym}", "pip install 'ironfn[gym]'"),
        ("a: {kind: math, words: [b]}", "is for keyword and soft_keyword and sections, and kind is math"),
        ("a: {kind: exact, seconds: 0}", "has to be above 0"),
        ("a: {kind: exact, weight: 0}", "every reward has weight 0"),
        ("'a b': {kind: exact}", "'a b' is no name of a reward"),
        ("reward: {kind: exact}", "'reward' is no name of a reward"),
        ("a: {kind: exact, answer: solution}", "prompts.jsonl:1: the field 'solution', which grpo.rewards.a reads"),
    ],
)
def test_what_cannot_be_meant_of_a_reward_is_refused(
    reward: str, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    found = fails("wrong", reward)
    assert said in found
    assert "pw@" not in found
    assert "sk-secret" not in found
    assert not Path("runs/wrong/checkpoints").exists()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"prompt": "x"}', "the field 'answer', which grpo.rewards.a reads, is missing"),
        ('{"prompt": "x", "answer": " "}', "is missing or empty"),
        ('{"prompt": "x", "answer": ["1"]}', "is list; a text or a number is compared"),
        ('{"prompt": "\\ud800 x", "answer": "1"}', "surrogates not allowed"),
        ('{"prompt": "x", "answer": "1", "more": "\\udfff"}', "surrogates not allowed"),
        ('{"prompt": " ", "answer": "1"}', "prompt has to be a text"),
        ('{"prompt": [], "answer": "1"}', "at least one message"),
        ('[1]', "an object with a prompt"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_asked_or_graded_is_told_with_its_place_or_passed_over(row: str, said: str) -> None:
    good = [json.dumps({"prompt": f"{n} ä€😀 <|im_end|> \u202e\u0000", "answer": n}) for n in range(6)]
    Path("rows.jsonl").write_text("\n".join([*good[:3], row, *good[3:]]))
    more = ("data.sets.mine.sources=[rows.jsonl]", "data.split.validation=0", "data.length=64")
    found = fails("hostile", "a: {kind: exact}", more=more)
    assert "data.sets.mine: rows.jsonl:4: " in found
    assert said in found
    assert "Traceback" not in found


def test_rows_that_are_passed_over_leave_the_others(folder: Path) -> None:
    told = [{"prompt": f"{n} ä€😀 <|im_end|> \u202e\u0000", "answer": n} for n in range(6)]
    told += [{"prompt": "x"}, {"prompt": "much " * 99, "answer": 3}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))
    more = ("data.sets.mine.sources=[rows.jsonl]", "data.split.validation=0", "data.length=64", "data.bad_lines=count")
    said = run("passed", "a: {kind: exact}", "b: {kind: math}", more=more)
    assert "6 prompts, 4 of them answered 4 times at a time; 1 are longer than a row has room for" in said
    assert first("passed")["failed"] == 0


def test_what_is_asked_can_be_seen_before(folder: Path) -> None:
    spec = spec_of("seen", "a: {kind: exact}")
    said = done("data", "inspect", spec, "--rows", 4)
    run("seen", "a: {kind: exact}")
    assert "prompts, 0 longer than a row has room for" in said
    for row in map(json.loads, texts("seen").splitlines()):
        assert row["prompt"] in said
    assert "answer: " in done("data", "inspect", spec, "--rows", 1, "--split", "validation")
    Path("bare.jsonl").write_text('{"prompt": "x"}')
    assert "the field 'answer', which" in refused("prepare", spec, "-s", "data.sets.mine.sources=[bare.jsonl]")


@pytest.mark.parametrize(
    ("source", "said"),
    [("def f(x:", "SyntaxError: "), ("raise RuntimeError('no licence')", "no licence"), ("f = 3", "is no function")],
)
def test_a_module_that_cannot_be_imported_is_told(
    source: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"rwd_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = fails("wrong", f"a: {{kind: function, path: '{name}:f'}}")
    assert said in found
    assert "grpo.rewards.a: the reward" in found


def test_a_disk_that_is_full_is_told_with_the_file(folder: Path) -> None:
    Path("runs/full").mkdir(parents=True)
    Path("runs/full/completions.jsonl").symlink_to("/dev/full")
    assert "runs/full/completions.jsonl: No space left on device" in fails("full", "a: {kind: exact}")


def test_all_rewards_at_once_with_an_adapter_go_on_as_if_never_stopped(folder: Path) -> None:
    own = "{kind: function, path: 'tests.own_rewards:shortness', weight: -0.5}"
    more = (*LORA, "train.steps=8", "grpo.tries=2", "checkpoint.every=8")
    of = ("a: {kind: pattern, pattern: '[ae]'}", f"b: {own}", "c: {kind: soft_keyword, words: [a], weight: 0}")
    spec = spec_of("mixed", *of)
    sets = [word for each in (*SHORT, *more) for word in ("-s", each)]
    done("grpo", spec, *sets)
    spec = spec_of("mixed-cut", *of)
    done("grpo", spec, *sets, "-s", "train.steps=5")
    done("grpo", spec, *sets)
    assert same(final("mixed-cut"), final("mixed"))
    assert texts("mixed-cut") == texts("mixed")
    told = next(row for row in rows("mixed") if row["kind"] == "validation")
    assert 0 <= told["pass_2"] <= 1
