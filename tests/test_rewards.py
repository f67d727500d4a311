"""Rewards: what is a score and what a failure, words and forms, functions by path, and what they may do wrong."""

from __future__ import annotations

import math
import os
import resource
import subprocess
import sys
import threading
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drivers.graders import function_pool, function_reward, imported, key_from
from ironfn.rewards.each import each
from ironfn.rewards.gym import Task, gym_pool, gym_reward, rows
from ironfn.rewards.manager import Graded, Reward, RewardError, grade, tally
from ironfn.rewards.text import keyword, matching, pattern, sections, soft_keyword
from ironfn.rewards.values import Completion, Failure, Result, Score
from ironfn.rewards.waiting import readable
from ironfn.rewards.worker import Limits

ROOT = Path(__file__).parents[1]


def texts(*written: str, **row: Any) -> list[Completion]:
    return [Completion("prompt", text, row) for text in written]


def kinds(results: Any) -> list[Any]:
    return [result.kind if isinstance(result, Failure) else result.value for result in results]


def gone(pid: int) -> None:
    """Wait until a process has ended."""
    end = time.monotonic() + 20
    while Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < end, "it lives on"
        time.sleep(0.01)


def by_text(completion: Completion) -> float:
    return float(completion.text)


def test_weights_are_added_up_and_failures_are_no_scores() -> None:
    groups = [texts("1", "0"), texts("0.5", "x")]
    rewards = [Reward("value", each(by_text), 2.0), Reward("length", each(lambda c: len(c.text)), 0.5, 0, 9)]
    graded = grade(rewards, groups)
    assert [[each.total for each in group] for group in graded] == [[2.5, 0.5], [2.5, None]]
    failed = graded[1][1].parts["value"]
    assert isinstance(failed, Failure)
    assert failed.kind == "error"
    assert graded[1][1].parts["length"] == Score(1.0)  # what the others gave is known all the same
    told = tally(graded)
    assert (told["value/mean"], told["value/failed"], told["value/error"], told["length/failed"]) == (0.5, 1, 1, 0)


def test_a_failure_leaves_out_the_sample_or_the_group_or_stops() -> None:
    groups = [texts("1", "x"), texts("1", "0")]

    def totals(policy: Any) -> list[list[float | None]]:
        return [[g.total for g in group] for group in grade([Reward("r", each(by_text), on_failure=policy)], groups)]

    assert totals("sample") == [[1.0, None], [1.0, 0.0]]
    assert totals("group") == [[None, None], [1.0, 0.0]]
    with pytest.raises(RewardError, match=r"'r' failed \(error: ValueError.*on_failure"):
        totals("stop")


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -math.inf,
        1.5,
        -0.1,
        10**400,
        "1",
        b"1",
        np.str_("1"),
        None,
        [1.0],
        1j,
        np.ones(2),
        torch.ones(2),
    ],
)
def test_what_is_no_number_within_the_bounds_is_a_failure(value: Any) -> None:
    [[graded]] = grade([Reward("r", each(lambda _: value))], [texts("a")])
    assert graded.total is None
    assert isinstance(graded.parts["r"], Failure)
    told = tally([[graded]])
    assert math.isnan(told["r/mean"])
    assert told["r/failed"] == 1


@pytest.mark.parametrize("value", [True, 1, Fraction(1), Decimal(1), np.float32(1), np.bool_(True), torch.tensor(1.0)])
def test_whatever_python_makes_a_number_of_is_a_score(value: Any) -> None:
    [[graded]] = grade([Reward("r", each(lambda _: value))], [texts("a")])
    assert graded.parts["r"] == Score(1.0)


@pytest.mark.parametrize("given", [Score(math.nan), Score(7.0)])
def test_bounds_hold_for_graders_that_make_scores_themselves(given: Score) -> None:
    [[graded]] = grade([Reward("r", lambda _: [given])], [texts("a")])
    assert kinds(graded.parts.values()) == ["bounds"]


def test_a_grader_that_raises_or_miscounts_fails_every_sample() -> None:
    def broken(_: Any) -> list[Result]:
        raise KeyError("gone")

    [group] = grade([Reward("a", broken), Reward("b", lambda _: [Score(1.0)])], [texts("1", "2")])
    assert [kinds(graded.parts.values()) for graded in group] == [["error", "error"]] * 2


