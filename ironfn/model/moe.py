"""Mix experts: route every token to a few feed-forwards of many."""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

from ironfn.mesh.axis import Mesh
from ironfn.model.arch import Arch
from ironfn.model.forward import Forward
from ironfn.types import Batch, Params

Seen: TypeAlias = dict[str, Tensor]
"""What the mixtures of experts tell beside their result; empty for a dense model. See `transformer.hidden`."""


def mixture(
    x: Tensor, p: Params, layer: int, arch: Arch, mesh: Mesh, how: Forward, batch: Batch
) -> tuple[Tensor, Seen]:
    """Return what the experts add to the residual stream, shaped like x [B, T, D] (T a share under SP)."""
    raise NotImplementedError


def joined(layers: list[Seen]) -> Seen:
    """Join what the blocks tell: see `transformer.hidden`."""
    return {}
