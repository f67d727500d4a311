"""Ask processes that may be killed: what grades in them may hang, crash or need too much, and the run goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from queue import LifoQueue
from typing import Any

from attrs import evolve, frozen

from ironfn.rewards.values import Failure, Result, result_of
from ironfn.rewards.waiting import readable

_START = "import runpy, sys; module, *sys.path = sys.argv[1:]; runpy.run_module(module, run_name='__main__')"
"""What a process runs first: what its parent could import, and from where, it can too."""

LONGEST = 1 << 20
"""Bytes of an answer that are read before the process counts as one that babbles."""


@frozen
class Limits:
    """Say what an answer may take: seconds, bytes of memory; and the seconds that a process may take to start."""

    seconds: float = 5.0
    memory: int = 1 << 31
    start: float = 120.0

    def __attrs_post_init__(self) -> None:
        if not (self.seconds > 0 and self.start > 0 and self.memory > 0):
            raise ValueError(f"{self.seconds} s, {self.memory} bytes: a reward's limits have to be above 0")


class _Killed(Failure):
    """Say that a process was ended by a signal, which need not be the fault of what it was asked."""


class Worker:
    """Keep one process of a module that calls `ironfn.rewards.serving.serve`; it starts when it is asked first."""

    def __init__(self, module: str, settings: Mapping[str, Any], limits: Limits) -> None:
        self._command = [sys.executable, "-P", "-c", _START, module, *sys.path]
        self._first = json.dumps({"settings": dict(settings), "seconds": limits.seconds, "memory": limits.memory})
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[Any, Any] | None = None
        self._read = b""

    def ask(self, request: object) -> Result:
        """Return what the process answers to a JSON value, or how it failed. It is killed where it is late.

        One that a signal ends, such as that of somebody who needs its memory, has a successor that is asked the same
        once more. One that ends itself has failed.
        """
        if self._process is not None and self._process.poll() is not None:  # it died with nothing to do
            self.close()
        try:
            line = json.dumps(request)
        except (TypeError, ValueError) as error:
            return Failure("error", f"it cannot be sent to be graded: {error}")
        said = self._asked(line)
        return self._asked(line) if isinstance(said, _Killed) else said

    def _asked(self, line: str) -> Result:
        if self._process is None:
            self._start()
            said = self._line(self._first, self._limits.start)
            if isinstance(said, Failure):
                return evolve(said, what=f"at its start: {said.what}")
        said = self._line(line, self._limits.seconds)
        return said if isinstance(said, Failure) else _result(said)

    def close(self) -> None:
        """End the process."""
        if self._end is not None:
            self._end()
        self._process = self._end = None
        self._read = b""

    def _start(self) -> None:
        # A session of its own: Ctrl-C is for whoever started it, and what it starts dies with it.
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        self._end = weakref.finalize(self, _stop, self._process)

    def _line(self, line: str, seconds: float) -> dict[str, Any] | Failure:
        """Send a line and return the one that answers it; where none comes, the process is gone after this."""
        assert self._process is not None
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(line.encode() + b"\n")
            return json.loads(self._answer(time.monotonic() + seconds))
        except TimeoutError:
            failure = Failure("timeout", f"no answer within {seconds:g} s")
        except (OSError, EOFError):
            failure = _ended(self._process)
        except ValueError:
            failure = Failure("crash", "the process said what is no answer")
        self.close()
        return failure

    def _answer(self, end: float) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        while b"\n" not in self._read:
            left = end - time.monotonic()
            if left <= 0 or not readable([self._process.stdout.fileno()], left):
                raise TimeoutError
            got = self._process.stdout.read(1 << 16)
            if not got:
                raise EOFError
            self._read += got
            if len(self._read) > LONGEST:
                raise ValueError("too long an answer")
        line, _, self._read = self._read.partition(b"\n")
        return line


def _result(said: Mapping[str, Any]) -> Result:
    if "error" in said:
        return Failure(str(said.get("kind", "error")), str(said["error"]))
    return result_of(said.get("value"))


def _ended(process: subprocess.Popen[bytes]) -> Failure:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1)
    code = process.returncode
    if code is not None and code < 0:
        return _Killed("crash", f"the process was ended by signal {-code}")
    return Failure("crash", f"the process ended with {'no code' if code is None else f'code {code}'}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()
    process.wait()


class Pool:
    """Share some workers among threads; whoever asks waits for a free one."""

    def __init__(self, module: str, settings: Mapping[str, Any], limits: Limits | None = None, size: int = 2) -> None:
        if size < 1:
            raise ValueError(f"a pool of {size} processes answers nothing; give it at least 1")
        self.size = size
        self._workers = tuple(Worker(module, settings, limits or Limits()) for _ in range(size))
        self._free: LifoQueue[Worker] = LifoQueue()
        for worker in self._workers:
            self._free.put(worker)

    def ask(self, request: object) -> Result:
        """Return what a worker answers, or how it failed."""
        with self._one() as worker:
            return worker.ask(request)

    def every(self, requests: Sequence[object]) -> list[Result]:
        """Return the answers to many requests, in their order, with all workers at work."""
        results: dict[int, Result] = {}
        turns = iter(range(len(requests)))
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    at = next(turns, None)
                if at is None:
                    return
                results[at] = self.ask(requests[at])

        threads = [threading.Thread(target=work) for _ in range(min(self.size, len(requests)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[at] for at in range(len(requests))]

    def close(self) -> None:
        """End all processes, those at work after their answer."""
        for _ in self._workers:
            self._free.get().close()
        for worker in self._workers:
            self._free.put(worker)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _one(self) -> Generator[Worker]:
        worker = self._free.get()
        try:
            yield worker
        finally:
            self._free.put(worker)
