"""Grade answers by `reasoning-gym`, in a process of its own: the other side of `ironfn.rewards.gym`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ironfn.rewards.gym import Task, made
from ironfn.rewards.serving import serve


def prepare(settings: Mapping[str, Any]) -> Callable[[Any], float]:
    """Return the function that grades an answer to the question of an index."""
    dataset = made(Task(**settings))
    return lambda request: dataset.score_answer(request["answer"].strip(), dataset[request["index"]])


if __name__ == "__main__":
    serve(prepare)
