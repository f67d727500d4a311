"""Share the parameters themselves out over the data-parallel ranks, and gather each where it is used.

ZeRO's third stage (Rajbhandari et al. 2020, arXiv 1910.02054); FSDP (Zhao et al. 2023, arXiv 2304.11277).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from ironfn.layout.reduce import summed_in
from ironfn.layout.table import Placement, Table, placement
from ironfn.layout.zero import Shapes, first_even, local_shape
from ironfn.mesh.axis import Axis, Mesh


def shard_table(table: Table, shapes: Shapes, mesh: Mesh) -> dict[str, Placement]:
    """Return the layout that cuts every leaf over dp as well, along the first dimension that still divides.

    Leaves that do not divide stay whole. So do those of one dimension: norms and biases weigh less than what it costs
    to fetch them.
    """
    places: dict[str, Placement] = {}
    for path, shape in shapes.items():
        places[path] = place = placement(table, path)
        dim = first_even(local_shape(shape, place, mesh), mesh.dp.size) if len(shape) > 1 else None
        if dim is not None:
            places[path] = evolve(place, cuts=(*place.cuts, ("dp", dim)))
    return places


class _Fetch(torch.autograd.Function):
    """Join the shares in the dtype of the products; sum the gradients as `reduce_grads` does, and share them out."""

    @staticmethod
    def forward(x: Tensor, axis: Axis, dim: int, dtype: torch.dtype) -> Tensor:
        return axis.backend.all_gather(x.to(dtype).contiguous(), dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.axis, ctx.dim, _ = inputs
        ctx.dtype = x.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        total = ctx.axis.backend.reduce_scatter(grad.to(summed_in(ctx.dtype)), ctx.dim)
        return total.to(ctx.dtype), None, None, None


def fetch(table: Mapping[str, Placement], mesh: Mesh) -> Callable[[str, Tensor, torch.dtype], Tensor]:
    """Return the `Forward.fetch` that gathers the shares of a leaf which ``table`` cuts over dp, and casts the others.

    It is called where a block begins. So under `grad.remat.recompute` the block's whole weights exist only while the
    block runs, forward and backward; without it they are kept for the backward pass. table: of `shard_table`; a leaf
    that it lacks is none of the parameters (``State.extra["fixed"]``) and is whole.
    """

    def whole(path: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        dim = table[path].dim("dp") if path in table else None
        if dim is None or mesh.dp.size == 1:
            return x.to(dtype)
        return _Fetch.apply(x, mesh.dp, dim, dtype)  # pyright: ignore[reportReturnType]

    return whole
