"""Run an engine in a thread of its own, for whoever asks from other threads."""

from __future__ import annotations

import itertools
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Iterable

from attrs import frozen

from ironfn.generate.blocks import free_count, idle_count
from ironfn.generate.engine import End, Engine, Event, Request, advance, cancel, submit

from .asked import Refusal

Sink = Callable[[list[Event] | Refusal], None]
"""Takes what happened to a request, in the engine's thread; or why nothing more will."""


@frozen
class _Submit:
    requests: tuple[Request, ...]


@frozen
class _Cancel:
    key: object
    number: int | None


class Service:
    """Hold an engine's thread. Every method may be called from any thread.

    make: makes an idle engine, at first and after a fault. room: continuations that may wait or run at a time.
    """

    def __init__(self, make: Callable[[], Engine], room: int) -> None:
        self.room, self.closing = room, False
        self._make, self._keys = make, itertools.count()
        self._commands: queue.SimpleQueue[_Submit | _Cancel | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._sinks: dict[object, Sink] = {}
        self._left: dict[object, set[int]] = {}  # of each request the continuations that are not complete
        self._broken: str | None = None
        self._first: Engine | None = make()
        self._queue = self._first.queue
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def key(self) -> int:
        """Return a key that no other request has."""
        return next(self._keys)

    def submit(self, requests: Iterable[Request], sink: Sink) -> None:
        """Hand over requests, all of them or, raising a Refusal, none."""
        requests = tuple(requests)
        wanted = sum(request.n for request in requests)
        with self._lock:
            if self.closing:
                raise Refusal(503, "the server is closing", wait=10)
            if self._broken is not None:
                raise Refusal(503, f"the engine cannot be started again: {self._broken}")
            if wanted > self.room:
                raise Refusal(400, f"{wanted} completions of one request; this server takes {self.room} at a time")
            held = sum(map(len, self._left.values()))
            if held + wanted > self.room:
                raise Refusal(429, f"{held} completions wait or run, and {self.room} is the most; try again", wait=1)
            for request in requests:
                self._sinks[request.key] = sink
                self._left[request.key] = set(range(request.n))
            self._commands.put(_Submit(requests))

    def cancel(self, key: object, number: int | None = None) -> None:
        """Give up a request, or one of its continuations, which may be complete already."""
        with self._lock:
            if key in self._left:
                self._done(key, self._left[key] if number is None else {number})
                self._commands.put(_Cancel(key, number))

    @property
    def held(self) -> int:
        """How many continuations wait or run."""
        with self._lock:
            return sum(map(len, self._left.values()))

    def health(self) -> dict[str, object]:
        """Return what is going on, as plain data."""
        told: dict[str, object] = {"status": "closing" if self.closing else "ok"}
        if self._broken is not None:
            told = {"status": "broken", "why": self._broken}
        now = self._queue
        blocks = {"count": now.blocks.count, "free": free_count(now.blocks), "idle": idle_count(now.blocks)}
        return told | {
            "held": self.held, "running": len(now.running), "waiting": len(now.waiting), "blocks": blocks,
        }  # fmt: skip

    def close(self) -> None:
        """Give up everything and end the thread."""
        self.closing = True
        self._commands.put(None)
        self._thread.join()

    def _done(self, key: object, numbers: Iterable[int]) -> None:
        """Forget continuations; the lock is held."""
        left = self._left[key] - set(numbers)
        self._left[key] = left
        if not left:
            del self._left[key], self._sinks[key]

    def _run(self) -> None:
        engine, self._first = self._first, None
        while engine is not None:
            try:
                self._serve(engine)
                return
            except Exception as error:
                sys.stderr.write(f"the engine failed, and starts anew:\n{traceback.format_exc()}")
                why = f"the engine failed over this or another request ({type(error).__name__})"
            engine = None  # its cache goes before another one is made
            self._fail(Refusal(500, why))
            try:
                engine = self._make()
            except Exception as error:
                sys.stderr.write(f"the engine cannot be started again:\n{traceback.format_exc()}")
                with self._lock:
                    self._broken = f"{type(error).__name__}: {error}"
                self._fail(Refusal(503, f"the engine cannot be started again: {self._broken}"))

    def _serve(self, engine: Engine) -> None:
        """Go on until the service closes."""
        while True:
            self._queue = engine.queue
            for command in self._taken(engine.busy):
                if command is None:
                    return
                engine = self._obeyed(engine, command)
            if engine.busy:
                engine, events = advance(engine)
                self._tell(events)

    def _taken(self, busy: bool) -> list[_Submit | _Cancel | None]:
        """Return the commands that are there; where there is nothing else to do, wait for one."""
        found = [] if busy else [self._commands.get()]
        while not self._commands.empty():
            found.append(self._commands.get())
        return found

    def _obeyed(self, engine: Engine, command: _Submit | _Cancel) -> Engine:
        if isinstance(command, _Cancel):
            return cancel(engine, command.key, command.number)
        before = engine
        for request in command.requests:
            try:
                engine = submit(engine, request)
            except ValueError as error:
                self._fail(Refusal(400, str(error)), [each.key for each in command.requests])
                return before
        return engine

    def _tell(self, events: Iterable[Event]) -> None:
        """Hand events to those who wait for them, all of one pass at once."""
        told: dict[Sink, list[Event]] = {}
        with self._lock:
            for event in events:
                if event.key not in self._sinks:  # given up since
                    continue
                told.setdefault(self._sinks[event.key], []).append(event)
                if isinstance(event, End):
                    self._done(event.key, {event.number})
        for sink, found in told.items():
            sink(found)

    def _fail(self, why: Refusal, keys: Iterable[object] | None = None) -> None:
        with self._lock:
            failed = list(self._sinks) if keys is None else [key for key in keys if key in self._sinks]
            sinks = {self._sinks[key] for key in failed}
            for key in failed:
                self._done(key, self._left[key])
        for sink in sinks:
            sink(why)
