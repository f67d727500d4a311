"""Answers of mathematics: the pairs that public graders got wrong, either way round; and answers that are bombs."""

from __future__ import annotations

import importlib.util
import itertools
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ironfn.rewards.answers import boxed, hashed, number, plain, surely
from ironfn.rewards.math import final, math_reward, mentioned, symbolic
from ironfn.rewards.values import Completion, Failure, Result, Score
from ironfn.rewards.worker import Pool


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with symbolic(seconds=20.0, size=1) as pool:
        yield pool


def worth(pool: Pool, right: str, given: str) -> Result:
    return math_reward(pool)([Completion("", f"so it is \\boxed{{{given}}}", {"answer": right})])[0]


EQUAL = [
    (r"\frac12", r"\frac{1}{2}"), (r"\frac12", "0.5"), (r"\frac{1}{2}", "0.5"), (r"\dfrac{1}{2}", r"\tfrac12"),
    ("1,000", "1000"), ("(0,12.5)", "0<x<12.5"), ("**73**", "73"), (r"\text{E}", "E"), (r"28\%", "28"),
    ("28%", r"28\%"), (r"x^2-1", "(x-1)(x+1)"), (r"\sqrt{8}", r"2\sqrt{2}"), (r"\{1,2\}", r"\{2,1\}"),
    ("x=5", "5"), ("12.0", "12"), (r"90^\circ", "90"), (r"\$5", "5"), ("1e3", "1000"), ("5!", "120"),
    (r"\left(1,2\right)", "(1,2)"), ("1 1/2", "1.5"), (r"1\frac{1}{2}", "1.5"), (r"-\frac{3}{4}", "-0.75"),
    (r"1/2^{99}", r"\frac{1}{2^{99}}"), (r"\frac{\pi}{4}", "0.785398"), ("1331 and 1728", "1728, 1331"),
    (r"\pm 2021", r"2021, -2021"), ("10{,}000", "10000"), (r"\mathrm{(A)}", "(A)"),
]  # fmt: skip
UNEQUAL = [
    ("1/2^{99}", "1/2^{98}"), (r"\{1/2^{99}\}", r"\{1/2^{98}\}"), ("(0,1)", "(0,1.5)"), ("1331 and 1728", "1728"),
    (r"\pm 2021", "2021"), ("[0,1]", "(0,1)"), ("[0,1)", "(0,1]"), ("(1,2)", "(2,1)"), ("1,2,3", "1,2"),
    ("0.333", "1/3"), ("28", "0.28"), (r"28\%", "0.28"), ("x>2", "x<2"), ("2x+1", "2y+1"), ("1 1/2", "11/2"),
    ("12", "1 2"), ("10^{-9}", "0"), ("0", "10^{-12}"), (r"\sqrt{2}", "1.41"), ("5", "-5"), ("1000", "1,00"),
    (r"\frac{3}{0}", "1"), ("73", "**74**"), ("10^{20}", "10^{20}+1"), ("A", "B"), ("12", "12 or 13"), ("5", "5 6"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_equal_answers_are_equal_either_way_round(pool: Pool, one: str, other: str) -> None:
    assert [worth(pool, one, other), worth(pool, other, one)] == [Score(1.0), Score(1.0)]


@pytest.mark.parametrize(("one", "other"), UNEQUAL)
def test_unequal_answers_are_unequal_either_way_round(pool: Pool, one: str, other: str) -> None:
    assert [worth(pool, one, other), worth(pool, other, one)] == [Score(0.0), Score(0.0)]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1} or rather \boxed{2}", "2"),
        (r"\fbox{3}", "3"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {4}", "4"),
        (r"$\boxed 5$", "5"),
        (r"\boxed{\boxed{6}}", "6"),
        (r"\boxed{7", None),
        (r"\boxed{1} but then \boxed{2", None),
        (r"\boxed{}", None),
        (r"\boxed{1}, no: \boxed{ }", None),
        (r"\boxed", None),
        ("the answer is 8", None),
        ("", None),
        ("9 + 1 = 10\n#### 10\n", "10"),
        ("#### 1\nno\n#### 2\nmore", "2"),
        ("#### ", None),
        ("#### 3, that is \\boxed{4}", "4"),
    ],
)
def test_the_last_box_counts_or_what_follows_the_hashes(text: str, answer: str | None) -> None:
    assert final(text) == answer


