"""Let a function grade many completions at once, each within a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue

from ironfn.rewards.values import Completion, Failure, Grader, Result, result_of


def each(function: Callable[[Completion], object], *, seconds: float = 30.0, threads: int = 4) -> Grader:
    """Return a grader that calls a function once a completion, in some threads, the results in order.

    seconds: what one call may take. Python cannot end a thread: a call that is late is a failure at once, and its
    thread is left to itself while another takes its place. What may hang for good belongs into a process
    (`ironfn.rewards.worker`), which is killed. The function has to bear being called by several threads.
    """
    if not seconds > 0 or threads < 1:
        raise ValueError(f"{seconds} s and {threads} threads grade nothing; give more than 0 s and at least 1 thread")

    def grade(completions: Sequence[Completion]) -> list[Result]:
        return _Round(function, completions, seconds).run(threads)

    return grade


class _Round:
    """Hold what is graded now: who is at what since when, and what is known already."""

    def __init__(
        self, function: Callable[[Completion], object], completions: Sequence[Completion], seconds: float
    ) -> None:
        self.function = function
        self.completions = completions
        self.seconds = seconds
        self.turns: Iterator[int] = iter(range(len(completions)))
        self.begun: dict[int, float] = {}
        self.done: SimpleQueue[tuple[int, Result]] = SimpleQueue()
        self.lock = threading.Lock()

    def run(self, threads: int) -> list[Result]:
        for _ in range(min(threads, len(self.completions))):
            self._start()
        known: dict[int, Result] = {}
        while len(known) < len(self.completions):
            at, result = self._next()
            known[at] = result
        return [known[at] for at in range(len(self.completions))]

    def _start(self) -> None:
        threading.Thread(target=self._work, name="reward", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self.lock:
                at = next(self.turns, None)
                if at is None:
                    return
                self.begun[at] = time.monotonic()
            try:
                result = result_of(self.function(self.completions[at]))
            except Exception as error:
                result = Failure("error", f"{type(error).__name__}: {error}")
            with self.lock:
                if self.begun.pop(at, None) is None:  # given up meanwhile: another thread does this one's work
                    return
            self.done.put((at, result))

    def _next(self) -> tuple[int, Result]:
        """Return the next result, or the failure of who has taken too long."""
        while True:
            with self.lock:
                now = time.monotonic()
                first = min(self.begun, key=lambda at: self.begun[at], default=None)
                left = self.seconds if first is None else self.begun[first] + self.seconds - now
                if first is not None and left <= 0:
                    del self.begun[first]
                    self._start()
                    return first, Failure("timeout", f"no reward within {self.seconds:g} s")
            try:
                return self.done.get(timeout=left)
            except Empty:
                continue
