"""Let every process tell, through the store that joins them, what it does; and find out who is gone."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed import Store

from ironfn.mesh.grid import Grid

PERIOD = 0.25  # seconds between two signs of life
HOLDER = "the process that holds it"
T = TypeVar("T")


def within(seconds: float, work: Callable[[], T]) -> T:
    """Return what a work returns, or raise what it raises. TimeoutError after so many seconds: it is left behind.

    The limits of torch's store do not bind: it tries a port where nobody listens twice, for the whole time each, and
    where its process is stopped it waits without end for leave to give up.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="ironfn-within", daemon=True)
    thread.start()
    thread.join(max(seconds, 0.0))
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:.1f} s")
    return results[0]


def no_answer(holder: str) -> str:
    """Say that the store does not answer, and whose fault it is."""
    return f"the store does not answer: {holder} is gone or stopped"


class Roll:
    """Publish a sign of life of this rank every quarter of a second: a number that grows, and what the rank does.

    ``doing`` may be set to anything that has a text; it is read by the next sign of life. holder: whose the store is.
    """

    def __init__(self, store: Store, grid: Grid, rank: int, holder: str = HOLDER) -> None:
        self.doing: object = "connects"
        # A connection of its own, that no other thread blocks. torch's stubs do not know the method.
        self._store: Store = store.clone()  # pyright: ignore[reportAttributeAccessIssue]
        self._grid, self._rank, self._holder = grid, rank, holder
        self._signs, self._gone = 0, False
        self._stop, self._lock = threading.Event(), threading.Lock()
        self.sign()
        self._thread = threading.Thread(target=self._beat, name="ironfn-roll", daemon=True)
        self._thread.start()

    def sign(self) -> None:
        """Publish what this rank does now. Without effect where the store is gone."""
        with self._lock, contextlib.suppress(RuntimeError):
            self._signs += 1
            sign = {"signs": self._signs, "gone": self._gone, "doing": str(self.doing)}
            self._store.set(f"roll/{self._rank}", json.dumps(sign))

    def leave(self, how: str) -> None:
        """Publish that this rank is gone, and how; nothing comes after it."""
        self.doing, self._gone = how, True
        self._stop.set()
        with contextlib.suppress(TimeoutError):
            within(1.0, self.sign)
        self._thread.join(1.0)

    def call(self, window: float) -> str:
        """Return what every rank does, in one line. Waits up to ``window`` seconds for a sign of life of each."""
        try:
            return within(window + 1.0, lambda: self._listen(window))
        except TimeoutError:
            return no_answer(self._holder)

    def _beat(self) -> None:
        while not self._stop.wait(PERIOD):
            self.sign()

    def _listen(self, window: float) -> str:
        end = time.monotonic() + window
        self.sign()
        try:
            first = last = self._read()
            while time.monotonic() < end and not all(self._alive(r, first, last) for r in range(self._grid.world)):
                time.sleep(PERIOD / 5)
                last = self._read()
        except RuntimeError:
            return f"the store is gone, and with it {self._holder}"
        return "; ".join(self._told(r, self._alive(r, first, last), last, window) for r in range(self._grid.world))

    def _read(self) -> dict[int, dict[str, Any]]:
        keys = {rank: f"roll/{rank}" for rank in range(self._grid.world)}
        return {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}

    def _alive(self, rank: int, first: dict[int, dict[str, Any]], last: dict[int, dict[str, Any]]) -> bool:
        if rank == self._rank:
            return True
        return rank in last and (last[rank]["gone"] or rank not in first or last[rank]["signs"] > first[rank]["signs"])

    def _told(self, rank: int, alive: bool, last: dict[int, dict[str, Any]], window: float) -> str:
        name = self._grid.name(rank)
        if rank not in last:
            return f"{name} never came"
        doing = last[rank]["doing"]
        return f"{name} {doing}" if alive else f"{name} is dead or stopped, silent for {window:.1f} s (before: {doing})"
