"""Take questions from `reasoning-gym`, and grade answers as it does: rows that anybody can make again."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import asdict, frozen

from ironfn.rewards.math import final
from ironfn.rewards.values import Completion, Grader, Result
from ironfn.rewards.worker import Limits, Pool

FIELD = "gym"
"""The field of a row that names its task, and the question's number in it."""


@frozen
class Task:
    """Name a data set of `reasoning-gym`, such as ``chain_sum``, with its size, its seed and its own settings."""

    name: str
    size: int
    seed: int
    settings: Mapping[str, Any] = {}


def require_gym() -> None:
    """Raise a ValueError where the package is missing."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ValueError("these tasks need reasoning-gym; install it: pip install 'ironfn[gym]'")


def made(task: Task) -> Any:
    """Return the data set itself. ValueError where the package is missing, or does not know the task."""
    require_gym()
    import reasoning_gym  # pyright: ignore[reportMissingImports]: an extra

    try:
        return reasoning_gym.create_dataset(task.name, size=task.size, seed=task.seed, **task.settings)
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"reasoning-gym cannot make {task.size} of {task.name!r}: {error}") from None


def rows(task: Task) -> list[dict[str, Any]]:
    """Return the task's rows: ``prompt``, ``answer``, and ``gym``, by which `gym_reward` knows the question again."""
    told = asdict(task)
    return [
        {"prompt": entry["question"], "answer": entry["answer"], FIELD: {**told, "index": at}}
        for at, entry in enumerate(made(task))
    ]


def gym_pool(*, seconds: float = 10.0, size: int = 1) -> Pool:
    """Return the processes that grade answers to `rows`. ValueError where the package is missing."""
    require_gym()
    return Pool("ironfn.rewards.gym_worker", {}, Limits(seconds=seconds), size)


def gym_reward(pool: Pool) -> Grader:
    """Return a grader that gives what the row's task gives for a completion's final answer, or for all of its text."""

    def grade(completions: Sequence[Completion]) -> list[Result]:
        return pool.every([[each.row.get(FIELD), final(each.text) or each.text] for each in completions])

    return grade
