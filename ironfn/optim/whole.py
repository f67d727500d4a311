"""Bring the matrices that a mesh has cut together, each on one rank, and send the shares of the result back."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ironfn.layout.table import Placement, cuts_of
from ironfn.layout.zero import balance
from ironfn.mesh.axis import Axis, Mesh
from ironfn.optim.newton_schulz import operations
from ironfn.types import Flat


def matrix_cuts(place: Placement, ndim: int, mesh: Mesh) -> list[tuple[Axis, int]]:
    """Return the cuts through a leaf's matrices, the last two dimensions; of a stack, each matrix is one alone."""
    return [(axis, dim) for axis, dim in cuts_of(place, mesh) if dim >= ndim - 2]


def whole_matrix(local: torch.Size, cuts: list[tuple[Axis, int]]) -> tuple[int, int]:
    """Return [inputs, outputs] of the matrices of which this is the shape of a share."""
    shape = list(local)
    for axis, dim in cuts:
        shape[dim] *= axis.size
    return shape[-2], shape[-1]


def on_whole(apply: Callable[[Flat], Flat], shares: Flat, places: Mapping[str, Placement], mesh: Mesh) -> Flat:
    """Return the shares of ``apply`` of the whole leaves. All ranks of the axes that cut them call it alike.

    Every cut is undone by one all-to-all: each leaf goes to one rank of the axis, by `layout.zero.balance` such that
    all have as much of Newton-Schulz's work, and another brings the shares of the result back. So no rank computes what
    another does, and what travels is two times the shares. The cuts are undone from the last to the first.
    """
    cuts = {path: matrix_cuts(places[path], x.ndim, mesh) for path, x in shares.items()}
    return _undo(apply, shares, cuts)


def _undo(apply: Callable[[Flat], Flat], shares: Flat, cuts: dict[str, list[tuple[Axis, int]]]) -> Flat:
    """Undo the deepest cuts of one axis, and the rest in the ranks that own the result."""
    depth = max((len(each) for each in cuts.values()), default=0)
    if depth == 0:
        return apply(shares)
    axis = next(each[-1][0] for each in cuts.values() if len(each) == depth)
    dims = {path: each[-1][1] for path, each in cuts.items() if each and each[-1][0].name == axis.name}
    jobs = {path: (_work(shares[path], cuts[path]),) for path in dims}
    owner = balance(jobs, axis.size)
    mine = {path: x for path, x in shares.items() if path not in dims}
    mine |= _collect({path: shares[path] for path in dims}, dims, owner, axis)
    left = {path: cuts[path][:-1] if path in dims else cuts[path] for path in mine}
    done = _undo(apply, mine, left)
    back = {path: shares[path] for path in dims}
    return {path: x for path, x in done.items() if path not in dims} | _return(done, back, dims, owner, axis)


def _work(share: Tensor, cuts: list[tuple[Axis, int]]) -> float:
    return operations(*whole_matrix(share.shape, cuts)) * share.shape[:-2].numel()


def _collect(shares: Flat, dims: Mapping[str, int], owner: Mapping[str, int], axis: Axis) -> Flat:
    """Return, joined, the leaves that this rank owns."""
    theirs = _by_owner(shares, owner, axis.size)
    send = [sum(shares[path].numel() for path in paths) for paths in theirs]
    mine = theirs[axis.index]
    arrived = axis.backend.all_to_all(_joined(shares, theirs), send, [send[axis.index]] * axis.size)
    rows = arrived.view(axis.size, send[axis.index]).split([shares[path].numel() for path in mine], 1)
    return {
        path: torch.cat([x.view(shares[path].shape) for x in row], dims[path])
        for path, row in zip(mine, rows, strict=True)
    }


def _return(whole: Flat, shares: Flat, dims: Mapping[str, int], owner: Mapping[str, int], axis: Axis) -> Flat:
    """Return this rank's shares of the leaves, each of which is whole on the rank that owns it."""
    theirs = _by_owner(shares, owner, axis.size)
    receive = [sum(shares[path].numel() for path in paths) for paths in theirs]
    mine = theirs[axis.index]
    cut = {path: whole[path].chunk(axis.size, dims[path]) for path in mine}
    parts = [cut[path][rank].reshape(-1) for rank in range(axis.size) for path in mine]
    empty = next(iter(shares.values())).new_empty(0)
    arrived = axis.backend.all_to_all(torch.cat([empty, *parts]), [receive[axis.index]] * axis.size, receive)
    paths = [path for each in theirs for path in each]
    pieces = arrived.split([shares[path].numel() for path in paths])
    return {path: x.view(shares[path].shape) for path, x in zip(paths, pieces, strict=True)}


def _by_owner(shares: Flat, owner: Mapping[str, int], ranks: int) -> list[list[str]]:
    return [[path for path in shares if owner[path] == rank] for rank in range(ranks)]


def _joined(shares: Flat, groups: list[list[str]]) -> Tensor:
    return torch.cat([shares[path].reshape(-1) for paths in groups for path in paths])
