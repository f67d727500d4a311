"""Decide what of a tree each rank writes: every box of every leaf once, the bytes spread evenly over who holds them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from attrs import frozen
from torch import Tensor

from ironfn.checkpoint.manifest import MAX_DIMS, MAX_LEAVES, check_path
from ironfn.layout.table import Box, Placement, Table, cuts_of, held, placement, share_of, whole_of
from ironfn.mesh.axis import Mesh
from ironfn.types import Params

DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""The dtypes that a checkpoint can hold, and what safetensors calls them."""


@frozen
class Part:
    """Hold this rank's share of a leaf and say which box of the whole it is."""

    tensor: Tensor
    dtype: str
    whole: tuple[int, ...]
    box: Box


@frozen
class Plan:
    """Hold what one rank writes.

    parts: by the path under which they are stored. stored: the path under which each leaf of this rank's tree is.
    shared: the leaves that no rank owns, in the tree's order. empty: the branches without a leaf.
    digest: a number that is the same on all ranks whose trees are of one run.
    """

    parts: dict[str, Part]
    stored: dict[str, str]
    shared: tuple[str, ...]
    empty: tuple[str, ...]
    digest: int


def plan(tree: Params, layout: Table, mesh: Mesh, step: int) -> Plan:
    """Decide what this rank writes of a tree of shares. ValueError, naming the leaf, for what cannot be stored."""
    leaves, empty = _leaves(tree, layout, mesh)
    parts: dict[str, Part] = {}
    stored: dict[str, str] = {}
    seen: dict[Any, str] = {}
    for path, (leaf, place) in leaves.items():
        # equal address, shape and strides: the same numbers. Other views of one storage are stored on their own.
        same = (leaf.device, leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride(), leaf.is_neg(), place)
        stored[path] = seen.setdefault(same, path) if leaf.numel() else path
        if stored[path] == path:
            parts[path] = _part(leaf.detach(), place, mesh)
    shared = tuple(path for path, (_, place) in leaves.items() if not _owned(place, mesh))
    described = [(p, stored[p], parts[stored[p]].dtype, parts[stored[p]].whole, leaves[p][1].cuts) for p in shared]
    digest = xxhash.xxh3_64_intdigest(repr((step, described)).encode()) >> 1  # an int64 carries 63 bits of it
    mine = _mine(parts, {path: leaves[path][1] for path in parts}, mesh)
    return Plan({path: part for path, part in parts.items() if path in mine}, stored, shared, empty, digest)


def _leaves(tree: Params, layout: Table, mesh: Mesh) -> tuple[dict[str, tuple[Tensor, Placement]], tuple[str, ...]]:
    """Return the leaves, checked, with their placements, and the branches without any.

    Those that all ranks have come first, in the tree's order, the owned ones after them by name: so every rank's order
    is a part of one order.
    """
    _check_names(tree)
    leaves: dict[str, tuple[Tensor, Placement]] = {}
    empty: list[str] = []
    for path, node in nodes(tree):
        check_path(path)
        if isinstance(node, dict):
            empty.append(path)
            continue
        _check_leaf(path, node)
        place = placement(layout, path)
        if not held(place, mesh):
            raise ValueError(f"leaf {path!r} is dp rank {place.owner}'s alone, but rank {mesh.dp.index} has it too")
        leaves[path] = node, place
    if len(leaves) > MAX_LEAVES:
        raise ValueError(f"a tree of {len(leaves)} leaves cannot be stored: the limit is {MAX_LEAVES}")
    owned = {path: leaf for path, leaf in leaves.items() if _owned(leaf[1], mesh)}
    return {p: x for p, x in leaves.items() if p not in owned} | dict(sorted(owned.items())), tuple(empty)


def _owned(place: Placement, mesh: Mesh) -> bool:
    return place.owner is not None and mesh.dp.size > 1


def nodes(tree: Params, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Walk the leaves and the branches that have none."""
    for name, node in tree.items():
        if isinstance(node, dict) and node:
            yield from nodes(node, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", node


def _check_names(tree: Params, prefix: str = "") -> None:
    """Refuse names that would not find the same place again."""
    for name, node in tree.items():
        if not isinstance(name, str) or "/" in name:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"name {name!r} under {prefix!r} cannot be stored: names are text without '/'")
        if isinstance(node, dict):
            _check_names(node, f"{prefix}{name}/")


def _check_leaf(path: str, leaf: Any) -> None:
    if not isinstance(leaf, Tensor):
        raise ValueError(f"leaf {path!r} is {leaf!r}, not a tensor: numbers and text belong in meta")
    if leaf.dtype not in DTYPES or leaf.layout != torch.strided or leaf.device.type == "meta" or leaf.dim() > MAX_DIMS:
        raise ValueError(
            f"leaf {path!r} ({leaf.dtype}, {leaf.layout}, {leaf.device}, {leaf.dim()} dims) cannot be stored: "
            f"a checkpoint holds dense real tensors of at most {MAX_DIMS} dims"
        )


def _part(share: Tensor, place: Placement, mesh: Mesh) -> Part:
    whole = whole_of(tuple(share.shape), place, mesh)
    if not share.numel():  # it has no shares that differ: one rank writes its shape
        return Part(share.new_empty(whole), DTYPES[share.dtype], whole, Box((0,) * len(whole), whole))
    return Part(share, DTYPES[share.dtype], whole, share_of(whole, place, mesh))


def _mine(parts: Mapping[str, Part], places: Mapping[str, Placement], mesh: Mesh) -> set[str]:
    """Choose which parts this rank writes: of those who hold the same box, the one with the least to write so far.

    Every rank comes to the same choice without asking: the leaves that all have go first, the largest first; those that
    one rank of dp owns come after them and concern only the ranks that share its place.
    """
    axes = (mesh.dp, mesh.ep, mesh.tp)
    load = np.zeros([axis.size for axis in axes])
    mine: set[str] = set()

    def order(path: str) -> tuple[bool, int, str]:
        return _owned(places[path], mesh), -parts[path].tensor.nbytes, path

    for path in sorted(parts, key=order):
        part, place = parts[path], places[path]
        cutting = {axis.name for axis, _ in cuts_of(place, mesh)} if math.prod(part.whole) else set[str]()
        cut = [axis.name in cutting for axis in axes]
        owned = _owned(place, mesh)
        holders = load[mesh.dp.index : mesh.dp.index + 1] if owned else load
        fullest = holders.max(axis=tuple(np.flatnonzero(cut)), keepdims=True)
        spot = np.unravel_index(int(fullest.argmin()), fullest.shape)
        holders[tuple(slice(None) if c else slice(s, s + 1) for c, s in zip(cut, spot, strict=True))] += (
            part.tensor.nbytes
        )
        here = (0 if owned else mesh.dp.index, mesh.ep.index, mesh.tp.index)
        if all(c or s == i for c, s, i in zip(cut, spot, here, strict=True)):
            mine.add(path)
    return mine
