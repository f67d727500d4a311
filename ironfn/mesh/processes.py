"""Join the processes of a mesh through torch.distributed: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field, frozen
from torch import Tensor

from ironfn.mesh.axis import Mesh
from ironfn.mesh.call import Call, MeshError, agree, decode, describe, encode, told
from ironfn.mesh.grid import Grid
from ironfn.mesh.roll import HOLDER, Roll, no_answer, within

WINDOW = 3.0  # the most seconds that a failed rank waits for signs of life of the others
FEW = 8  # up to so many ranks send each other small tensors directly
SMALL = 64 * 1024  # bytes; gloo's own all-reduce is as fast from 256 KiB on
Group = Any  # dist.ProcessGroupGloo or NCCL: torch's stubs do not know their collectives
CARRIED = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8)


@define(eq=False)
class Link:
    """Join one process to the others of a mesh: its groups, and the roll that tells who does what.

    The first failure of a collective closes every group: the other ranks' calls then fail too, one after the other,
    and nobody waits for a mesh that is no more.
    """

    grid: Grid
    rank: int
    roll: Roll
    window: float
    groups: dict[str, Group] = field(factory=dict)
    lost: str = ""
    failure: str = ""

    def join(self, axis: str, make: Callable[[], Group], seconds: float) -> None:
        """Make the group of an axis. MeshError where the others do not come in time."""
        try:
            self.groups[axis] = within(seconds, make)
        except (RuntimeError, TimeoutError) as error:
            raise self.fail(f"could not connect {axis}", error) from error

    def fail(self, what: str, error: Exception) -> MeshError:
        """Close the groups, find out what every rank does, and return the error to raise."""
        self.roll.doing = self.lost = what
        self.close()
        cause = re.sub(r"\[/\S+\] ", "", told(error).partition(". ")[0])  # not where torch was built
        self.failure = f"{self.grid.name(self.rank)} {what} ({cause}): {self.roll.call(self.window)}"
        return MeshError(self.failure)

    def close(self) -> None:
        """Close the connections."""
        for group in self.groups.values():
            with contextlib.suppress(RuntimeError):
                group.abort()
        self.groups.clear()


@define(eq=False)
class Processes:
    """Be one rank's back end of a group of processes.

    check: before each collective the ranks compare their calls, so that a mismatch is told where gloo would hang or
    add up the wrong bytes. It costs one exchange of a few integers.
    """

    link: Link
    axis: str
    members: list[int]
    index: int
    check: bool

    def all_reduce(self, x: Tensor, *, donate: bool = False) -> Tensor:
        call = self._call("all_reduce", x)
        if not x.is_cuda and x.nbytes <= SMALL and len(self.members) <= FEW:
            return _sum(self._swap(call, x.contiguous()))
        total = x if donate and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
        self._run(call, lambda group: [group.allreduce(total)])
        return total

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        call = self._call("all_gather", x, dim)
        mine, size = _carried(x), len(self.members)
        flat = mine.new_empty(size * mine.numel())
        self._run(call, lambda group: [group._allgather_base(flat, mine.view(-1))])
        parts = flat.view(size, *mine.shape)
        joined = parts.movedim(0, call.at).flatten(call.at, call.at + 1) if call.at else parts.flatten(0, 1)
        return _restored(joined, x)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        call = self._call("reduce_scatter", x, dim)
        size = len(self.members)
        shares = x.unflatten(call.at, (size, x.shape[call.at] // size)).movedim(call.at, 0).contiguous()
        if x.is_cuda:
            total = torch.empty_like(shares[0])
            self._run(call, lambda group: [group._reduce_scatter_base(total, shares)])
            return total
        # gloo sums everything everywhere. An exchange moves as few bytes, and the sum is in rank order.
        parts = torch.empty_like(shares)
        self._run(call, lambda group: [group.alltoall_base(parts, shares, [], [])])
        return _sum(parts.unbind())

    def all_to_all(self, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        call = self._call("all_to_all", x, 0, send, receive)
        mine = _carried(x)
        theirs = mine.new_empty((sum(receive), *mine.shape[1:]))
        self._run(call, lambda group: [group.alltoall_base(theirs, mine, list(receive), list(send))])
        return _restored(theirs, x)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        call = self._call("broadcast", x, source)
        mine = _carried(x)
        whole = mine.clone() if self.index == source else torch.empty_like(mine)
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._run(call, lambda group: [group.broadcast([whole], options)])
        return _restored(whole, x)

    def _call(self, op: str, x: Tensor, at: int = 0, send: Sequence[int] = (), receive: Sequence[int] = ()) -> Call:
        call = describe(op, x, len(self.members), at=at, send=send, receive=receive)
        if self.check:
            self._compare(call)
        return call

    def _compare(self, call: Call) -> None:
        size = len(self.members)
        mine = torch.tensor(encode(call, size))
        rows = self._swap(call, mine)
        if call.op != "all_to_all" and all(torch.equal(row, mine) for row in rows):
            return
        calls = [decode(row.tolist(), size) for row in rows]
        if not agree(calls):
            each = (f"{self.link.grid.name(r)} {c}" for r, c in zip(self.members, calls, strict=True))
            raise MeshError(f"the ranks of {self.axis} made different calls: " + "; ".join(each))

    def _swap(self, call: Call, mine: Tensor) -> Sequence[Tensor]:
        """Return every rank's tensor. Between few ranks sends and receives take half the time of gloo's all-gather."""
        size = len(self.members)
        if size > FEW:
            flat = mine.new_empty(size * mine.numel())
            self._run(call, lambda group: [group._allgather_base(flat, mine.view(-1))])
            return flat.view(size, *mine.shape).unbind()
        parts = [mine if r == self.index else torch.empty_like(mine) for r in range(size)]
        others = [r for r in range(size) if r != self.index]
        self._run(
            call,
            lambda group: [
                *(group.recv([parts[r]], r, 0) for r in others),
                *(group.send([mine], r, 0) for r in others),
            ],
        )
        return parts

    def _run(self, call: Call, start: Callable[[Group], list[dist.Work]]) -> None:
        """Start the parts of a collective and wait for them. MeshError, with what every rank does, where it fails."""
        group = self.link.groups.get(self.axis)
        if group is None:
            raise MeshError(self.link.failure or f"{call} on {self.axis}: this mesh is closed")
        roll = self.link.roll
        roll.doing = Doing("waits in", call, self.axis)
        try:
            with torch.no_grad():
                for work in start(group):
                    work.wait()
        except RuntimeError as error:
            del group
            raise self.link.fail(f"lost contact in {call} on {self.axis}", error) from error
        roll.doing = Doing("computes, after", call, self.axis)


@frozen
class Doing:
    """Say what a rank does; put into words only where somebody asks."""

    what: str
    call: Call
    axis: str

    def __str__(self) -> str:
        return f"{self.what} {self.call} on {self.axis}"


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _carried(x: Tensor) -> Tensor:
    """Return the same bytes, contiguous, in a dtype that gloo and NCCL know, or as bytes with one dimension more."""
    x = x.contiguous()
    return x if x.dtype in CARRIED else x.unsqueeze(-1).view(torch.uint8)


def _restored(carried: Tensor, like: Tensor) -> Tensor:
    return carried if like.dtype in CARRIED else carried.view(like.dtype).squeeze(-1)


def tcp_store(host: str, port: int, *, serve: bool = False, attempt: int = 0, timeout: float = 300.0) -> dist.Store:
    """Return the store at ``host:port`` in which the processes of a run find each other.

    serve: hold the store in this process (one does; under torchrun the launcher may). attempt: which start of the run
    this is; a restart must not find what the start before it has left. timeout: seconds to wait for the others.
    RuntimeError where there is no store, TimeoutError where none has come until then.
    """
    limit = timedelta(seconds=timeout)
    store = within(timeout, lambda: dist.TCPStore(host, port, is_master=serve, wait_for_workers=False, timeout=limit))
    return dist.PrefixStore(f"ironfn/{attempt}", store)


@contextlib.contextmanager
def connect(
    store: dist.Store,
    rank: int,
    world: int,
    *,
    dp: int = 1,
    tp: int = 1,
    ep: int = 1,
    sequence_parallel: bool = False,
    backend: str = "gloo",
    timeout: float = 600.0,
    check: bool = True,
    holder: str = HOLDER,
) -> Generator[Mesh]:
    """Join the ``world`` processes that share a store, of which this is number ``rank``, and yield the mesh.

    backend: gloo or nccl (then the caller has chosen this process's device). timeout: seconds until a rank that
    answers nothing, stopped or lost, is given up, and a MeshError names it; one that dies is noticed within seconds.
    check: compare the ranks' calls before each collective, on gloo; `Processes` says why. holder: what to call the one
    whose the store is, where it is gone. No process group of torch's own is made or touched. ValueError where the sizes
    do not make ``world`` ranks.
    """
    grid = Grid(dp, tp, ep)
    if grid.world != world:
        raise ValueError(
            f"a mesh of dp {dp} x tp {tp} x ep {ep} has {grid.world} ranks, and there are {world} processes: "
            "set mesh.dp, mesh.tp and mesh.ep to sizes whose product is the number of processes"
        )
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"backend {backend!r}: gloo joins CPUs, nccl GPUs")
    if world == 1:
        yield Mesh(sequence_parallel=sequence_parallel)
        return
    window, begin = min(WINDOW, timeout / 4), time.monotonic()
    link = Link(grid, rank, _enrol(store, grid, rank, holder, timeout), window)

    def join(axis: str, members: list[int]) -> Processes:
        apart, me = dist.PrefixStore(f"{axis}/{members[0]}", store), members.index(rank)
        make = partial(_group, backend, apart, me, len(members), timeout - window)
        link.join(axis, make, begin + timeout - window - time.monotonic())
        return Processes(link, axis, members, me, check and backend == "gloo")

    how = "has left"
    try:
        mesh = grid.mesh(rank, sequence_parallel, join)
        link.roll.doing = "computes"
        yield mesh
        if backend == "nccl":
            torch.cuda.synchronize()  # closing would cut off what the device still sends
    except BaseException as error:
        how = link.lost or f"raised {told(error)}"
        raise
    finally:
        link.roll.leave(how)
        link.close()


def _enrol(store: dist.Store, grid: Grid, rank: int, holder: str, timeout: float) -> Roll:
    try:
        return within(timeout, lambda: Roll(store, grid, rank, holder))
    except TimeoutError:
        raise MeshError(f"{grid.name(rank)} could not connect: {no_answer(holder)}") from None


def _group(backend: str, store: dist.Store, rank: int, size: int, timeout: float) -> Group:
    limit = timedelta(seconds=timeout)
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(store, rank, size, options)
