"""Grade completions by several rewards at once, and add up what they give."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from attrs import field, frozen

from ironfn.rewards.values import Completion, Failure, Grader, Result, Score, result_of


@frozen
class Reward:
    """Name a grader, weigh it, and say what its scores may be and what becomes of a completion without one.

    low, high: a score outside of them is a failure. on_failure: leave out the ``sample``, leave out its whole
    ``group``, or ``stop`` the run.
    """

    name: str
    grade: Grader
    weight: float = field(default=1.0)
    low: float = 0.0
    high: float = 1.0
    on_failure: Literal["sample", "group", "stop"] = "sample"

    def __attrs_post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError(f"reward {self.name!r} has the weight {self.weight}; a finite number is wanted")
        if not self.low < self.high:  # NaN too
            raise ValueError(f"reward {self.name!r} has the bounds {self.low} to {self.high}; low has to be below high")


@frozen
class Graded:
    """Hold what each reward gave a completion, and their weighted sum. total: None where it is left out."""

    total: float | None
    parts: Mapping[str, Result]


class RewardError(ValueError):
    """Say which reward failed where a failure stops the run."""


def grade(rewards: Sequence[Reward], groups: Sequence[Sequence[Completion]]) -> list[list[Graded]]:
    """Return what the rewards give each completion of each group, in the order of the groups.

    A failure is never a score: the completion, or its group, has no total. RewardError where the reward's policy is to
    stop. ValueError for no reward or two of one name.
    """
    names = [reward.name for reward in rewards]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"rewards need names of their own, one at least; they are {', '.join(names) or 'none'}")
    every = [completion for group in groups for completion in group]
    columns = {reward.name: _column(reward, every) for reward in rewards}
    rows = iter([{name: column[at] for name, column in columns.items()} for at in range(len(every))])
    return [_group(rewards, [next(rows) for _ in group]) for group in groups]


def _column(reward: Reward, completions: Sequence[Completion]) -> list[Result]:
    try:
        given: list[Result] = [_bounded(reward, result_of(result)) for result in reward.grade(completions)]
    except Exception as error:  # whatever a reward raises is no reason to lose the step
        given = [Failure("error", f"{type(error).__name__}: {error}")] * len(completions)
    if len(given) != len(completions):
        given = [Failure("error", f"{len(given)} results for {len(completions)} completions")] * len(completions)
    failed = next((each for each in given if isinstance(each, Failure)), None)
    if failed is not None and reward.on_failure == "stop":
        raise RewardError(
            f"reward {reward.name!r} failed ({failed.kind}: {failed.what}); mend it, or let on_failure be sample or "
            "group to go on without what it cannot grade"
        )
    return given


def _bounded(reward: Reward, result: Result) -> Result:
    if isinstance(result, Failure) or reward.low <= result.value <= reward.high:
        return result
    return Failure("bounds", f"a reward of {result.value} is outside of {reward.low} to {reward.high}")


def _group(rewards: Sequence[Reward], rows: Sequence[Mapping[str, Result]]) -> list[Graded]:
    lost = any(
        isinstance(row[reward.name], Failure) for reward in rewards if reward.on_failure == "group" for row in rows
    )
    return [Graded(None if lost else _total(rewards, row), row) for row in rows]


def _total(rewards: Sequence[Reward], row: Mapping[str, Result]) -> float | None:
    total = 0.0
    for reward in rewards:
        result = row[reward.name]
        if isinstance(result, Failure):
            return None
        total += reward.weight * result.value
    return total


def tally(groups: Sequence[Sequence[Graded]]) -> dict[str, float]:
    """Return each reward's mean over what it scored (NaN for none) and its failures, all and by kind.

    >>> tally([[Graded(1.0, {"math": Score(1.0)}), Graded(None, {"math": Failure("timeout", "5 s")})]])
    {'math/mean': 1.0, 'math/failed': 1, 'math/timeout': 1}
    """
    told: dict[str, float] = {}
    rows = [graded.parts for group in groups for graded in group]
    for name in rows[0] if rows else ():
        scores = [result.value for row in rows if isinstance(result := row[name], Score)]
        kinds = [result.kind for row in rows if isinstance(result := row[name], Failure)]
        told[f"{name}/mean"] = math.fsum(scores) / len(scores) if scores else math.nan
        told[f"{name}/failed"] = len(kinds)
        told |= {f"{name}/{kind}": kinds.count(kind) for kind in sorted(set(kinds))}
    return told
