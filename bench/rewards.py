"""Time what grades: programs in the sandbox, answers of mathematics; and count the pairs that are judged wrongly."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

from bench.figure import Figure
from ironfn.rewards.code import code_reward
from ironfn.rewards.math import math_reward, symbolic
from ironfn.rewards.sandbox import Sandbox
from ironfn.rewards.values import Completion, Score

RUNS, CORES, ANSWERS = 100, 2, 1000
EQUAL = (
    (r"\frac12", r"\frac{1}{2}"),
    (r"\frac{1}{2}", "0.5"),
    ("1,000", "1000"),
    ("(0,12.5)", "0<x<12.5"),
    ("**73**", "73"),
    (r"\text{E}", "E"),
    (r"28\%", "28"),
)
UNEQUAL = (
    ("1/2^{99}", "1/2^{98}"),
    ("(0,1)", "(0,1.5)"),
    ("1331 and 1728", "1728"),
    (r"\pm 2021", "2021"),
    ("[0,1]", "(0,1)"),
)
"""Pairs that public graders had wrong, in one order or in both."""


def figures() -> Iterator[Figure]:
    """Yield the figures of rewards."""
    yield from _programs()
    yield from _answers()


def _programs() -> Iterator[Figure]:
    cases = [{"args": [list(range(n, 0, -1))], "expected": list(range(1, n + 1))} for n in range(5)]
    tests = {"entry": "sort", "cases": cases}
    grade = code_reward(Sandbox())
    sources = [f"def sort(items):\n    return sorted(items)  # {n}" for n in range(RUNS)]
    written = [Completion("", source, {"tests": tests}) for source in sources]
    grade(written[0])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    with ThreadPoolExecutor(CORES) as pool:
        results = list(pool.map(grade, written))
    seconds = time.perf_counter() - began
    flood = Completion("", "import os\nwhile True: os.write(3, b'x' * 65536)", {"tests": tests})
    results.append(Score(1.0) if grade(flood) == Score(0.0) else Score(0.0))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    wrong = sum(result != Score(1.0) for result in results)
    note = f"{RUNS} programs of {len(cases)} calls, {CORES} at a time; {wrong} wrong"
    yield Figure("sandbox runs a second", 0.0 if wrong else RUNS / seconds, ">= 20", note)
    yield Figure("sandbox, MB in the parent", grown, "<= 50", "the peak over these runs and one that floods its output")


def _answers() -> Iterator[Figure]:
    with symbolic(size=CORES) as pool:
        grade = math_reward(pool)
        began = time.perf_counter()
        right = grade([_written(*_pair(n)) for n in range(ANSWERS)])
        seconds = time.perf_counter() - began
        wrong = sum(result != Score(1.0) for result in right)
        note = f"half of them by algebra, start included; {wrong} wrong"
        yield Figure("math, s for 1,000 answers", seconds, "< 10", note)
        both = [(pair, 1.0) for pair in EQUAL] + [(pair, 0.0) for pair in UNEQUAL]
        turned = list(chain.from_iterable(((pair, worth), (pair[::-1], worth)) for pair, worth in both))
        found = grade([_written(*pair) for pair, _ in turned])
        missed = [pair for result, (pair, worth) in zip(found, turned, strict=True) if result != Score(worth)]
        note = f"of {len(turned)}, either way round {missed or ''}"
        yield Figure("math, pairs judged wrongly", len(missed), "== 0", note)


def _pair(n: int) -> tuple[str, str]:
    """Return an answer and another way to write it; every second one needs algebra."""
    a, b = n % 37 + 2, n % 11 + 2
    forms = (
        (f"{a},000", f"{a}000.0"),
        (rf"\sqrt{{{a * b * b}}}", rf"{b}\sqrt{{{a}}}"),
        (rf"\frac{{{a}}}{{{b}}}", f"{a}/{b}"),
        (f"x^2-{a * a}", f"(x-{a})(x+{a})"),
    )
    return forms[n % 4]


def _written(right: str, given: str) -> Completion:
    return Completion("", f"it is \\boxed{{{given}}}", {"answer": right})
