"""Write small tasks of programming: ``ironfn data programs``."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import click

from .writing import write_new

_Kind: TypeAlias = tuple[str, list[tuple[Any, ...]], dict[str, Callable[..., Any]]]

_PAIRS: _Kind = ("a, b", [(1, 2), (5, -3), (10, 0)], {
    "the sum of a and b": lambda a, b: a + b,
    "the difference of a and b": lambda a, b: a - b,
    "the product of a and b": lambda a, b: a * b,
    "the larger of a and b": max,
    "the smaller of a and b": min,
})  # fmt: skip
_NUMBERS: _Kind = ("n", [(3,), (-4,), (0,)], {
    "the square of n": lambda n: n * n,
    "the absolute value of n": abs,
    "twice n": lambda n: 2 * n,
    "True if n is even": lambda n: n % 2 == 0,
    "True if n is positive": lambda n: n > 0,
})  # fmt: skip
_LISTS: _Kind = ("numbers", [([3, 1, 2],), ([5, -1],), ([7],)], {
    "the sum of the numbers": sum,
    "the largest of the numbers": max,
    "the smallest of the numbers": min,
    "how many numbers there are": len,
    "the first of the numbers": lambda numbers: numbers[0],
    "the last of the numbers": lambda numbers: numbers[-1],
    "the numbers in ascending order": sorted,
    "the numbers in reverse": lambda numbers: numbers[::-1],
})  # fmt: skip
_TEXTS: _Kind = ("text", [("Hello",), ("a b c",), ("XY z",)], {
    "the length of the text": len,
    "the text in upper case": str.upper,
    "the text in lower case": str.lower,
    "the text backwards": lambda text: text[::-1],
    "the number of words in the text": lambda text: len(text.split()),
    "the first character of the text": lambda text: text[0],
    "True if the text is empty": lambda text: text == "",
})  # fmt: skip
_NAMES = ("answer", "compute", "f", "g", "helper", "result", "solve", "task")


@click.command("programs")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--seed", default=0, show_default=True, help="Draws the order.")
def command(file: Path, seed: int) -> None:
    """Write functions of one line to be finished to FILE, to try the reward `code` without any download.

    A row's prompt is a function up to its return, as HumanEval has them, and its answer the tests.
    """
    click.echo(f"{file}: {write_new(file, lambda: _rows(random.Random(seed))):,} tasks")


def _rows(draw: random.Random) -> list[dict[str, Any]]:
    rows = [
        _row(name, arguments, what, inputs, right)
        for arguments, inputs, tasks in (_PAIRS, _NUMBERS, _LISTS, _TEXTS)
        for what, right in tasks.items()
        for name in _NAMES
    ]
    draw.shuffle(rows)
    return rows


def _row(
    name: str, arguments: str, what: str, inputs: list[tuple[Any, ...]], right: Callable[..., Any]
) -> dict[str, Any]:
    shown = f">>> {name}({', '.join(map(repr, inputs[0]))})\n    {right(*inputs[0])!r}"
    start = f'def {name}({arguments}):\n    """Return {what}.\n\n    {shown}\n    """\n    return'
    cases = [{"args": list(given), "expected": right(*given)} for given in inputs]
    return {"prompt": start, "answer": {"entry": name, "before": start, "cases": cases}}
