"""Start the command line as several ranks: forked from this warm process, joined by what torchrun would have said."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from attrs import define, field

import drivers.run
from drivers.main import main
from drivers.watch import Watch


@define
class Rank:
    """Be a forked rank: its process, and the files that it writes its output and its errors to."""

    pid: int
    out: Path
    err: Path
    code: int | None = None

    @property
    def said(self) -> str:
        """What it said on standard output."""
        return self.out.read_text()

    @property
    def errors(self) -> str:
        """What it said on standard error."""
        return self.err.read_text()

    def ended(self) -> bool:
        """Tell whether it has ended, and take its code: minus the signal where one killed it."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None


@define
class Ranks:
    """Be the ranks of one run. Use it in a ``with``: none outlives the block.

    words: of the command line. first: what each rank does before it. more: words that single ranks are given as well.
    """

    n: int
    words: Sequence[object]
    folder: Path
    first: Callable[[int], None] = lambda rank: None
    more: Mapping[int, Sequence[str]] = MappingProxyType({})
    all: list[Rank] = field(factory=list)

    def __enter__(self) -> Ranks:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.folder.mkdir(parents=True, exist_ok=True)
        self.all = [self._fork(rank, port) for rank in range(self.n)]
        return self

    def __exit__(self, *error: object) -> None:
        for rank in self.all:
            if not rank.ended():
                os.kill(rank.pid, signal.SIGKILL)
                os.waitpid(rank.pid, 0)

    def wait(self, seconds: float, of: Sequence[int] | None = None) -> list[int | None]:
        """Return the exit codes of these ranks, None for one that still runs after so many seconds."""
        end = time.monotonic() + seconds
        chosen = [self.all[rank] for rank in (range(self.n) if of is None else of)]
        while {rank.ended() for rank in chosen} != {True} and time.monotonic() < end:
            time.sleep(0.01)
        return [rank.code for rank in chosen]

    def until(self, seen: Callable[[], bool], seconds: float = 30) -> None:
        """Wait until something is seen while all ranks run."""
        end = time.monotonic() + seconds
        while not seen():
            assert time.monotonic() < end
            assert {rank.ended() for rank in self.all} == {False}, [rank.errors for rank in self.all]
            time.sleep(0.005)

    def _fork(self, rank: int, port: int) -> Rank:
        out, err = (self.folder / f"rank-{rank}.{name}" for name in ("out", "err"))
        pid = os.fork()
        if pid == 0:
            self._be(rank, port, out, err)
        return Rank(pid, out, err)

    def _be(self, rank: int, port: int, out: Path, err: Path) -> NoReturn:
        code = 70
        try:
            for path, descriptor in ((out, 1), (err, 2)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), descriptor)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(self.n), "MASTER_ADDR": "127.0.0.1"}
            os.environ |= {"MASTER_PORT": str(port)}
            torch.set_num_threads(1)
            drivers.run.draw = lambda *arguments: None  # it takes longer than the run
            self.first(rank)
            main([*map(str, self.words), *self.more.get(rank, ())], prog_name="ironfn")
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
            code = 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def before_step(rank: int, step: int, act: Callable[[], Any]) -> Callable[[int], None]:
    """Return what makes one rank do something when it has just taken a step, before it tells the others of it."""

    def first(this: int) -> None:
        if this != rank:
            return
        tell = Watch.step

        def watched(self: Watch, state: Any, *rest: Any) -> bool:
            if state.step == step:
                act()
            return tell(self, state, *rest)

        Watch.step = watched  # type: ignore[method-assign]

    return first


def send(number: int) -> Callable[[], None]:
    """Return what sends a signal to the process that calls it."""
    return lambda: os.kill(os.getpid(), number)
