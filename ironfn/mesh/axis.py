"""Describe where a process stands: one `Axis` for each way to split the work, a `Mesh` of them."""

from __future__ import annotations

from typing import Protocol

from attrs import field, frozen
from torch import Tensor


class Backend(Protocol):
    """Move tensors between the ranks of one axis. Every method is called by all ranks in the same order."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks."""
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
    """Be the back end of an axis of size 1: every collective is the identity."""

    def all_reduce(self, x: Tensor) -> Tensor:
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
    """The axes of a run. dp splits the rows, tp the heads and the vocabulary, ep the experts.

    sequence_parallel: between the tensor-parallel regions, split the positions over tp as well.
    """

    dp: Axis = field(factory=lambda: Axis("dp"))
    tp: Axis = field(factory=lambda: Axis("tp"))
    ep: Axis = field(factory=lambda: Axis("ep"))
    sequence_parallel: bool = False

    def axis(self, name: str) -> Axis:
        """Return the axis of that name."""
        return {"dp": self.dp, "tp": self.tp, "ep": self.ep}[name]


SINGLE = Mesh()
"""The mesh of one process."""
