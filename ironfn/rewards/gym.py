"""Take questions from `reasoning-gym`, and grade answers as it does: rows that anybody can make again."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import asdict, frozen

from ironfn.rewards.math import final
from ironfn.rewards.values import Completion, Grader, Result
from ironfn.rewards.worker import Limits, Pool


@frozen
class Task:
    """Name a data set of `reasoning-gym`, such as ``chain_sum``, with its size, its seed and its own settings."""

    name: str
    size: int
    seed: int
    settings: Mapping[str, Any] = {}


def made(task: Task) -> Any:
    """Return the data set itself. ValueError where the package is missing, or does not know the task."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ValueError("these tasks need reasoning-gym; install it: pip install 'ironfn[gym]'")
    import reasoning_gym  # pyright: ignore[reportMissingImports]: an extra

    try:
        return reasoning_gym.create_dataset(task.name, size=task.size, seed=task.seed, **task.settings)
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"reasoning-gym cannot make {task.size} of {task.name!r}: {error}") from None


def rows(task: Task) -> list[dict[str, Any]]:
    """Return the task's rows: ``prompt``, ``answer``, and ``index`` by which `gym_reward` knows the question."""
    return [
        {"prompt": entry["question"], "answer": entry["answer"], "index": at} for at, entry in enumerate(made(task))
    ]


def gym_pool(task: Task, *, seconds: float = 5.0, size: int = 1) -> Pool:
    """Return the processes that grade a task's answers. ValueError as for `made`, which is done once to see."""
    made(task)
    return Pool("ironfn.rewards.gym_worker", asdict(task), Limits(seconds=seconds), size)


def gym_reward(pool: Pool) -> Grader:
    """Return a grader that gives what the task gives for a completion's final answer, or for all of its text."""

    def grade(completions: Sequence[Completion]) -> list[Result]:
        answers = [final(each.text) or each.text for each in completions]
        asked = zip(completions, answers, strict=True)
        return pool.every([{"index": each.field("index"), "answer": answer} for each, answer in asked])

    return grade