def test_no_completion_is_graded_without_a_reward() -> None:
    assert grade([Reward("r", each(by_text))], []) == []
    assert grade([Reward("r", each(by_text))], [[]]) == [[]]
    with pytest.raises(ValueError, match="one at least"):
        grade([], [texts("1")])
    with pytest.raises(ValueError, match="r, r"):
        grade([Reward("r", each(by_text)), Reward("r", each(by_text))], [texts("1")])
    with pytest.raises(ValueError, match="weight nan"):
        Reward("r", each(by_text), math.nan)
    with pytest.raises(ValueError, match="low has to be below high"):
        Reward("r", each(by_text), low=1.0)
    assert tally([]) == tally([[]]) == {}
    assert tally([[Graded(1.0, {"r": Score(1.0)})]]) == {"r/mean": 1.0, "r/failed": 0}


def test_a_call_that_hangs_does_not_hold_up_the_others() -> None:
    gate = threading.Event()

    def wait(completion: Completion) -> float:
        if completion.text == "hang":
            gate.wait(60)
        return 1.0

    results = each(wait, seconds=0.5, threads=2)(texts("hang", "a", "hang", "b", "hang", "c"))
    gate.set()
    assert kinds(results) == ["timeout", 1.0, "timeout", 1.0, "timeout", 1.0]


def test_calls_run_beside_each_other_and_stay_in_order() -> None:
    together = threading.Barrier(4)

    def meet(completion: Completion) -> float:
        together.wait(30)
        return float(completion.text)

    assert kinds(each(meet, threads=4)(texts(*map(str, range(8))))) == [float(n) for n in range(8)]
    with pytest.raises(ValueError, match="0 threads"):
        each(meet, threads=0)


def test_words_are_found_whole_and_in_any_case() -> None:
    [all_of_them, some, none] = texts("The SUM, then the total.", "summed up: total", "")
    assert [keyword(["sum", "total"])(each) for each in (all_of_them, some, none)] == [1.0, 0.0, 0.0]
    assert [soft_keyword(["sum", "total"])(each) for each in (all_of_them, some, none)] == [1.0, 0.5, 0.0]
    assert soft_keyword(["c++", "größe"])(texts("in C++ die GRÖSSE Größe")[0]) == 1.0
    with pytest.raises(ValueError, match="none of them empty"):
        keyword(["a", " "])


