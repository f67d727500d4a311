"""Make graders of what only a command may read: a function by its path, a key from a named environment variable."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import asdict

from ironfn.rewards.serving import serve
from ironfn.rewards.values import Completion, Grader, Result
from ironfn.rewards.worker import Limits, Pool


def imported(path: str) -> Callable[[Completion], object]:
    """Return the function of a path such as ``my_package.rewards:length``. ValueError where there is none."""
    module, _, name = path.partition(":")
    try:
        found = importlib.import_module(module) if module and name else None
    except ImportError as error:
        what = f"{error}; where its file is yours, put its folder on PYTHONPATH"
        raise ValueError(f"the reward {path!r} cannot be imported: {what}") from error
    except Exception as error:  # whatever somebody's module does where it is imported
        raise ValueError(f"the reward {path!r} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(found, name, None)
    if not callable(function):
        raise ValueError(f"the reward {path!r} is no function; name one as package.module:function")
    return function


def function_pool(path: str, *, seconds: float = 30.0, size: int = 1) -> Pool:
    """Return processes that call a function by its path; each is killed where a call takes longer."""
    imported(path)
    return Pool(__name__, {"path": path}, Limits(seconds=seconds, memory=1 << 36), size)


def function_reward(pool: Pool) -> Grader:
    """Return a grader that asks such a pool: the function is given a Completion and returns a number."""

    def grade(completions: Sequence[Completion]) -> list[Result]:
        return pool.every([asdict(completion) | {"row": dict(completion.row)} for completion in completions])

    return grade


def key_from(name: str) -> str:
    """Return the key that an environment variable holds. ValueError, without any key in it, where it is not set."""
    key = os.environ.get(name, "").strip()
    if not key:
        raise ValueError(f"the environment variable {name} holds no key; set it before the run starts")
    return key


def _prepare(settings: Mapping[str, Any]) -> Callable[[Any], object]:
    function = imported(settings["path"])
    return lambda said: function(Completion(said["prompt"], said["text"], said["row"], tuple(said["ids"])))


if __name__ == "__main__":
    serve(_prepare)
