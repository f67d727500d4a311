"""Compare two answers by algebra, in a process of its own: the other side of `ironfn.rewards.math`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from ironfn.rewards.serving import serve


def prepare(settings: Mapping[str, Any]) -> Callable[[Any], bool]:
    """Return the function that compares ``right`` with ``given``, both ways. Its alarms are off: the parent kills."""
    from math_verify import parse, verify

    logging.disable()

    @functools.lru_cache(maxsize=4096)  # the answers to one question have the right one in common, and each other
    def read(answer: str) -> list[Any]:
        return parse(f"${answer}$", parsing_timeout=0)

    def equal(request: Mapping[str, str]) -> bool:
        right, given = read(request["right"]), read(request["given"])
        if not right or not given or not near(right[0], given[0]):
            return False
        return bool(verify(right, given, timeout_seconds=0) or verify(given, right, timeout_seconds=0))

    equal({"right": "\\sqrt{4}", "given": "2"})  # what is made at the first use is made before the clock runs
    return equal


def near(first: Any, second: Any) -> bool:
    """Tell whether two parsed answers may be equal: numbers, also inside sets, have to be close by their own measure.

    `math-verify` rounds differences at the sixth place, where 1/2^99 and 1/2^98 are both nothing.
    """
    from sympy import Expr, Float, Set

    if isinstance(first, Expr) and isinstance(second, Expr) and first.is_number and second.is_number:
        measured = first.has(Float) or second.has(Float)
        values = [each.evalf(40) for each in (first, second)]
        bound = (1e-6 if measured else 1e-30) * max(map(abs, values))
        return bool(abs(values[0] - values[1]) <= bound)
    if isinstance(first, Set) and type(first) is type(second) and len(first.args) == len(second.args):
        return all(map(near, first.args, second.args))
    return True


if __name__ == "__main__":
    serve(prepare)
