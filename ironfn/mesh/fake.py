"""Run every rank of a mesh as a thread of one process, with collectives that are exact and repeatable."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from attrs import define, field, frozen
from torch import Tensor

from ironfn.mesh.axis import Mesh
from ironfn.mesh.call import Call, MeshError, agree, describe, told
from ironfn.mesh.grid import Grid

T = TypeVar("T")


@define(eq=False)
class Rank:
    """Hold what the others know of a rank: the call in which it waits, or that it is gone. ``turn`` wakes it."""

    name: str
    axis: str = ""
    members: tuple[int, ...] = ()
    call: Call | None = None
    given: Tensor | None = None
    result: Tensor | None = None
    gone: str = ""
    turn: threading.Lock = field(factory=threading.Lock)

    def __attrs_post_init__(self) -> None:
        self.turn.acquire()

    def __str__(self) -> str:
        return f"{self.name} " + (self.gone or (f"waits in {self.call} on {self.axis}" if self.call else "computes"))


class World:
    """Let threads meet. The last to come to a collective computes it for all, while the others wait.

    All that a rank hands over is read before any rank goes on, so it may write into it at once. What can no longer
    take place breaks the world: every rank that waits, or that makes another call, gets one and the same MeshError.
    """

    def __init__(self, grid: Grid, timeout: float) -> None:
        self.timeout = timeout
        self.ranks = [Rank(grid.name(r)) for r in range(grid.world)]
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._broken = ""

    def meet(self, rank: int, axis: str, members: tuple[int, ...], call: Call, x: Tensor) -> Tensor:
        """Make a call together with the other members of an axis and return this rank's result."""
        me = self.ranks[rank]
        with self._lock:
            if self._broken:
                raise MeshError(self._broken)
            me.axis, me.members, me.call, me.given = axis, members, call, x
            met = self._all_here(axis, members)
        if met:
            self._compute(rank, met)
        elif not me.turn.acquire(timeout=self.timeout):
            with self._lock:
                self._break(f"nothing came of it for {self.timeout:g} s")
            me.turn.acquire()
        result, me.result = me.result, None
        if result is None:
            raise MeshError(self._broken)
        return result

    def leave(self, rank: int, error: BaseException | None) -> None:
        """Tell that a rank has returned, or raised ``error``."""
        with self._lock:
            me = self.ranks[rank]
            if error is None:
                me.gone = "has returned"
                return self._look_around()
            me.gone = f"raised {told(error)}"
            self.error = self.error or error
            self._break(f"{me.name} raised")

    def _all_here(self, axis: str, members: tuple[int, ...]) -> list[tuple[Rank, Call, Tensor]]:
        """Return the members with their calls if each of them has come, and take them from those who wait."""
        ranks = [self.ranks[r] for r in members]
        met = [(r, r.call, r.given) for r in ranks if r.call and r.given is not None and r.axis == axis]
        if len(met) < len(members):
            self._look_around()
            return []
        if not agree([call for _, call, _ in met]):
            self._break(f"the ranks of {axis} made different calls")
            return []
        for rank in ranks:
            rank.call = rank.given = None
        return met

    def _compute(self, last: int, met: list[tuple[Rank, Call, Tensor]]) -> None:
        try:
            with torch.no_grad():
                results = COMPUTE[met[0][1].op]([call for _, call, _ in met], [x for _, _, x in met])
            for (rank, _, _), result in zip(met, results, strict=True):
                rank.result = result
        except BaseException:
            with self._lock:
                self._break(f"{self.ranks[last].name} could not compute {met[0][1]}")
            raise
        finally:
            for rank, _, _ in met:
                if rank is not self.ranks[last]:
                    rank.turn.release()

    def _look_around(self) -> None:
        """Break the world where a rank waits for one that is gone, or where none is left that does not wait."""
        waiting = [rank for rank in self.ranks if rank.call]
        if any(self.ranks[r].gone for rank in waiting for r in rank.members):
            self._break("a rank that others wait for is gone")
        elif waiting and all(rank.call or rank.gone for rank in self.ranks):
            self._break("every rank waits for another")

    def _break(self, why: str) -> None:
        self._broken = self._broken or f"{why}: " + "; ".join(str(rank) for rank in self.ranks)
        for rank in self.ranks:
            if rank.call:
                rank.call = rank.given = None
                rank.turn.release()


@frozen(eq=False)
class Fake:
    """Be one rank's back end: sums are taken in rank order, so that every rank holds the same bits."""

    world: World
    rank: int
    axis: str
    members: tuple[int, ...]

    def _meet(self, op: str, x: Tensor, at: int = 0, send: Sequence[int] = (), receive: Sequence[int] = ()) -> Tensor:
        call = describe(op, x, len(self.members), at=at, send=send, receive=receive)
        return self.world.meet(self.rank, self.axis, self.members, call, x)

    def all_reduce(self, x: Tensor, *, donate: bool = False) -> Tensor:
        total = self._meet("all_reduce", x)
        return x.copy_(total) if donate and x.is_contiguous() else total

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return self._meet("all_gather", x, dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return self._meet("reduce_scatter", x, dim)

    def all_to_all(self, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        return self._meet("all_to_all", x, 0, send, receive)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return self._meet("broadcast", x, source)


# How the last rank computes what all get. Each result is its own memory.


def _copies(x: Tensor, count: int) -> list[Tensor]:
    return [x, *(x.clone() for _ in range(count - 1))]


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone(memory_format=torch.contiguous_format)
    for part in parts[1:]:
        total += part
    return total


def _reduce_scatter(calls: list[Call], given: list[Tensor]) -> list[Tensor]:
    return [_sum(shares) for shares in zip(*(x.chunk(len(calls), calls[0].at) for x in given), strict=True)]


def _all_to_all(calls: list[Call], given: list[Tensor]) -> list[Tensor]:
    pieces = [x.split(call.send) for call, x in zip(calls, given, strict=True)]
    return [torch.cat(received) for received in zip(*pieces, strict=True)]


Compute = Callable[[list[Call], list[Tensor]], list[Tensor]]
COMPUTE: Mapping[str, Compute] = {
    "all_reduce": lambda calls, given: _copies(_sum(given), len(calls)),
    "all_gather": lambda calls, given: _copies(torch.cat(given, calls[0].at), len(calls)),
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": lambda calls, given: [_sum([given[calls[0].at]]) for _ in calls],
}


def run(
    function: Callable[[Mesh], T],
    *,
    dp: int = 1,
    tp: int = 1,
    ep: int = 1,
    sequence_parallel: bool = False,
    timeout: float = 60.0,
) -> list[T]:
    """Call ``function(mesh)`` on every rank of a fake mesh at once and return the results in rank order.

    Raises the first exception of any rank. The others are woken at once: whoever waits for a rank that has returned or
    raised, and whoever waits while all do, gets a MeshError that names each rank and its call. timeout: how long, in
    seconds, a rank waits for one that goes on computing.
    """
    grid = Grid(dp, tp, ep)
    if grid.world == 1:
        return [function(Mesh(sequence_parallel=sequence_parallel))]
    world = World(grid, timeout)

    def rank(index: int) -> T:
        error: BaseException | None = None
        try:
            return function(
                grid.mesh(index, sequence_parallel, lambda name, members: Fake(world, index, name, tuple(members)))
            )
        except BaseException as raised:
            error = raised
            raise
        finally:
            world.leave(index, error)

    with ThreadPoolExecutor(grid.world) as pool:
        futures = [pool.submit(rank, index) for index in range(grid.world)]
    if world.error:
        raise world.error
    return [future.result() for future in futures]
