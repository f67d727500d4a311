"""Reward programs that give the right answers: they run in the sandbox, the answers are compared out here."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ironfn.rewards.sandbox import Ran, Sandbox
from ironfn.rewards.values import Completion, Failure, Result, Score

_FENCE = re.compile(r"^```[ \t]*(\w*)[ \t]*\n(.*?)(?:^```|\Z)", re.DOTALL | re.MULTILINE)


def program_of(text: str) -> str:
    """Return the program in a text: its last fenced block of Python or of no language; without any fence, all of it.

    >>> program_of("So:\\n```python\\nx = 1\\n```\\nIt prints:\\n```text\\n1\\n```")
    'x = 1\\n'
    """
    blocks = _FENCE.findall(text)
    ours = [body for language, body in blocks if language.lower() in ("", "python", "py", "python3")]
    return ours[-1] if ours else "" if blocks else text


def code_reward(sandbox: Sandbox, *, field: str = "tests", partial: bool = False) -> Callable[[Completion], Result]:
    """Return a reward of 1 for a program that passes all of a row's tests, else 0; or of the share that it passes.

    The row's field holds ``{"entry": "add", "cases": [{"args": [1, 2], "expected": 3}, ...]}`` for a function, or
    ``{"cases": [{"stdin": "1 2", "expected": "3"}, ...]}`` for a program that reads and prints; a ``before`` in it is
    put in front of the program. A program that fails, hangs or needs too much has no answers, and is worth 0; only a
    sandbox that does not work is a failure. Give it to `each`, whose time has to be longer than the sandbox's.
    """

    def grade(completion: Completion) -> Result:
        tests = _checked(completion.field(field))
        program = str(tests.get("before", "")) + program_of(completion.text)
        if "\0" in program:
            return Score(0.0)
        passed = (_called if "entry" in tests else _fed)(sandbox, program, tests)
        if isinstance(passed, Failure):
            return passed
        share = passed / len(tests["cases"])
        return Score(share if partial else float(share == 1.0))

    return grade


def written_tests(entry: str, inputs: Sequence[str], outputs: Sequence[str], before: str = "") -> dict[str, Any]:
    """Return the tests of a function whose arguments and values are written as Python, as in files of HumanEval.

    inputs: tuples of arguments, such as ``(1, 2)``. ValueError for what is no literal, or no JSON.

    >>> written_tests("add", ["(1, 2)"], ["3"])
    {'entry': 'add', 'before': '', 'cases': [{'args': [1, 2], 'expected': 3}]}
    """
    cases: list[dict[str, Any]] = []
    for given, expected in zip(inputs, outputs, strict=True):
        try:
            pair = ast.literal_eval(given), ast.literal_eval(expected)
            args, value = json.loads(json.dumps(pair, allow_nan=False))
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
            raise ValueError(f"{given[:80]} -> {expected[:80]} is no test of JSON values: {error}") from None
        cases.append({"args": args, "expected": value})
    return {"entry": entry, "before": before, "cases": cases}


def _checked(tests: Any) -> Mapping[str, Any]:
    given = "args" if isinstance(tests, Mapping) and "entry" in tests else "stdin"
    kind = list if given == "args" else str
    cases = tests.get("cases") if isinstance(tests, Mapping) else None
    if not isinstance(cases, list) or not cases:
        raise ValueError(
            "the row's tests hold no cases; give {entry, cases: [{args, expected}]} or {cases: [{stdin, expected}]}"
        )
    for at, case in enumerate(cases):
        if not isinstance(case, Mapping) or not isinstance(case.get(given), kind) or "expected" not in case:
            wanted = f"{given} (a {kind.__name__}) and expected"
            raise ValueError(f"case {at} of the row's tests needs {wanted}; it is {str(case)[:80]}")
    return tests


def _called(sandbox: Sandbox, program: str, tests: Mapping[str, Any]) -> int | Failure:
    """Return how many calls gave what is expected."""
    cases: Sequence[Mapping[str, Any]] = tests["cases"]
    ran = sandbox.call(program, tests["entry"], [case["args"] for case in cases])
    if isinstance(ran, Failure):
        return ran
    lines = ran.output.splitlines()
    if ran.why != "done" or len(lines) != len(cases):
        return 0
    return sum(_gave(line, case["expected"]) for line, case in zip(lines, cases, strict=True))


def _fed(sandbox: Sandbox, program: str, tests: Mapping[str, Any]) -> int | Failure:
    """Return how many runs printed what is expected, white space at the ends of lines aside, and ended well."""
    passed = 0
    for case in tests["cases"]:
        ran = sandbox.feed(program, case["stdin"])
        if isinstance(ran, Failure):
            return ran
        passed += _printed(ran, str(case["expected"]))
    return passed


def _printed(ran: Ran, expected: str) -> bool:
    if ran.why != "done" or ran.code != 0:
        return False
    given, wanted = (text.rstrip().splitlines() for text in (ran.output.decode(errors="replace"), expected))
    return [line.rstrip() for line in given] == [line.rstrip() for line in wanted]


def _gave(line: bytes, expected: Any) -> bool:
    try:
        said = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return isinstance(said, dict) and set(said) == {"value"} and same(said["value"], expected)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no answer")


def same(given: Any, expected: Any) -> bool:
    """Tell whether two JSON values are equal, by type and value; floats to a relative 1e-9.

    >>> same(1, True), same(1, 1.0), same([0.1 + 0.2], (0.3,)), same({"a": None}, {"a": None})
    (False, False, True, True)
    """
    if isinstance(expected, list | tuple):
        return isinstance(given, list) and len(given) == len(expected) and all(map(same, given, expected))
    if isinstance(expected, Mapping):
        return (
            isinstance(given, dict)
            and set(given) == set(expected)
            and all(same(value, expected[key]) for key, value in given.items())
        )
    if type(given) is not type(expected):
        return False
    return math.isclose(given, expected, rel_tol=1e-9) if isinstance(expected, float) else given == expected
