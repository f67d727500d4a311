"""Hold what a policy wrote, and what it was worth."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve, frozen

from ironfn.generate.rollout import Written
from ironfn.rewards.manager import Graded
from ironfn.rewards.values import Score


@frozen
class Sample:
    """Hold a completion: what was written, its reward (None: its graders failed), and what each of them gave."""

    written: Written
    reward: float | None
    parts: dict[str, float | str]


@frozen
class Rollout:
    """Hold what was written at one step: the places of its prompts in the walk over them, and their completions."""

    step: int
    numbers: list[int]
    groups: list[list[Sample]]

    @property
    def rewards(self) -> torch.Tensor:
        """Return [prompts, completions], NaN where there is none."""
        return torch.tensor([[math.nan if s.reward is None else s.reward for s in group] for group in self.groups])


def written(told: dict[str, Any]) -> Written:
    """Read a completion that was written as JSON."""
    return Written(tuple(told["ids"]), tuple(told["log_probs"]), told["reason"])


def parts_of(graded: Graded) -> dict[str, float | str]:
    """Return what each reward gave a completion: a number, or why there is none."""
    return {
        name: float(result.value) if isinstance(result, Score) else f"{result.kind}: {result.what}"
        for name, result in graded.parts.items()
    }


def mean_of(groups: Sequence[Sequence[Sample]]) -> float:
    """Return the mean reward of all that have one, NaN where none has."""
    known = [one.reward for group in groups for one in group if one.reward is not None]
    return statistics.fmean(known) if known else math.nan


def differs(group: Sequence[Sample]) -> bool:
    """Tell whether a group's rewards teach anything."""
    known = [sample.reward for sample in group if sample.reward is not None]
    return len(set(known)) > 1


def best(rollout: Rollout, count: int) -> Rollout:
    """Keep as many groups as were wanted: those that teach first, in their order."""
    order = sorted(range(len(rollout.groups)), key=lambda k: not differs(rollout.groups[k]))[:count]
    return evolve(rollout, numbers=[rollout.numbers[k] for k in order], groups=[rollout.groups[k] for k in order])
