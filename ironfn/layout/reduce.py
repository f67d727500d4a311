"""Add gradients up over the ranks: one rule for every parallel form."""

from __future__ import annotations

from torch import Tensor

from ironfn import tree
from ironfn.layout.table import Placement, Table, cuts_of, placement
from ironfn.mesh.axis import Axis, Mesh
from ironfn.types import Params


def summed_axes(place: Placement, mesh: Mesh) -> list[Axis]:
    """Return the axes over which a leaf's gradient is summed: those that split the tokens it saw and not the leaf.

    dp and ep split the tokens of every leaf. Under sequence parallelism tp does too, for the leaves that work between
    the tensor-parallel regions: those name it in ``partial``.
    """
    splitting = [mesh.dp, mesh.ep, *(mesh.axis(name) for name in place.partial)]
    return [axis for axis in splitting if axis.size > 1 and place.dim(axis.name) is None]


def reduce_grads(grads: Params, table: Table, mesh: Mesh, to: Table | None = None) -> Params:
    """Sum each leaf's gradient over its `summed_axes`, and return it as the table ``to`` places it (as ``table`` does).

    Consumes ``grads``.
    """
    assert to is None or to is table

    def total(path: str, grad: Tensor) -> Tensor:
        for axis in summed_axes(placement(table, path), mesh):
            grad = axis.backend.all_reduce(grad)
        return grad

    return tree.map_path(total, grads)


def squared_norm(grads: Params, table: Table, mesh: Mesh) -> Tensor:
    """Return the squared global norm: squares of split leaves are added over their axes, whole ones counted once."""
    flat = tree.flatten(grads)
    by_axes: dict[tuple[str, ...], list[Tensor]] = {}
    for path, grad in flat.items():
        axes = tuple(sorted(axis.name for axis, _ in cuts_of(placement(table, path), mesh)))
        by_axes.setdefault(axes, []).append(grad)
    total = None
    for axes, part in sorted(by_axes.items()):
        square = tree.norm({str(i): leaf for i, leaf in enumerate(part)}).double().square()
        for name in axes:
            square = mesh.axis(name).backend.all_reduce(square)
        total = square if total is None else total + square
    assert total is not None, "a tree of gradients has leaves"
    return total
