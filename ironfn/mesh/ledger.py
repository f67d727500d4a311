"""Write down every collective of a mesh: what moved, over which axis, and for whom."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from ironfn.mesh.axis import Axis, Mesh

HERE = Path(__file__).parent
TORCH = Path(torch.__file__).parent


@frozen
class Entry:
    """One collective of this rank. sent: the bytes that it hands to the others. place: who asked for it."""

    axis: str
    op: str
    dtype: str
    shape: tuple[int, ...]
    sent: int
    place: str


@define(eq=False)
class Ledger:
    """Hold one rank's entries in the order of its calls."""

    entries: list[Entry] = field(factory=list)
    _lock: threading.Lock = field(factory=threading.Lock, init=False, repr=False)

    def watch(self, mesh: Mesh) -> Mesh:
        """Return the same mesh, each of whose collectives is written down here. Axes of size 1 move nothing."""

        def watched(axis: Axis) -> Axis:
            return axis if axis.size == 1 else evolve(axis, backend=Recorded(self, axis))

        return evolve(mesh, dp=watched(mesh.dp), tp=watched(mesh.tp), ep=watched(mesh.ep), world=watched(mesh.world))

    def add(self, entry: Entry) -> None:
        """Write an entry down; from any thread."""
        with self._lock:
            self.entries.append(entry)

    def sums(self, key: Callable[[Entry], tuple[str, ...]] = lambda e: (e.axis, e.op)) -> dict[tuple[str, ...], Sum]:
        """Return calls and bytes by axis and op, or by another key of an entry."""
        found: dict[tuple[str, ...], Sum] = {}
        for entry in self.entries:
            before = found.get(key(entry), Sum())
            found[key(entry)] = Sum(before.calls + 1, before.sent + entry.sent)
        return dict(sorted(found.items()))

    def __str__(self) -> str:
        """Return a table of the sums by axis, op and place."""
        sums = self.sums(lambda e: (e.axis, e.op, e.place))
        rows = [(*key, f"{each.calls:,}", f"{each.sent:,.0f}") for key, each in sums.items()]
        return _table(("axis", "op", "place", "calls", "bytes sent"), rows)


@frozen
class Sum:
    """How often, and how many bytes in all."""

    calls: int = 0
    sent: int = 0


@frozen(eq=False)
class Recorded:
    """Be a back end that writes each call down and hands it on.

    The bytes that a rank hands to others, of N ranks, are those of the ring: all-reduce 2 (N-1)/N of the tensor,
    reduce-scatter (N-1)/N of it, all-gather (N-1)/N of the joined tensor, which is N-1 times its own share (Thakur,
    Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in MPICH", sections 4.1 and 4.5;
    the factors of NVIDIA/nccl-tests, doc/PERFORMANCE.md). All-to-all: what leaves the rank. Broadcast: the tensor once,
    from its source. What a back end adds (gloo's comparison of calls, padding, headers) is not counted.
    """

    ledger: Ledger
    axis: Axis

    def all_reduce(self, x: Tensor, *, donate: bool = False) -> Tensor:
        n = self.axis.size
        self._note("all_reduce", x, 2 * (n - 1) * x.nbytes // n)
        return self.axis.backend.all_reduce(x, donate=donate)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        self._note("all_gather", x, (self.axis.size - 1) * x.nbytes)
        return self.axis.backend.all_gather(x, dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        n = self.axis.size
        self._note("reduce_scatter", x, (n - 1) * x.nbytes // n)
        return self.axis.backend.reduce_scatter(x, dim)

    def all_to_all(self, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        leaving = len(x) - send[self.axis.index]
        self._note("all_to_all", x, x.nbytes // max(len(x), 1) * leaving)
        return self.axis.backend.all_to_all(x, send, receive)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        self._note("broadcast", x, x.nbytes if self.axis.index == source else 0)
        return self.axis.backend.broadcast(x, source)

    def _note(self, op: str, x: Tensor, sent: int) -> None:
        dtype = str(x.dtype).removeprefix("torch.")
        self.ledger.add(Entry(self.axis.name, op, dtype, tuple(x.shape), sent, _caller()))


def _caller() -> str:
    """Return the file and function, outside this room and torch, that asked for the collective being written down.

    In a backward pass: the pair whose backward it is, and who started the pass, if that is the same thread (on a CPU).
    """
    frame: FrameType | None = sys._getframe(3)
    pair, place = "", ""
    while frame is not None and not place:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname
        if path.parent == HERE and name.endswith(".backward"):
            pair = f"backward of {name.split('.')[0].strip('_').lower()}"
        if path.parent != HERE and not path.is_relative_to(TORCH):
            place = f"{path.parent.name}/{path.name}:{name}"
        frame = frame.f_back
    return ", ".join(filter(None, [pair, place]))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    right = (False,) * (len(head) - 2) + (True, True)
    aligned = ((c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True)) for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in aligned)
