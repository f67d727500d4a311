"""Run a function on every rank of a real mesh: processes, forked from this warm one and joined by gloo."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import define

from ironfn.mesh.axis import Mesh
from ironfn.mesh.processes import connect, tcp_store


class RankError(AssertionError):
    """Tell which ranks failed, each with its traceback. ``errors`` holds their text by rank."""

    def __init__(self, errors: dict[int, str]) -> None:
        super().__init__("\n".join(f"--- rank {rank}:\n{text}" for rank, text in sorted(errors.items())))
        self.errors = errors


@define
class Child:
    """Be a forked rank: its process, our end of its pipe, and what came out of it."""

    pid: int
    pipe: Connection
    result: Any = None
    error: str | None = None
    heard: bool = False


def world(
    n: int,
    function: Callable[[Mesh], Any],
    *,
    dp: int | None = None,
    tp: int = 1,
    ep: int = 1,
    timeout: float = 60.0,
    errors: bool = False,
    **how: Any,
) -> list[Any]:
    """Return what ``function(mesh)`` returns on each of ``n`` forked ranks, in rank order. dp: what is left of n.

    function: may be a closure; its result a tree of tensors, numbers and text. how: more for `connect`, such as
    ``sequence_parallel`` or its own ``timeout`` as ``mesh_timeout``. RankError with the traceback of each rank that
    failed; with ``errors`` that text stands in the place of its result instead. After ``timeout`` seconds every rank is
    killed; none outlives the call.
    """
    how = {"dp": n // (tp * ep) if dp is None else dp, "tp": tp, "ep": ep, "timeout": timeout, **how}
    how["timeout"] = how.pop("mesh_timeout", timeout)
    children = [_fork(rank, n, function, how, timeout) for rank in range(n)]
    try:
        # Only now: a fork would copy the locks of the store's thread in whatever state they are.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for child in children:
            child.pipe.send(store.port)
        _hear(children, time.monotonic() + timeout)
    finally:
        for child in children:
            _end(child, timeout)
    faults = {rank: child.error for rank, child in enumerate(children) if child.error is not None}
    if faults and not errors:
        raise RankError(faults)
    return [_whole(child.result) if child.error is None else child.error for child in children]


def _fork(rank: int, n: int, function: Callable[[Mesh], Any], how: dict[str, Any], timeout: float) -> Child:
    ours, theirs = Pipe()
    pid = os.fork()
    if pid:
        theirs.close()
        return Child(pid, ours)
    try:  # the rank: it leaves by os._exit alone, so that nothing of the tests' own end runs twice
        ours.close()
        torch.set_num_threads(1)
        faulthandler.dump_traceback_later(max(timeout - 1, 1))
        theirs.send(_run(rank, n, theirs.recv(), function, how))
    finally:
        os._exit(0)


def _run(rank: int, n: int, port: int, function: Callable[[Mesh], Any], how: dict[str, Any]) -> tuple[Any, str | None]:
    try:
        with connect(tcp_store("127.0.0.1", port), rank, n, **how) as mesh:
            return _packed(function(mesh)), None
    except BaseException:
        return None, traceback.format_exc()


def _hear(children: list[Child], end: float) -> None:
    """Wait for every rank, until the time is over or none is left but ranks that are stopped."""
    while waiting := {child.pipe: child for child in children if not child.heard}:
        ready = wait(list(waiting), 0.1)
        for child in (waiting[pipe] for pipe in ready):  # type: ignore[index]
            with contextlib.suppress(EOFError, ConnectionResetError):
                child.result, child.error = child.pipe.recv()
                child.heard = True
            if not child.heard:
                child.heard, child.error = True, "died"
        if not ready and (time.monotonic() > end or all(map(_stopped, waiting.values()))):
            return


def _stopped(child: Child) -> bool:
    return Path(f"/proc/{child.pid}/stat").read_text().rpartition(") ")[2][0] == "T"


def _end(child: Child, timeout: float) -> None:
    """Kill and reap a rank, and tell how it ended if it did not say so itself."""
    if not child.heard:
        child.error = "is stopped" if _stopped(child) else f"still ran after {timeout} s"
    if child.error != "died":
        os.kill(child.pid, signal.SIGKILL)
    _, status = os.waitpid(child.pid, 0)
    if child.error == "died":
        child.error = f"died: wait status {status}, signal {os.WTERMSIG(status)}"
    child.pipe.close()


@define
class Packed:
    """Be a tensor on its way between two processes: torch would share its memory, which ends with the rank."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def _packed(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return Packed(str(value.dtype).removeprefix("torch."), tuple(value.shape), data)
    if isinstance(value, dict):
        return {key: _packed(each) for key, each in value.items()}
    return type(value)(map(_packed, value)) if isinstance(value, list | tuple) else value


def _whole(value: Any) -> Any:
    if isinstance(value, Packed):
        dtype = getattr(torch, value.dtype)
        if not value.data:
            return torch.empty(value.shape, dtype=dtype)
        return torch.frombuffer(bytearray(value.data), dtype=torch.uint8).view(dtype).reshape(value.shape)
    if isinstance(value, dict):
        return {key: _whole(each) for key, each in value.items()}
    return type(value)(map(_whole, value)) if isinstance(value, list | tuple) else value
