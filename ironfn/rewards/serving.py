"""Answer a line of JSON with another, in a process that its parent or the kernel may end: `worker`'s other side."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ironfn.rewards.values import Score, result_of


def serve(prepare: Callable[[Mapping[str, Any]], Callable[[Any], object]]) -> None:
    """Answer until standard input ends. prepare: from the settings to the function that answers a request.

    A clock of the kernel's ends a process whose parent can no longer do it. What is printed goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    first = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answer = prepare(first["settings"])
    resource.setrlimit(resource.RLIMIT_AS, (first["memory"], first["memory"]))
    _say(answers, {})
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, 2 * first["seconds"])
        said = _answer(answer, json.loads(line))
        signal.setitimer(signal.ITIMER_REAL, 0)
        _say(answers, said)


def _answer(answer: Callable[[Any], object], request: Any) -> dict[str, Any]:
    try:
        result = result_of(answer(request))
        return {"value": result.value} if isinstance(result, Score) else {"error": result.what, "kind": result.kind}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except Exception as error:  # also RecursionError; whatever it is, the parent hears of it
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def _say(answers: Any, said: Mapping[str, Any]) -> None:
    answers.write(json.dumps(said) + "\n")
    answers.flush()
