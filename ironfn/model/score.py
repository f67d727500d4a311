"""End a decoder in one number for each place that is asked for: a reward."""

from __future__ import annotations

import torch
from torch import Tensor

from ironfn.mesh.axis import Mesh
from ironfn.mesh.pairs import reduce
from ironfn.model.arch import Arch
from ironfn.model.forward import DEFAULT, Forward
from ironfn.model.moe import Seen
from ironfn.model.transformer import hidden
from ironfn.tree import branch, leaf
from ironfn.types import Batch, Params


def scores_at(
    params: Params, batch: Batch, at: Tensor, arch: Arch, mesh: Mesh, how: Forward = DEFAULT
) -> tuple[Tensor, Seen]:
    """Return the scores of places, float32 or better [N], and what the experts tell. at: among the flattened places."""
    x, seen = hidden(params, batch, arch, mesh, how)
    w = leaf(branch(params, "score"), "w")
    w = how.fetch("score/w", w, w.dtype)[:, 0]
    high = torch.promote_types(w.dtype, torch.float32)
    if not mesh.sequence_parallel:
        return x.flatten(0, 1).index_select(0, at).to(high) @ w.to(high), seen
    # each rank scores the places that it holds, and the others nothing: their parts add up
    share = x.shape[1]
    row, place = at // batch["tokens"].shape[1], at % batch["tokens"].shape[1] - mesh.tp.index * share
    mine = (place >= 0) & (place < share)
    found = x.flatten(0, 1).index_select(0, row * share + place.clamp(0, share - 1)).to(high) @ w.to(high)
    return reduce(torch.where(mine, found, 0.0), mesh.tp), seen
