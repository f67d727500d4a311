"""Say where each leaf of a tree lives on a mesh, and cut and join trees by that."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from attrs import frozen
from torch import Tensor

from ironfn import tree
from ironfn.mesh.axis import Axis, Mesh
from ironfn.types import Params


@frozen
class Placement:
    """Place one leaf. Without cuts and owner it is whole on every rank.

    cuts: (mesh axis, tensor dimension) in order: each cuts what the ones before left into equal shares.
    owner: the rank of dp that alone holds the leaf; the other ranks' trees do not have it.
    partial: the mesh axes whose ranks each see a part of the tokens that this leaf works on, besides dp and ep.
    """

    cuts: tuple[tuple[str, int], ...] = ()
    owner: int | None = None
    partial: tuple[str, ...] = ()

    def dim(self, axis: str) -> int | None:
        """Return the dimension that this axis cuts, None where it cuts none."""
        return dict(self.cuts).get(axis)


def cut(axis: str, dim: int) -> Placement:
    """Return the placement that one axis cuts along one dimension."""
    return Placement(((axis, dim),))


WHOLE = Placement()
Table: TypeAlias = "tuple[tuple[str, Placement], ...] | Mapping[str, Placement]"
"""Rows of (path regex, placement), of which the first that matches the whole path wins; or a placement by path."""

WHOLE_TABLE: Table = ((".*", WHOLE),)
"""The layout of any tree on a mesh that splits rows only."""


def placement(table: Table, path: str) -> Placement:
    """Look a leaf up. ValueError where no row matches: a forgotten leaf must not become a replicated one."""
    if isinstance(table, Mapping):
        if path in table:
            return table[path]
    else:
        for pattern, place in table:
            if re.fullmatch(pattern, path):
                return place
    raise ValueError(f"no row of the layout table matches the leaf {path!r}; add one")


def by_path(table: Table, paths: Iterable[str]) -> dict[str, Placement]:
    """Return the placement of every one of these leaves."""
    return {path: placement(table, path) for path in paths}


def splits(table: Table, axis: str) -> bool:
    """Tell whether any row of the table shares leaves out over this axis, by a cut or by owners."""
    places = table.values() if isinstance(table, Mapping) else [place for _, place in table]
    return any(place.dim(axis) is not None or (axis == "dp" and place.owner is not None) for place in places)


def cuts_of(place: Placement, mesh: Mesh) -> list[tuple[Axis, int]]:
    """Return the cuts that this mesh really makes: those along an axis of more than one rank."""
    return [(mesh.axis(name), dim) for name, dim in place.cuts if mesh.axis(name).size > 1]


@frozen
class Box:
    """Bound a part of a tensor: where it begins along each dimension, and how long it is there."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that takes the part out of the tensor."""
        return tuple(slice(begin, begin + size) for begin, size in zip(self.offset, self.shape, strict=True))


def share_of(shape: tuple[int, ...], place: Placement, mesh: Mesh, path: str = "leaf") -> Box:
    """Return which part of a whole leaf is this rank's equal share. ValueError where it does not divide."""
    offset, sizes = [0] * len(shape), list(shape)
    for axis, dim in cuts_of(place, mesh):
        if sizes[dim] % axis.size:
            raise ValueError(
                f"{path} has {sizes[dim]} along dimension {dim}, which {axis.size} ranks of {axis.name} "
                f"cannot share equally; choose another {axis.name} size (or pad_vocab_to for the vocabulary)"
            )
        sizes[dim] //= axis.size
        offset[dim] += axis.index * sizes[dim]
    return Box(tuple(offset), tuple(sizes))


def whole_of(share: tuple[int, ...], place: Placement, mesh: Mesh) -> tuple[int, ...]:
    """Return the shape of the whole leaf of which a share has this shape."""
    sizes = list(share)
    for axis, dim in cuts_of(place, mesh):
        sizes[dim] *= axis.size
    return tuple(sizes)


def shard_leaf(leaf: Tensor, place: Placement, mesh: Mesh, path: str = "leaf") -> Tensor:
    """Return this rank's equal share of a leaf. ValueError where it does not divide."""
    return leaf[share_of(tuple(leaf.shape), place, mesh, path).slices].contiguous()


def unshard_leaf(leaf: Tensor, place: Placement, mesh: Mesh) -> Tensor:
    """Return the whole leaf from every rank's share."""
    for axis, dim in reversed(cuts_of(place, mesh)):
        leaf = axis.backend.all_gather(leaf, dim)
    return leaf


def held(place: Placement, mesh: Mesh) -> bool:
    """Tell whether this rank has any of the leaf."""
    return place.owner is None or place.owner == mesh.dp.index or mesh.dp.size == 1


def shard(params: Params, table: Table, mesh: Mesh) -> Params:
    """Return this rank's part of a whole tree: leaves that another rank owns are left out."""
    flat = {path: (leaf, placement(table, path)) for path, leaf in tree.flatten(params).items()}
    return tree.unflatten(
        {path: shard_leaf(leaf, place, mesh, path) for path, (leaf, place) in flat.items() if held(place, mesh)}
    )


def unshard(params: Params, table: Table, mesh: Mesh) -> Params:
    """Return the whole tree from every rank's part. Owned leaves cannot be joined so: `zero1` sends them round."""
    return tree.map_path(lambda path, leaf: unshard_leaf(leaf, placement(table, path), mesh), params)