@pytest.mark.parametrize(
    ("text", "worth"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("\n<think>\na\n</think>\n\n<answer>b</answer> \n", 1.0),
        ("<think>a</think>b<answer>c</answer>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think>a<think>b</think></think><answer>c</answer>", 0.0),
        ("<think>a<answer>b</answer></think><answer>c</answer>", 0.0),
        ("<think> </think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("", 0.0),
    ],
)
def test_sections_stand_once_in_order_with_nothing_between(text: str, worth: float) -> None:
    assert sections(["think", "answer"])(Completion("", text)) == worth


def test_an_expression_that_takes_for_ever_is_ended() -> None:
    with pattern(r"(a+)+$", whole=True, seconds=1.0) as pool:
        assert kinds(matching(pool)(texts("aaa", "a" * 60 + "!", "b", "a"))) == [1.0, "timeout", 0.0, 1.0]
    with pattern(r"\d+.x") as pool:
        assert kinds(matching(pool)(texts("so 12\nx it is", "12"))) == [1.0, 0.0]
    with pytest.raises(ValueError, match=r"'\(a' is none"):
        pattern("(a")


def test_a_function_by_its_path_is_called_with_the_row() -> None:
    with function_pool("tests.grading:length") as pool:
        assert kinds(function_reward(pool)(texts("ab", "abcd", longest=4))) == [0.5, 1.0]
    for path in ("tests.grading", "tests.grading:gone", "tests.nowhere:f", ":f", "tests.grading:"):
        with pytest.raises(ValueError, match="reward"):
            imported(path)


def test_a_function_is_found_where_the_command_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_the_spec.py").write_text("def always(completion):\n    return 0.5\n")
    with pytest.raises(ValueError, match="beside_the_spec"):
        function_pool("beside_the_spec:always")
    monkeypatch.syspath_prepend(str(tmp_path))
    with function_pool("beside_the_spec:always") as pool:
        assert function_reward(pool)(texts("a")) == [Score(0.5)]


def test_a_process_outlives_its_parent_by_little() -> None:
    """Its parent is stopped here, so nobody but the kernel's clock is left to end it."""
    code = "from tests.grading import leave_behind; leave_behind()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    (pid,) = map(int, done.stdout.split())
    gone(pid)


def test_whatever_a_function_does_the_next_one_is_graded() -> None:
    bad = ["raise", "loop", "sleep", "stall", "die", "print", "write", "nan", "infinite", "text", "none", "huge"]
    with function_pool("tests.grading:misbehave", seconds=1.0, size=2) as pool:
        [group] = grade([Reward("r", function_reward(pool))], [texts(*bad, "good")])
    found = dict(zip(bad, kinds(graded.parts["r"] for graded in group), strict=False))
    assert found == {
        "raise": "error", "loop": "timeout", "sleep": "timeout", "stall": "timeout", "die": "crash",
        "print": 0.5, "write": 0.5, "nan": "bounds", "infinite": "bounds", "text": "error", "none": "error",
        "huge": "bounds",
    }  # fmt: skip
    assert group[-1].total == 0.25


def test_what_a_killed_function_started_dies_with_it(tmp_path: Path) -> None:
    where = tmp_path / "pid"
    with function_pool("tests.grading:misbehave", seconds=3.0) as pool:
        assert kinds(function_reward(pool)(texts("child", where=str(where)))) == ["timeout"]
    gone(int(where.read_text()))


def test_files_of_high_numbers_can_be_waited_for() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    out, into = os.pipe()
    high = os.dup2(out, 1500)
    try:
        assert readable([high], 0.01) == []
        os.write(into, b"x")
        assert readable([high], None) == [high]
    finally:
        for file in (out, into, high):
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_worker_ends_with_its_pool() -> None:
    pool = pattern("a")
    pool.ask("a")
    process = pool._workers[0]._process
    assert process is not None
    pool.close()
    assert process.returncode is not None
    assert pool.ask("a") == Score(1.0)  # and comes back when it is asked again
    again = pool._workers[0]._process or pool._workers[-1]._process
    assert again is not None
    again.kill()
    again.wait()
    assert pool.ask("a") == Score(1.0)  # as after a death of its own
    pool.close()
    with pytest.raises(ValueError, match="above 0"):
        Limits(seconds=0)


def test_a_key_is_read_from_a_named_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TEST_KEY", " secret \n")
    assert key_from("REWARD_TEST_KEY") == "secret"
    monkeypatch.setenv("REWARD_TEST_KEY", "")
    with pytest.raises(ValueError, match="REWARD_TEST_KEY holds no key"):
        key_from("REWARD_TEST_KEY")


GYM = """
class Sums:
    def __init__(self, size, seed, top=9):
        self.size, self.seed, self.top = size, seed, top
    def __len__(self):
        return self.size
    def __getitem__(self, at):
        if at >= self.size:
            raise IndexError
        a, b = (self.seed * 7 + at * 3) % self.top, at % self.top
        return {"question": f"{a} + {b}?", "answer": str(a + b), "metadata": {"pair": (a, b)}}
    def score_answer(self, answer, entry):
        assert isinstance(entry["metadata"]["pair"], tuple)
        return 1.0 if answer == entry["answer"] else 0.05
def create_dataset(name, size, seed, **settings):
    if name != "sums":
        raise ValueError(f"Dataset {name} not registered")
    return Sums(size, seed, **settings)
"""


def test_tasks_of_reasoning_gym_are_made_again_in_the_process_that_grades(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package pins what other packages of the tests do not bear, so its interface stands in for it here."""
    (tmp_path / "reasoning_gym.py").write_text(GYM)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    task = Task("sums", 4, 3, {"top": 8})
    made = rows(task)
    assert made == rows(task)
    assert [row["gym"]["index"] for row in made] == [0, 1, 2, 3]
    right = [Completion(row["prompt"], f"so \\boxed{{{row['answer']}}}", row) for row in made]
    other = rows(Task("sums", 4, 5))  # another one in the same file
    assert other[0]["answer"] != made[0]["answer"]
    with gym_pool() as pool:
        assert kinds(gym_reward(pool)(right)) == [1.0] * 4
        wrong = [Completion("", " 1000 ", made[0]), Completion("", made[0]["answer"], other[0])]
        assert kinds(gym_reward(pool)(wrong)) == [0.05, 0.05]
        strange: list[Any] = [{}, {"gym": 3}, {"gym": {"name": "none", "size": 1, "seed": 1, "index": 0}}]
        strange += [{"gym": made[0]["gym"] | {"index": 4}}, {"gym": made[0]["gym"] | {"more": 1}}]
        assert kinds(gym_reward(pool)([Completion("", "1", row) for row in strange])) == ["error"] * 5
    with pytest.raises(ValueError, match="cannot make 4 of 'other'"):
        rows(Task("other", 4, 3))
