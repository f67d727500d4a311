"""Say where each leaf of a tree lives on a mesh, and cut, join and reduce trees by that."""

from __future__ import annotations

import re
from typing import TypeAlias

from attrs import frozen
from torch import Tensor

from ironfn import tree
from ironfn.mesh.axis import Mesh
from ironfn.types import Params


@frozen
class Placement:
    """Cut a leaf along ``dim`` over the mesh axis ``axis``; without one the leaf is whole on every rank.

    partial: the mesh axes whose ranks each see a part of the tokens that this leaf works on, besides dp.
    """

    axis: str | None = None
    dim: int = 0
    partial: tuple[str, ...] = ()


WHOLE = Placement()
Table: TypeAlias = "tuple[tuple[str, Placement], ...]"
"""Rows of (path regex, placement). The first that matches the whole path wins."""

WHOLE_TABLE: Table = ((".*", WHOLE),)
"""The layout of any tree on a mesh that splits rows only."""


def placement(table: Table, path: str) -> Placement:
    """Look a leaf up. ValueError where no row matches: a forgotten leaf must not become a replicated one."""
    for pattern, place in table:
        if re.fullmatch(pattern, path):
            return place
    raise ValueError(f"no row of the layout table matches the leaf {path!r}; add one")


def shard_leaf(leaf: Tensor, place: Placement, mesh: Mesh, path: str = "leaf") -> Tensor:
    """Return this rank's equal share of a leaf. ValueError where it does not divide."""
    if place.axis is None or (axis := mesh.axis(place.axis)).size == 1:
        return leaf
    if leaf.shape[place.dim] % axis.size:
        raise ValueError(
            f"{path} has {leaf.shape[place.dim]} along dimension {place.dim}, which {axis.size} ranks of {axis.name} "
            f"cannot share equally; choose another {axis.name} size (or pad_vocab_to for the vocabulary)"
        )
    return leaf.chunk(axis.size, place.dim)[axis.index].contiguous()


def shard(params: Params, table: Table, mesh: Mesh) -> Params:
    """Return this rank's part of a whole tree."""
    return tree.map_path(lambda path, leaf: shard_leaf(leaf, placement(table, path), mesh, path), params)


def unshard(params: Params, table: Table, mesh: Mesh) -> Params:
    """Return the whole tree from every rank's part."""

    def join(path: str, leaf: Tensor) -> Tensor:
        place = placement(table, path)
        return leaf if place.axis is None else mesh.axis(place.axis).backend.all_gather(leaf, place.dim)

    return tree.map_path(join, params)


def reduce_grads(grads: Params, table: Table, mesh: Mesh) -> Params:
    """Sum each leaf's gradient over every axis that split the tokens it saw and did not split the leaf.

    dp splits the tokens of every leaf. Under sequence parallelism tp does too, for the leaves that work between
    the tensor-parallel regions: those are named by ``partial`` in their row of the table.
    """

    def total(path: str, grad: Tensor) -> Tensor:
        place = placement(table, path)
        for axis in (mesh.dp, mesh.tp, mesh.ep):
            splits_tokens = axis.name == "dp" or axis.name in place.partial
            if axis.size > 1 and splits_tokens and axis.name != place.axis:
                grad = axis.backend.all_reduce(grad)
        return grad

    return tree.map_path(total, grads)


def squared_norm(grads: Params, table: Table, mesh: Mesh) -> Tensor:
    """Return the squared global norm: squares of split leaves are added over their axis, whole ones counted once."""
    flat = tree.flatten(grads)
    by_axis: dict[str | None, list[Tensor]] = {}
    for path, grad in flat.items():
        axis = placement(table, path).axis
        by_axis.setdefault(None if axis is None or mesh.axis(axis).size == 1 else axis, []).append(grad)
    total = None
    for axis, part in sorted(by_axis.items(), key=lambda item: item[0] or ""):
        square = tree.norm({str(i): leaf for i, leaf in enumerate(part)}).double().square()
        if axis is not None:
            square = mesh.axis(axis).backend.all_reduce(square)
        total = square if total is None else total + square
    assert total is not None, "a tree of gradients has leaves"
    return total
