"""Small tasks of programming: programs that do what a prompt says pass its tests, in the sandbox, and others do not."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from drivers.programs import command
from ironfn.rewards.code import code_reward
from ironfn.rewards.sandbox import Sandbox
from ironfn.rewards.values import Completion, Score

SOLVED = {
    "the sum of a and b": "a + b",
    "the difference of a and b": "a - b",
    "the product of a and b": "a * b",
    "the larger of a and b": "a if a > b else b",
    "the smaller of a and b": "b if a > b else a",
    "the square of n": "n ** 2",
    "the absolute value of n": "n if n > 0 else -n",
    "twice n": "n + n",
    "True if n is even": "not n & 1",
    "True if n is positive": "0 < n",
    "the sum of the numbers": "sum(numbers)",
    "the largest of the numbers": "sorted(numbers)[-1]",
    "the smallest of the numbers": "sorted(numbers)[0]",
    "how many numbers there are": "sum(1 for _ in numbers)",
    "the first of the numbers": "[*numbers][0]",
    "the last of the numbers": "numbers.pop()",
    "the numbers in ascending order": "sorted(numbers)",
    "the numbers in reverse": "list(reversed(numbers))",
    "the length of the text": "text.__len__()",
    "the text in upper case": "''.join(c.upper() for c in text)",
    "the text in lower case": "''.join(c.lower() for c in text)",
    "the text backwards": "''.join(reversed(text))",
    "the number of words in the text": "len(text.split())",
    "the first character of the text": "text[:1]",
    "True if the text is empty": "not text",
}


def test_what_is_asked_for_is_what_is_tested(tmp_path: Path) -> None:
    done = CliRunner().invoke(command, [str(tmp_path / "a.jsonl")], catch_exceptions=False)
    assert done.exit_code == 0
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert len(rows) == len({row["prompt"] for row in rows}) == 8 * len(SOLVED)
    grade = code_reward(Sandbox(), field="answer")
    one_each = {row["prompt"].split('"""Return ')[1].split(".\n")[0]: row for row in rows}
    assert one_each.keys() == SOLVED.keys()
    for what, row in one_each.items():
        assert grade(Completion(row["prompt"], f" {SOLVED[what]}\n", row)) == Score(1.0), what
        assert grade(Completion(row["prompt"], " None", row)) == Score(0.0), what
    again = CliRunner().invoke(command, [str(tmp_path / "a.jsonl")])
    assert "is there already" in str(again.exception)
