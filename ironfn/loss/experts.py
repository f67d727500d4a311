"""Keep a router in bounds: the load-balancing loss, of sequences or of the batch, and the z-loss.

Convention: a balanced router has a balance of 1 in every block, whatever its top_k; blocks are added up. Sums are
weighted as the tokens' own losses are, so that no split of a batch changes them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ironfn.mesh.axis import Mesh, sum_over_rows
from ironfn.model.moe import Seen
from ironfn.spec.records import MoeSpec


def router_loss(seen: Seen, weight: Tensor, moe: MoeSpec, mesh: Mesh) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what the routers add to the total of a loss whose targets have ``weight`` [B, T], and its metrics.

    It is balance_weight * balance + z_weight * router_z, sums whose mean over the weight is the figure to report.
    ``balance: batch`` counts over all ranks' rows: each rank adds its own tokens' part. It knows of one batch, so that
    under accumulation it would be another loss: `spec.check` refuses it there.
    """
    row = weight.sum(1).to(seen["z"].dtype)
    z = (row * seen["z"].sum(1)).sum()
    metrics = {"router_z": z.detach()}
    total = z * moe.z_weight
    if moe.balance != "none":
        balance = (
            (row * _of_sequences(seen, moe)).sum() if moe.balance == "sequence" else _of_batch(seen, row, moe, mesh)
        )
        metrics["balance"] = balance.detach()
        total = total + balance * moe.balance_weight
    return total, metrics


def _of_sequences(seen: Seen, moe: MoeSpec) -> Tensor:
    """Return [B], each row's E / (K n²) sum_e load_e scores_e, added up over the blocks (arXiv 2412.19437, eq. 17)."""
    load, scores = seen["load"].to(seen["scores"].dtype), seen["scores"]
    choices = load.sum(-1).clamp(min=1.0)  # K n of a row of n real tokens
    return ((load * scores).sum(-1) * (moe.experts * moe.top_k) / choices.square()).sum(-1)


def _of_batch(seen: Seen, row: Tensor, moe: MoeSpec, mesh: Mesh) -> Tensor:
    """Return this rank's part of W E / (K N²) sum_e load_e scores_e with the sums over the whole batch, of weight W.

    It is linear in the scores, so the ranks' parts add up, and the loads have no gradient.
    """
    load = seen["load"].sum(0)
    both = sum_over_rows(torch.cat([load.double().flatten(), row.double().sum()[None]]), mesh)
    load, weight = both[:-1].view(load.shape), both[-1]
    share = load * (weight * moe.experts * moe.top_k / load.sum(-1, keepdim=True).clamp(min=1.0).square())
    return (share.to(seen["scores"].dtype) * seen["scores"].sum(0)).sum()
