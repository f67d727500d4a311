"""Let each data-parallel rank move its share of the parameters, and tell the others what came of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ironfn import tree
from ironfn.layout.buckets import BUCKET_BYTES, Unpacked, pack, spread, streams
from ironfn.layout.table import Placement, Table, held, placement
from ironfn.layout.zero import share_leaf
from ironfn.mesh.axis import Mesh
from ironfn.optim.optimizer import Optimizer
from ironfn.types import Flat, Params


def zero1(
    optimizer: Optimizer,
    table: Table,
    updates: Mapping[str, Placement],
    mesh: Mesh,
    bucket_bytes: int = BUCKET_BYTES,
) -> Optimizer:
    """Return the optimizer that keeps state for this rank's share of the updates alone.

    ``updates`` (`layout.zero.share_updates`) is where gradients come reduced to (``make_step(updates=...)``); params
    come and go as ``table`` places them. The state is the optimizer's own, of the shares; its counts are there on every
    rank, whether or not the rank has a leaf of their group. One all-gather of the parameters' bytes a step, in buckets.
    """

    def share(params: Params) -> Params:
        flat = tree.flatten(params)
        return tree.unflatten(
            {
                path: share_leaf(leaf, placement(table, path), updates[path], mesh)
                for path, leaf in flat.items()
                if held(updates[path], mesh)
            }
        )

    def init(params: Params) -> Params:
        # The counts of a group are the same on all ranks and all have them, so that a checkpoint can ask any.
        whole = optimizer.init(tree.map(lambda p: torch.empty_like(p, device="meta"), params))
        counts = {path: x for path, x in tree.flatten(whole).items() if not x.is_meta}
        mine = optimizer.init(tree.map(lambda p: p.contiguous(), share(params)))
        return tree.unflatten(counts | tree.flatten(mine))

    @torch.no_grad()
    def update(grads: Params, state: Params, params: Params, lr: float) -> tuple[Params, Params]:
        # A share along the first dimension is a stretch of its leaf's buffer and is moved in place.
        shares = tree.map(lambda p: p.contiguous(), share(params))
        moved, state = optimizer.update(grads, state, shares, lr)
        _gather(tree.flatten(moved), tree.flatten(params), table, updates, mesh, bucket_bytes)
        return params, state

    return Optimizer(init, update)


def _gather(
    moved: Flat, params: Flat, table: Table, updates: Mapping[str, Placement], mesh: Mesh, bucket_bytes: int
) -> None:
    """Write every rank's moved shares into the buffers of ``params``."""
    kinds: dict[tuple[torch.dtype, torch.device], Flat] = {}
    for path, p in params.items():
        source, target = placement(table, path), updates[path]
        if mesh.dp.size > 1 and (target.owner is not None or target.cuts != source.cuts):
            kinds.setdefault((p.dtype, p.device), {})[path] = p
        elif moved[path] is not p:
            p.copy_(moved[path])
    for leaves in kinds.values():
        _gather_alike(moved, leaves, updates, mesh, bucket_bytes)


def _gather_alike(moved: Flat, params: Flat, updates: Mapping[str, Placement], mesh: Mesh, bucket_bytes: int) -> None:
    ranks, me = mesh.dp.size, mesh.dp.index
    plan = streams({path: p.numel() for path, p in params.items()}, updates, ranks)
    parts: dict[str, Tensor] = {path: moved[path][None] for path in params if path in moved}
    targets = {path: spread(p, updates[path], ranks) for path, p in params.items()}
    first = next(iter(params.values()))
    shared, own = Unpacked(), [Unpacked() for _ in range(ranks)]
    for start, stop in plan.buckets(max(1, bucket_bytes // first.element_size() // ranks)):
        mine = first.new_empty(1, stop - start)
        end = pack(plan.shared, parts, start, stop, mine)
        mine[0, max(end, pack(plan.own[me], parts, start, stop, mine)) :].zero_()
        everyone = mesh.dp.backend.all_gather(mine, 0)
        for path, rows in shared.take(plan.shared, everyone, start, stop):
            targets[path].copy_(rows.unflatten(1, targets[path].shape[1:]))
        for rank, unpacked in enumerate(own):
            for path, row in unpacked.take(plan.own[rank], everyone[rank : rank + 1], start, stop):
                targets[path].copy_(row.view(targets[path].shape))
