"""Describe where a process stands: one `Axis` for each way to split the work, a `Mesh` of them."""

from __future__ import annotations

from typing import Protocol

import torch
from attrs import field, frozen
from torch import Tensor


class Backend(Protocol):
    """Move tensors between the ranks of one axis. Every method is called by all ranks in the same order.

    Nothing here is differentiable: `mesh/pairs.py` is. A result shares no memory with the tensor that was handed over,
    unless that was donated. `mesh.call.MeshError` where the ranks' calls do not fit together, or a rank is gone.
    """

    def all_reduce(self, x: Tensor, *, donate: bool = False) -> Tensor:
        """Return the sum over the ranks, the same bits on each. donate: it may be written into the buffer of ``x``."""
        ...

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Return the ranks' tensors joined along ``dim``, in rank order."""
        ...

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's equal share along ``dim`` of the sum over the ranks."""
        ...

    def all_to_all(self, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Send ``send[r]`` leading slices to rank r, return the slices received, in rank order."""
        ...

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Return rank ``source``'s tensor."""
        ...


class Alone:
    """Be the back end of an axis of size 1: every collective hands back the very tensor it is given."""

    def all_reduce(self, x: Tensor, *, donate: bool = False) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return x

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return x

    def all_to_all(self, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        return x

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return x


@frozen
class Axis:
    """One dimension of the mesh: its name, how many ranks it has, which of them this is, and what joins them."""

    name: str
    size: int = 1
    index: int = 0
    backend: Backend = field(factory=Alone, repr=False, eq=False)


@frozen
class Mesh:
    """The axes of a run. dp and ep split the rows, tp the heads and the vocabulary, ep the experts as well.

    sequence_parallel: between the tensor-parallel regions, split the positions over tp as well.
    world: all the ranks in one axis, dp varying slowest and tp fastest: for what they have to agree on.
    """

    dp: Axis = field(factory=lambda: Axis("dp"))
    tp: Axis = field(factory=lambda: Axis("tp"))
    ep: Axis = field(factory=lambda: Axis("ep"))
    sequence_parallel: bool = False
    world: Axis = field(factory=lambda: Axis("world"))

    def axis(self, name: str) -> Axis:
        """Return the axis of that name."""
        return {"dp": self.dp, "tp": self.tp, "ep": self.ep}[name]

    @property
    def shares(self) -> int:
        """Into how many shares the rows of a batch are cut."""
        return self.dp.size * self.ep.size

    @property
    def share(self) -> int:
        """Which of the shares of the rows is this rank's."""
        return self.dp.index * self.ep.size + self.ep.index


SINGLE = Mesh()
"""The mesh of one process."""


def sum_over_rows(x: Tensor, mesh: Mesh) -> Tensor:
    """Return the sum over the ranks that hold other rows."""
    for axis in (mesh.dp, mesh.ep):
        if axis.size > 1:
            x = axis.backend.all_reduce(x)
    return x


def any_rank(mesh: Mesh, flag: bool, device: torch.device | str = "cpu") -> bool:
    """Tell whether ``flag`` is set on any rank of the world: one decision, the same on all."""
    return any_of(mesh.world, flag, device)


def any_of(axis: Axis, flag: bool, device: torch.device | str = "cpu") -> bool:
    """Tell whether ``flag`` is set on any rank of an axis."""
    return flag if axis.size == 1 else bool(axis.backend.all_reduce(torch.tensor([float(flag)], device=device)) > 0)
