"""Add gradients up over the ranks: one rule for every parallel form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from attrs import frozen
from torch import Tensor

from ironfn import tree
from ironfn.layout.buckets import BUCKET_BYTES, Unpacked, pack, spread, streams, within
from ironfn.layout.table import Placement, Table, cuts_of, placement, splits
from ironfn.mesh.axis import Axis, Mesh
from ironfn.types import Flat, Params


def summed_axes(place: Placement, mesh: Mesh) -> list[Axis]:
    """Return the axes over which a leaf's gradient is summed: those that split the tokens it saw and not the leaf.

    dp and ep split the tokens of every leaf. Under sequence parallelism tp does too, for the leaves that work between
    the tensor-parallel regions: those name it in ``partial``.
    """
    splitting = [mesh.dp, mesh.ep, *(mesh.axis(name) for name in place.partial)]
    return [axis for axis in splitting if axis.size > 1 and place.dim(axis.name) is None]


@frozen
class _Way:
    """Say how leaves are reduced: those of one way travel together. shared: over dp, each rank keeps its part only."""

    axes: tuple[str, ...]
    shared: bool
    dtype: torch.dtype
    device: torch.device


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of this dtype are added up between ranks."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def reduce_grads(
    grads: Params, table: Table, mesh: Mesh, to: Table | None = None, bucket_bytes: int = BUCKET_BYTES
) -> Params:
    """Sum each leaf's gradient over its `summed_axes`, and return it as the table ``to`` places it (as ``table`` does).

    ``to`` may cut leaves over dp that ``table`` does not, or give them an owner there: those are reduced and shared out
    in one go. Leaves travel together, about ``bucket_bytes`` at a time.

    bfloat16 and float16 are added up in float32 and rounded once: to add in them loses what is small beside the sum.

    Consumes ``grads``: empties the tree, so that beside the gradients only one bucket is alive at a time.
    """
    flat, ways = tree.flatten(grads), dict[_Way, Flat]()
    grads.clear()
    order, places = list(flat), dict[str, Placement]()
    for path in order:
        grad, source = flat.pop(path), placement(table, path)
        places[path] = target = source if to is None else placement(to, path)
        assert target.cuts[: len(source.cuts)] == source.cuts, f"{path}: updates must refine the parameters' layout"
        shared = mesh.dp.size > 1 and (target.owner is not None or target.cuts != source.cuts)
        names = tuple(axis.name for axis in summed_axes(source, mesh))
        ways.setdefault(_Way(names, shared, grad.dtype, grad.device), {})[path] = grad
        del grad
    reduced: Flat = {}
    for way, leaves in ways.items():
        if way.axes:
            reduced.update(_in_buckets(leaves, way, places, mesh, bucket_bytes))
        else:
            reduced |= leaves
    return tree.unflatten({path: reduced[path] for path in order if path in reduced})


def _total(x: Tensor, way: _Way, mesh: Mesh) -> Tensor:
    """Return the sum of a bucket [ranks, numbers] over the ranks; where it is shared out, of this rank's row alone."""
    if way.shared:
        x = mesh.dp.backend.reduce_scatter(x, 0)
    for name in way.axes:
        if name != "dp" or not way.shared:
            x = mesh.axis(name).backend.all_reduce(x, donate=True)
    return x


def _in_buckets(
    leaves: Flat, way: _Way, places: Mapping[str, Placement], mesh: Mesh, limit: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield the leaves, or this rank's parts of them, as the reduced buckets complete them. Consumes ``leaves``."""
    ranks, me = (mesh.dp.size, mesh.dp.index) if way.shared else (1, 0)
    plan = streams({path: leaf.numel() for path, leaf in leaves.items()}, places, ranks)
    shapes: dict[str, torch.Size] = {}
    for path in leaves:
        leaves[path] = spread(leaves[path], places[path], ranks)
        shapes[path] = leaves[path].shape[1:]
    carried = summed_in(way.dtype)
    found, size = Unpacked(), max(1, limit // carried.itemsize // ranks)
    for start, stop in plan.buckets(size):
        bucket = torch.empty(ranks, stop - start, dtype=carried, device=way.device)
        shared = pack(plan.shared, leaves, start, stop, bucket)
        for rank, spans in enumerate(plan.own):
            end = pack(spans, leaves, start, stop, bucket[rank : rank + 1])
            bucket[rank, max(shared, end) :].zero_()
        for spans in (plan.shared, *plan.own):
            for span, _, high in within(spans, start, stop):
                if high == span.stop:
                    del leaves[span.path]
        mine = _total(bucket, way, mesh).to(way.dtype)
        del bucket
        for spans in (plan.shared, plan.own[me]):
            for path, leaf in found.take(spans, mine, start, stop):
                yield path, leaf.view(shapes[path])


def squared_norm(grads: Params, table: Table, mesh: Mesh, device: torch.device | str = "cpu") -> Tensor:
    """Return the squared global norm: squares of shares are added over their axes, whole leaves counted once.

    One exchange an axis that splits any leaf of the table, which ranks without leaves make as well; ``device`` is where
    theirs is made. What is not finite on one rank is so on all.
    """
    kinds: dict[frozenset[str], list[Tensor]] = {}
    for path, grad in tree.flatten(grads).items():
        place = placement(table, path)
        axes = {axis.name for axis, _ in cuts_of(place, mesh)} | ({"dp"} if place.owner is not None else set())
        kinds.setdefault(frozenset(axes), []).append(grad)
    names = ("dp", "ep", "tp")
    known = [frozenset(name for i, name in enumerate(names) if bits >> i & 1) for bits in range(8)]
    squares = torch.zeros(len(known), dtype=torch.float64, device=device)
    for i, axes in enumerate(known):
        if axes in kinds:
            squares[i] = tree.norm({str(n): leaf for n, leaf in enumerate(kinds[axes])}).double().square()
    for name in names:
        if mesh.axis(name).size > 1 and splits(table, name):
            split = torch.tensor([name in axes for axes in known], device=device)
            squares = torch.where(split, mesh.axis(name).backend.all_reduce(squares), squares)
    return squares.sum()
