"""Count the bytes of optimizer state that each rank keeps, against the formula of ZeRO."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from bench.figure import Figure
from bench.step import MODEL
from ironfn import tree
from ironfn.layout.table import WHOLE_TABLE
from ironfn.layout.zero import share_updates
from ironfn.mesh.axis import Axis, Mesh
from ironfn.model.arch import complete
from ironfn.model.init import shapes
from ironfn.optim.presets import make_optimizer, whole_work
from ironfn.spec.records import OptimSpec

SHAPES = shapes(complete(MODEL, 4096))


def figures() -> Iterator[Figure]:
    """Yield, for the fullest rank, the state bytes beyond 1/N of them all, as a part of what is let through.

    ZeRO's first stage keeps K bytes a parameter over N ranks (Rajbhandari et al. 2020, arXiv 1910.02054, section 5.1).
    Let through are 1 % and, with Muon, whose matrices stay whole, one leaf.
    """
    params = tree.unflatten({path: torch.empty(shape, device="meta") for path, shape in SHAPES.items()})
    for name in ("adamw", "muon"):
        spec = OptimSpec(name=name)
        whole, work = tree.nbytes(make_optimizer(spec, params).init(params)), whole_work(spec, SHAPES)
        leaf = max((4 * math.prod(SHAPES[path]) for path in work), default=0)
        for ranks in (2, 4, 8):
            kept: list[int] = []
            for rank in range(ranks):
                mesh = Mesh(dp=Axis("dp", ranks, rank))
                updates = share_updates(WHOLE_TABLE, SHAPES, mesh, work)
                kept.append(tree.nbytes(make_optimizer(spec, params, mesh=mesh, updates=updates).init(params)))
            note = f"{max(kept):,} bytes at most a rank, {sum(kept):,} on all, {whole:,} on one process"
            allowed = 0.01 * whole / ranks + leaf
            yield Figure(f"{name}_state_dp{ranks}", (max(kept) - whole / ranks) / allowed, "<= 1.0", note)
