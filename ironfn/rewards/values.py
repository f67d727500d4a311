"""Say what is graded, and what a grade is: a number, or the reason why there is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from attrs import frozen

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@frozen
class Completion:
    """Hold one text that was written for a prompt. row: the fields of the prompt's row, such as ``answer``."""

    prompt: str
    text: str
    row: Mapping[str, Any] = _NOTHING
    ids: tuple[int, ...] = ()

    def field(self, name: str) -> Any:
        """Return a field of the row. ValueError where it has none."""
        if name not in self.row:
            raise ValueError(f"the row has no field {name!r} to grade by; it has {', '.join(self.row) or 'none'}")
        return self.row[name]


@frozen
class Score:
    """Say what a completion is worth."""

    value: float


@frozen
class Failure:
    """Say why there is no score. kind: timeout, crash, error, bounds or refused, to count them by."""

    kind: str
    what: str


Result = Score | Failure
Grader = Callable[[Sequence[Completion]], Sequence[Result]]


def result_of(value: object) -> Result:
    """Return what a function's answer means: a finite number is a score, a result is itself, all else a failure.

    A number is whatever Python makes a float of, such as numpy's and torch's, but no text.
    """
    if isinstance(value, Score | Failure):
        return value
    if isinstance(value, str) or not hasattr(type(value), "__float__"):
        return Failure("error", f"a reward of type {type(value).__name__} is no number")
    try:
        number = float(value)  # pyright: ignore[reportArgumentType]: it has what makes it one
    except OverflowError:
        return Failure("bounds", "a reward too large for a float")
    except (TypeError, ValueError, RuntimeError) as error:  # arrays of several
        return Failure("error", f"a reward of type {type(value).__name__} is no number: {error}")
    return Score(number) if math.isfinite(number) else Failure("bounds", f"a reward of {number}")
