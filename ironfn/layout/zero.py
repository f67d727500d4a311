"""Share the updates out over the data-parallel ranks: ZeRO's first stage (Rajbhandari 2020, arXiv 1910.02054)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from attrs import evolve
from torch import Tensor

from ironfn import tree
from ironfn.layout.table import WHOLE, Placement, Table, placement
from ironfn.mesh.axis import Mesh
from ironfn.types import Params

Shapes = Mapping[str, Sequence[int]]
"""From a leaf's path to the shape of the whole leaf."""

NOTHING: Mapping[str, float] = MappingProxyType({})


def share_updates(
    table: Table, shapes: Shapes, mesh: Mesh, whole: Mapping[str, float] = NOTHING
) -> dict[str, Placement]:
    """Return the layout of the updates: every leaf is moved by one rank of dp only, or each by its share of it.

    A leaf is cut along the first dimension that still divides after the cuts of ``table``. One that does not divide,
    and one that an optimizer wants whole, gets an owner, such that the ranks have the same work to do and as much to
    keep: the longest jobs are given out first, each to the rank that has least. A leaf that ``table`` cuts over dp
    stays as it is. The layout is a function of the arguments, so that all ranks agree.

    whole: the operations that it takes to move the leaves that are wanted whole, such as Muon's matrices. Of a leaf
    [stack, in, out] each matrix is whole.
    """
    places: dict[str, Placement] = {}
    owned: dict[str, tuple[float, float]] = {}
    for path, shape in shapes.items():
        places[path] = place = placement(table, path)
        if mesh.dp.size == 1 or place.dim("dp") is not None:
            continue
        local = local_shape(shape, place, mesh)
        dim = first_even(local[: max(0, len(local) - 2)] if path in whole else local, mesh.dp.size)
        if dim is None:
            numbers = float(torch.Size(local).numel())
            owned[path] = whole.get(path, numbers), numbers
        else:
            places[path] = evolve(place, cuts=(*place.cuts, ("dp", dim)))
    for path, rank in balance(owned, mesh.dp.size).items():
        places[path] = evolve(places[path], owner=rank)
    return places


def local_shape(shape: Sequence[int], place: Placement, mesh: Mesh) -> list[int]:
    """Return the shape of each rank's share of a leaf."""
    local = list(shape)
    for name, dim in place.cuts:
        local[dim] //= mesh.axis(name).size
    return local


def first_even(shape: Sequence[int], ranks: int) -> int | None:
    """Return the first dimension that ``ranks`` can share equally."""
    return next((dim for dim, size in enumerate(shape) if size and size % ranks == 0), None)


def balance(jobs: Mapping[str, tuple[float, ...]], ranks: int) -> dict[str, int]:
    """Give each job, of several costs, to a rank, so that of each cost every rank has about as much.

    Longest processing time first (Graham 1969), by the first cost; a job goes where the largest of the rank's costs,
    each as a part of its sum over all jobs, stays least.

    >>> balance({"a": (3.0,), "b": (2.0,), "c": (2.0,), "d": (1.0,)}, 2)
    {'a': 0, 'b': 1, 'c': 1, 'd': 0}
    """
    sums = [sum(costs) or 1.0 for costs in zip(*jobs.values(), strict=True)]
    loads = [[0.0] * len(sums) for _ in range(ranks)]
    given: dict[str, int] = {}
    for path, costs in sorted(jobs.items(), key=lambda job: (*(-cost for cost in job[1]), job[0])):
        parts = [cost / total for cost, total in zip(costs, sums, strict=True)]
        after = [[a + b for a, b in zip(load, parts, strict=True)] for load in loads]
        given[path] = rank = min(range(ranks), key=lambda r: (max(after[r]), sum(after[r]), r))
        loads[rank] = after[rank]
    return given


def share_leaf(leaf: Tensor, source: Placement, target: Placement, mesh: Mesh) -> Tensor:
    """Return this rank's part of a leaf that ``source`` places, as ``target`` cuts it further: a view of the leaf."""
    for name, dim in target.cuts[len(source.cuts) :]:
        leaf = leaf.chunk(mesh.axis(name).size, dim)[mesh.axis(name).index]
    return leaf


def state_layout(state: Params, updates: Mapping[str, Placement]) -> dict[str, Placement]:
    """Return the placement of every leaf of an optimizer's state: where its parameter's update is made.

    A state's leaf belongs to the parameter whose path ends its own: ``adamw/m/blocks/0/attn/wq``. Counts, which are
    0-d int64, are whole. updates: by the parameters' paths; `table.by_path` makes it of rows. ValueError for a leaf
    that belongs to no parameter.
    """
    return {path: _place_of(path, leaf, updates) for path, leaf in tree.flatten(state).items()}


def _place_of(path: str, leaf: Tensor, updates: Mapping[str, Placement]) -> Placement:
    if leaf.ndim == 0 and leaf.dtype == torch.int64:
        return WHOLE
    rest = path
    while "/" in rest:
        rest = rest.split("/", 1)[1]
        if rest in updates:
            return updates[rest]
    raise ValueError(f"the optimizer's leaf {path!r} ends in no parameter's path; give its parameter a placement")
