"""Run every rank of a mesh as a thread of one process, with collectives that are exact and repeatable."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from attrs import define, field, frozen
from torch import Tensor

from ironfn.mesh.axis import Mesh
from ironfn.mesh.call import Call, MeshError, agree, describe, told
from ironfn.mesh.grid import Grid

T = TypeVar("T")


@define(eq=False)
class Rank:
    """Hold what the others know of a rank: the call in which it waits, or that it is gone. ``turn`` lets it run."""

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
    """Let the ranks run by turns: one at a time, until it waits in a collective, then the next that can go on.

    So a run is repeatable, and no rank contends for the interpreter's lock. The last to come to a collective computes
    it for all. What can no longer take place breaks the world: whoever waits gets one and the same MeshError, as does
    whoever makes another call.
    """

    def __init__(self, grid: Grid) -> None:
        self.ranks = [Rank(grid.name(r)) for r in range(grid.world)]
        self.error: BaseException | None = None
        self.meetings = 0
        self.over = threading.Event()
        self._ready = deque(self.ranks)
        self._broken = ""

    def meet(self, rank: int, axis: str, members: tuple[int, ...], call: Call, x: Tensor) -> Tensor:
        """Make a call together with the other members of an axis and return this rank's result."""
        if self._broken:
            raise MeshError(self._broken)
        me, ranks = self.ranks[rank], [self.ranks[r] for r in members]
        me.axis, me.members, me.call, me.given = axis, members, call, x
        self.meetings += 1
        met = [(r.call, r.given) for r in ranks if r.axis == axis and r.call and r.given is not None]
        if len(met) == len(ranks):
            self._hold(me, ranks, [c for c, _ in met], [given for _, given in met])
        elif any(r.gone for r in ranks):
            self._break("a rank that another waits for is gone", me)
        else:
            self.next()
            me.turn.acquire()
        me.call, me.given, result = None, None, me.result
        me.result = None
        if result is None:
            raise MeshError(self._broken)
        return result

    def leave(self, rank: int, error: BaseException | None) -> None:
        """Tell that a rank has returned, or raised ``error``."""
        me = self.ranks[rank]
        me.call, me.gone = None, "has returned" if error is None else f"raised {told(error)}"
        self.error = self.error or error
        if error is not None:
            self._break(f"{me.name} raised")
        elif any(rank in other.members for other in self.ranks if other.call):
            self._break("a rank that another waits for is gone")
        self.next()

    def next(self) -> None:
        """Let the next rank run. Where all that are left wait, none of them ever could: they are told so."""
        if not self._ready:
            self._break("every rank waits for another")
        if self._ready:
            self._ready.popleft().turn.release()
        else:
            self.over.set()

    def _hold(self, me: Rank, ranks: list[Rank], calls: list[Call], given: list[Tensor]) -> None:
        if not agree(calls):
            return self._break(f"the ranks of {me.axis} made different calls", me)
        with torch.no_grad():
            results = COMPUTE[calls[0].op](calls, given)
        for rank, result in zip(ranks, results, strict=True):
            rank.call, rank.given, rank.result = None, None, result
        self._ready.extend(rank for rank in ranks if rank is not me)

    def _break(self, why: str, running: Rank | None = None) -> None:
        self._broken = self._broken or f"{why}: " + "; ".join(str(rank) for rank in self.ranks)
        for rank in self.ranks:
            if rank.call and rank is not running:
                self._ready.append(rank)
            rank.call = rank.given = None


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

    One rank runs at a time, until it waits in a collective: a rank that waited for another by any other means would
    wait for ever. Raises the first exception of any rank; the others are stopped at once. Whoever waits for a rank that
    has returned or raised, or waits while all do, gets a MeshError that names each rank and its call.
    timeout: after so many seconds without a collective, MeshError, and the rank that computes is left behind.
    """
    grid = Grid(dp, tp, ep)
    if grid.world == 1:
        return [function(Mesh(sequence_parallel=sequence_parallel))]
    world = World(grid)
    results: list[Any] = [None] * grid.world

    def rank(index: int) -> None:
        world.ranks[index].turn.acquire()
        error: BaseException | None = None
        try:
            mesh = grid.mesh(index, sequence_parallel, lambda name, group: Fake(world, index, name, tuple(group)))
            results[index] = function(mesh)
        except BaseException as raised:
            error = raised
        world.leave(index, error)

    for index in range(grid.world):
        threading.Thread(target=rank, args=(index,), daemon=True).start()
    world.next()
    meetings = -1
    while not world.over.wait(timeout):
        if world.meetings == meetings:
            raise MeshError(f"no collective for {timeout:g} s: " + "; ".join(map(str, world.ranks)))
        meetings = world.meetings
    if world.error:
        raise world.error
    return results
