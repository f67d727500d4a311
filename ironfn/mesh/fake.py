"""Run every rank of a mesh as a thread of one process, with collectives that are exact and repeatable."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from attrs import define, field
from torch import Tensor

from ironfn.mesh.axis import Axis, Mesh

T = TypeVar("T")


class MeshError(RuntimeError):
    """Tell that the ranks of an axis did not make the same call."""


@define
class Group:
    """Join ``size`` threads: each leaves its value, all wait, each reads everyone's, all wait again."""

    name: str
    size: int
    timeout: float = 60.0
    _slots: list[Any] = field(init=False)
    _calls: list[str] = field(init=False)
    _barrier: threading.Barrier = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._slots = [None] * self.size
        self._calls = [""] * self.size
        self._barrier = threading.Barrier(self.size)

    def swap(self, rank: int, call: str, value: T) -> list[T]:
        """Return every rank's value in rank order. MeshError, on all ranks, where the calls differ."""
        self._slots[rank], self._calls[rank] = value, call
        self._wait(rank, call)
        values, calls = list(self._slots), list(self._calls)
        self._wait(rank, call)
        if len(set(calls)) > 1:
            raise MeshError(f"axis {self.name}: " + "; ".join(f"rank {r} called {c}" for r, c in enumerate(calls)))
        return values

    def abort(self) -> None:
        """Wake every rank that waits: one has raised."""
        self._barrier.abort()

    def _wait(self, rank: int, call: str) -> None:
        try:
            self._barrier.wait(self.timeout)
        except threading.BrokenBarrierError:
            raise MeshError(
                f"axis {self.name}: rank {rank} waited in {call}, but another rank left or raised"
            ) from None


@define
class Fake:
    """Be one rank's back end of a `Group`: sums are taken in rank order, so that every rank holds the same bits."""

    group: Group
    rank: int

    def _swap(self, call: str, x: Tensor) -> list[Tensor]:
        return self.group.swap(self.rank, f"{call} of {x.dtype} {list(x.shape)}", x)

    def all_reduce(self, x: Tensor, *, donate: bool = False) -> Tensor:
        return _sum(self._swap("all_reduce", x))

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self._swap(f"all_gather({dim})", x), dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        if x.shape[dim] % self.group.size:
            raise MeshError(f"axis {self.group.name}: {list(x.shape)} does not divide by {self.group.size} along {dim}")
        return _sum([y.chunk(self.group.size, dim)[self.rank] for y in self._swap(f"reduce_scatter({dim})", x)])

    def all_to_all(self, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        call = f"all_to_all of {x.dtype} [*, {', '.join(map(str, x.shape[1:]))}]"
        parts = self.group.swap(self.rank, call, x.split(send))
        return torch.cat([sent[self.rank] for sent in parts])

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return self._swap(f"broadcast({source})", x)[source].clone()


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def run(
    function: Callable[[Mesh], T],
    *,
    dp: int = 1,
    tp: int = 1,
    ep: int = 1,
    sequence_parallel: bool = False,
    timeout: float = 60.0,
) -> list[T]:
    """Call ``function(mesh)`` on every rank of a fake mesh at once and return the results, tp varying fastest.

    The first rank's own exception is raised where a rank fails; the others are woken at once.
    """
    sizes = {"dp": dp, "ep": ep, "tp": tp}
    places = [dict(zip(sizes, place, strict=True)) for place in itertools.product(*(range(n) for n in sizes.values()))]
    groups: dict[tuple[str, ...], Group] = {}

    def axis(name: str, place: dict[str, int]) -> Axis:
        if sizes[name] == 1:
            return Axis(name)
        others = tuple(f"{other}{index}" for other, index in place.items() if other != name)
        group = groups.setdefault((name, *others), Group(name, sizes[name], timeout))
        return Axis(name, sizes[name], place[name], Fake(group, place[name]))

    everyone = groups.setdefault(("world",), Group("world", len(places), timeout))
    worlds = [Axis("world", len(places), i, Fake(everyone, i)) for i in range(len(places))]
    meshes = [
        Mesh(axis("dp", at), axis("tp", at), axis("ep", at), sequence_parallel, world)
        for at, world in zip(places, worlds, strict=True)
    ]

    def rank(mesh: Mesh) -> T:
        try:
            return function(mesh)
        except BaseException:
            for group in groups.values():
                group.abort()
            raise

    if len(meshes) == 1:
        return [function(Mesh(sequence_parallel=sequence_parallel))]
    with ThreadPoolExecutor(len(meshes)) as pool:
        futures = [pool.submit(rank, mesh) for mesh in meshes]
    errors = [e for f in futures if (e := f.exception()) is not None]
    if errors:
        raise min(errors, key=lambda e: isinstance(e, MeshError) and "left or raised" in str(e))
    return [f.result() for f in futures]
