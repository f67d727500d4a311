"""Decide where the leaves of a run live on its mesh, and make the optimizer that knows it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attrs import frozen

from ironfn.layout.fsdp import shard_table
from ironfn.layout.table import Placement, by_path
from ironfn.layout.zero import share_updates, state_layout
from ironfn.mesh.axis import Mesh
from ironfn.model.arch import Arch
from ironfn.model.init import abstract, shapes
from ironfn.model.tables import table
from ironfn.optim.optimizer import Optimizer
from ironfn.optim.presets import make_optimizer, whole_work
from ironfn.spec.records import RunSpec


@frozen
class Places:
    """Say where a run's leaves are: on one process, all of them here.

    params: the parameters. updates: the reduced gradients, where ZeRO shares them out. optimizer: moves the parameters
    there. opt: every leaf of its state, those of other ranks as well.
    """

    params: Mapping[str, Placement]
    updates: Mapping[str, Placement] | None
    optimizer: Optimizer
    opt: Mapping[str, Placement]

    def saved(self, extra: Mapping[str, object]) -> dict[str, Placement]:
        """Return the placement of every leaf of a checkpoint. extra: the paths of `State.extra`, whole on each rank."""
        places = {f"params/{path}": place for path, place in self.params.items()}
        places |= {f"opt/{path}": place for path, place in self.opt.items()}
        return places | {f"extra/{path}": Placement() for path in extra}


def places(spec: RunSpec, arch: Arch, mesh: Mesh) -> Places:
    """Return the layout that ``spec.mesh`` asks for. ValueError as `labels_of`."""
    sizes, whole = shapes(arch), abstract(arch, getattr(torch, spec.train.precision.params))
    layout = by_path(table(spec.mesh.sequence_parallel), sizes)
    if spec.mesh.fsdp:
        layout = shard_table(layout, sizes, mesh)
    updates = share_updates(layout, sizes, mesh, whole_work(spec.optim, sizes)) if spec.mesh.zero1 else None
    bucket = spec.mesh.bucket_mb << 20
    optimizer = make_optimizer(spec.optim, whole, table=layout, mesh=mesh, updates=updates, bucket_bytes=bucket)
    state = make_optimizer(spec.optim, whole).init(whole)
    return Places(layout, updates, optimizer, state_layout(state, layout if updates is None else updates))
