"""Grade answers by `reasoning-gym`, in a process of its own: the other side of `ironfn.rewards.gym`."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from ironfn.rewards.gym import FIELD, Task, made
from ironfn.rewards.serving import serve


def prepare(_: Mapping[str, Any]) -> Callable[[Any], float]:
    """Return the function that grades an answer to a question, which is a row's ``gym``."""
    importlib.import_module("reasoning_gym")  # which takes seconds, before any answer has to be quick

    @lru_cache(maxsize=64)
    def dataset(task: str) -> Any:
        return made(Task(**json.loads(task)))

    def grade(request: Any) -> float:
        question, answer = request
        if not isinstance(question, dict):
            raise ValueError(f"the row has no {FIELD!r} that names a task; `ironfn data gym` writes such rows")
        task = {name: value for name, value in question.items() if name != "index"}
        found = dataset(json.dumps(task, sort_keys=True))
        return found.score_answer(answer.strip(), found[question["index"]])

    return grade


if __name__ == "__main__":
    serve(prepare)