def test_a_completion_without_an_answer_is_worth_nothing(pool: Pool) -> None:
    grade = math_reward(pool)
    long = r"\boxed{" + "7" * 9999 + "}"
    for text in ("72", "the answer is 72", r"\boxed{}", r"\boxed{72", r"\boxed{72} \boxed{", "", long):
        assert grade([Completion("", text, {"answer": "72"})]) == [Score(0.0)], text
    gsm8k = {"answer": "Natalia sold 48/2 = <<48/2=24>>24 clips.\n#### 72"}
    texts = ("She sold 72.\n#### 72", r"\boxed{72}", "#### 72.0", "#### $72", "#### 24")
    assert grade([Completion("", text, gsm8k) for text in texts]) == [Score(v) for v in (1.0, 1.0, 1.0, 1.0, 0.0)]


@pytest.mark.parametrize(
    ("text", "worth"),
    [
        ("3 boxes of 4 are 12 apples.", 1.0),
        ("12, because 3 x 4", 0.0),  # the last number counts
        ("they are -12", 0.0),
        ("\\boxed{12}, and not 13", 1.0),  # what is marked goes before
        ("#### 12", 1.0),
        ("12.00", 1.0),
        ("a dozen", 0.0),
    ],
)
def test_a_sentence_is_worth_its_last_number(pool: Pool, text: str, worth: float) -> None:
    found = math_reward(pool, find=mentioned)([Completion("", text, {"answer": "12"})])
    assert found == [Score(worth)]


def test_a_row_without_an_answer_fails_alone(pool: Pool) -> None:
    rows = [{"answer": "1"}, {"solution": "1"}, {"answer": " "}]
    found = math_reward(pool)([Completion("", r"\boxed{1}", row) for row in rows])
    assert found[0] == Score(1.0)
    assert [isinstance(each, Failure) and each.kind for each in found[1:]] == ["error", "error"]
    assert isinstance(found[1], Failure)
    assert "'answer'" in found[1].what


def test_a_bomb_takes_its_time_and_no_more() -> None:
    with symbolic(seconds=2.0, size=1) as pool:
        bombs = ["10^{10^{10}}", "9^{9^{9^{9}}}", "(10^{9})!"]
        written = [Completion("", f"\\boxed{{{each}}}", {"answer": "3"}) for each in [*bombs, "3+0"]]
        found = math_reward(pool)(written)
    # Some of them sympy sees through at once; none is right, one at least cannot be computed, and the next is graded.
    assert all(each == Score(0.0) or isinstance(each, Failure) for each in found[:3]), found
    assert "timeout" in [each.kind for each in found if isinstance(each, Failure)]
    assert found[3] == Score(1.0)


def test_rubbish_is_wrong_and_breaks_nothing(pool: Pool) -> None:
    rubbish = ["\\frac{", "}{", "\\", "$$", "\x00", "𝟙", "\\begin{matrix}", "{" * 200, "x" * 499, "exit()", "\n"]
    for each in rubbish:
        assert worth(pool, "4", each) == Score(0.0), each


def test_the_code_of_the_page_gives_what_the_page_says() -> None:
    page = (Path(__file__).parents[1] / "docs/rewards.md").read_text(encoding="utf-8")
    space: dict[str, Any] = {}
    exec(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0], space)
    assert space["graded"][0][0].total == 1.2
    told = {"math/mean": 1.0, "math/failed": 0, "form/mean": 1.0, "form/failed": 0}
    assert space["tally"](space["graded"]) == told
    assert str(told) in page


def test_without_math_verify_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'ironfn\[math\]'"):
        symbolic()


@given(st.fractions(max_denominator=10**6))
def test_a_fraction_is_itself_in_every_way_to_write_it(value: Fraction) -> None:
    above, below = value.numerator, value.denominator
    sign = "-" if above < 0 else ""
    ways = [f"{above}/{below}", f"\\frac{{{above}}}{{{below}}}", f"{sign}\\frac{{{abs(above)}}}{{{below}}}"]
    ways.append(f"{above:,}/{below:,}")
    assert [number(plain(way)) for way in ways] == [value] * 4
    for one, other in itertools.permutations(ways, 2):
        assert surely(plain(one), plain(other)) is True
    assert surely(plain(ways[0]), plain(f"{above + 1}/{below}")) is False


@given(st.text(alphabet="\\boxed{}#1 $*\n", max_size=60))
def test_no_text_breaks_what_reads_it(text: str) -> None:
    for found in (boxed(text), hashed(text), final(text)):
        assert found is None or (found.strip() and found in text)
    assert plain(plain(text)) == plain(text)
    number(plain(text))
