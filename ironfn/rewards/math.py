"""Reward the right answer to a question of mathematics: exact, numeric, then symbolic through `math-verify`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

from ironfn.rewards.answers import boxed, hashed, last_number, plain, surely
from ironfn.rewards.values import Completion, Failure, Grader, Result, Score
from ironfn.rewards.worker import Limits, Pool

LONGEST = 500
"""Characters of a given answer beyond which it is wrong, unless the right one is about as long."""


def final(text: str) -> str | None:
    """Return the final answer of a text: its last box, or else what follows its last ``####``."""
    return boxed(text) if "\\boxed" in text or "\\fbox" in text else hashed(text)


def mentioned(text: str) -> str | None:
    """Return the final answer of a text where it is marked as one, or else the last number in it."""
    return final(text) or last_number(text)


def math_reward(pool: Pool, *, field: str = "answer", find: Callable[[str], str | None] = final) -> Grader:
    """Return a grader that gives 1 for the answer that a row's field holds, in whatever form, and 0 for others.

    find: from a completion to its answer; where it finds none, that is 0. The row's field may be an answer or a text
    that ends in one. Two answers are equal where `math-verify` says so in either order, so that it does not matter
    which is given. pool: of `symbolic()`.
    """

    def grade(completions: Sequence[Completion]) -> list[Result]:
        known: list[Result | None] = []
        asked: list[dict[str, str]] = []
        for completion in completions:
            try:
                right, given = plain(_right(str(completion.field(field)))), plain(find(completion.text) or "")
                known.append(_known(right, given))
            except ValueError as error:  # this row's fault, no other's
                known.append(Failure("error", str(error)))
                continue
            if known[-1] is None:
                asked.append({"right": right, "given": given})
        told = iter(pool.every(asked))
        return [next(told) if each is None else each for each in known]

    return grade


def symbolic(seconds: float = 5.0, size: int = 2) -> Pool:
    """Return the processes that compare by algebra. ValueError where `math-verify` is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError("the math reward needs math-verify; install it: pip install 'ironfn[math]'")
    return Pool("ironfn.rewards.math_worker", {}, Limits(seconds=seconds), size)


def _right(answer: str) -> str:
    return final(answer) or answer


def _known(right: str, given: str) -> Result | None:
    if not right:
        return Failure("error", "the row's answer is empty")
    if not given or len(given) > max(LONGEST, 2 * len(right)):
        return Score(0.0)
    equal = surely(right, given)
    return None if equal is None else Score(float(equal))
