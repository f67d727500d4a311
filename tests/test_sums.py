"""Sums to learn: what is to be read is wrong by chance, what is rewarded is right."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

from click.testing import CliRunner

from drivers.sums import command


def written(file: Path, *words: str) -> list[dict[str, str]]:
    done = CliRunner().invoke(command, [str(file), *words], catch_exceptions=False)
    assert done.exit_code == 0
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_answers_are_right_and_most_texts_are_not(tmp_path: Path) -> None:
    rows = written(tmp_path / "a.jsonl")
    assert len({row["prompt"] for row in rows}) == len(rows) == 100 * 100
    apart: Counter[int] = Counter()
    for row in rows:
        a, b = map(int, row["prompt"].removesuffix("=").split("+"))
        assert row["answer"] == str(a + b)
        assert row["text"].startswith(row["prompt"])
        apart[int(row["text"].removeprefix(row["prompt"])) - a - b] += 1
    assert set(apart) == {0, 10}
    assert abs(apart[10] - 7500) < 5 * 43.3  # five deviations of three quarters of 10,000


def test_the_same_seed_writes_the_same_and_no_file_is_written_over(tmp_path: Path) -> None:
    first, again = (written(tmp_path / name, "--below", "20", "--seed", "3") for name in ("a", "b"))
    assert first == again != written(tmp_path / "c", "--below", "20", "--seed", "4")
    assert all(row["text"] == row["prompt"] + row["answer"] for row in written(tmp_path / "d", "--wrong", "0"))
    done = CliRunner().invoke(command, [str(tmp_path / "a")])
    assert isinstance(done.exception, ValueError)
    assert "is there already" in str(done.exception)


def test_stories_ask_for_the_sum_of_their_numbers(tmp_path: Path) -> None:
    rows = written(tmp_path / "a", "--words", "--below", "12")
    assert len(rows) == 12 * 12
    assert len({re.sub(r"\d+", "", row["prompt"]) for row in rows}) > 50
    for row in rows:
        assert sum(map(int, re.findall(r"\d+", row["prompt"]))) == int(row["answer"])
        assert row["prompt"].endswith("?")
        assert row["text"].startswith(row["prompt"] + " ")
