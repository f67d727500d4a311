"""Decide where the leaves of a run live on its mesh, and make the optimizer that knows it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attrs import frozen

from ironfn import tree
from ironfn.algo.experts import router_bias
from ironfn.algo.step import State
from ironfn.checkpoint.state import layout_of
from ironfn.layout.fsdp import shard_table
from ironfn.layout.table import Placement, by_path
from ironfn.layout.zero import share_updates
from ironfn.mesh.axis import Mesh
from ironfn.model.adapters import adapter_shapes, frozen_paths
from ironfn.model.arch import Arch
from ironfn.model.init import Shapes, abstract, shapes
from ironfn.model.tables import table
from ironfn.optim.optimizer import Optimizer
from ironfn.optim.presets import make_optimizer, whole_work
from ironfn.spec.records import RunSpec
from ironfn.types import Params


@frozen
class Places:
    """Say where a run's leaves are: on one process, all of them here.

    params: all that the forward pass sees, trained or frozen. updates: the reduced gradients, where ZeRO-1 shares them
    out. optimizer: moves the parameters there. saved: every leaf of a checkpoint, those that only other ranks hold as
    well; what is frozen under an adapter is none of them.
    """

    params: Mapping[str, Placement]
    updates: Mapping[str, Placement] | None
    optimizer: Optimizer
    saved: Mapping[str, Placement]


def places(spec: RunSpec, arch: Arch, mesh: Mesh) -> Places:
    """Return the layout that ``spec.mesh`` asks for. ValueError as `labels_of`, and as `adapters.targets`."""
    (trained, dtype), fixed = trained_shapes(spec, arch), router_bias(arch)
    everything = shapes(arch) | trained
    paths = [*frozen_paths(spec.adapter, arch), *trained, *tree.flatten(fixed)]
    params = by_path(table(spec.mesh.sequence_parallel), paths)
    if spec.mesh.fsdp:
        params |= shard_table(params, everything, mesh)
    updates = share_updates(params, trained, mesh, whole_work(spec.optim, trained)) if spec.mesh.zero1 else None
    bucket, whole = spec.mesh.bucket_mb << 20, abstract(trained, dtype)
    optimizer = make_optimizer(spec.optim, whole, table=params, mesh=mesh, updates=updates, bucket_bytes=bucket)
    extra: Params = {"fixed": fixed} if fixed and spec.adapter.kind == "none" else {}
    # Of the whole state: this rank's own has no leaf of the updates that others make.
    state = State(0, whole, make_optimizer(spec.optim, whole).init(whole), extra=extra)
    return Places(params, updates, optimizer, layout_of(state, params, updates))


def trained_shapes(spec: RunSpec, arch: Arch) -> tuple[Shapes, torch.dtype]:
    """Return the shape of every leaf that is trained, and their dtype: of the model, or of what is beside it."""
    if spec.adapter.kind == "none":
        return shapes(arch), getattr(torch, spec.train.precision.params)
    ending = {path: shape for path, shape in shapes(arch).items() if path.startswith("score/")}
    return adapter_shapes(spec.adapter, arch) | ending, torch.float32
