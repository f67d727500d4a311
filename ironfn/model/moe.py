"""Mix experts: route every token to a few feed-forwards of many."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from ironfn.mesh.axis import Mesh
from ironfn.mesh.pairs import enter, leave
from ironfn.model import fused
from ironfn.model.arch import Arch
from ironfn.model.experts import Choice
from ironfn.model.forward import Forward
from ironfn.model.mlp import activation, feed_forward
from ironfn.model.norms import Normed
from ironfn.model.routing import route
from ironfn.tree import branch, leaf
from ironfn.types import Batch, Params

Seen: TypeAlias = dict[str, Tensor]
"""What the mixtures of experts tell beside their result; empty for a dense model. See `transformer.hidden`."""


def mixture(
    x: Tensor, p: Params, layer: int, arch: Arch, mesh: Mesh, how: Forward, batch: Batch
) -> tuple[Tensor, Seen]:
    """Return what the experts add to the residual stream, shaped like x [B, T, D] (T a share under SP).

    The router reads x between the tensor-parallel regions, and the experts inside: its weights enter as x does, so that
    the ranks' parts of their gradient are added up.
    """
    routing = route(x, branch(p, "router"), layer, arch, mesh, how, batch)
    inside = enter(x, mesh)
    choice = Choice(routing.experts, enter(routing.weights, mesh), routing.kept)
    mixed = how.experts(inside, choice, branch(p, "experts"), activation(arch), mesh.ep)
    if "shared" in p:
        shared = feed_forward(Normed(inside), branch(p, "shared"), arch)
        if "shared_gate" in p:
            shared = fused.linear(inside, leaf(branch(p, "shared_gate"), "w")).sigmoid() * shared
        mixed = mixed + shared
    dropped = ((routing.experts >= 0) & ~routing.kept).sum((1, 2))
    seen = {"experts": routing.experts, "scores": routing.scores, "z": routing.z}
    return leave(mixed, mesh), seen | {"load": routing.load, "dropped": dropped}


def joined(layers: list[Seen]) -> Seen:
    """Stack what the blocks tell behind the rows (and the length, where there is one): see `transformer.hidden`."""
    if not layers:
        return {}
    return {name: torch.stack([seen[name] for seen in layers], 2 if name == "experts" else 1) for name in layers[0]}
