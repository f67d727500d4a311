"""Train on batches in which the even texts of a row are preferred to the odd ones after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from ironfn import tree
from ironfn.loss.experts import router_loss
from ironfn.loss.log_probs import Places, asked_places, place_log_probs
from ironfn.loss.preference import Objective, Scored, Unpaired
from ironfn.mesh.axis import Mesh, sum_over_rows
from ironfn.model.adapters import is_adapter
from ironfn.model.arch import Arch
from ironfn.model.forward import DEFAULT, Forward
from ironfn.model.moe import Seen
from ironfn.types import Batch, Loss, LossSum, Params

Reference: TypeAlias = Callable[[Params, Batch, Mesh, Places], Tensor]
"""(params, batch, mesh, places) -> the reference's log-probabilities of the places [N], without a gradient."""

CHOSEN, REJECTED = slice(0, None, 2), slice(1, None, 2)


def in_batch(params: Params, batch: Batch, mesh: Mesh, places: Places) -> Tensor:
    """Return what the batch says: its field ``reference``, whose sums over texts were computed beforehand."""
    return places.of("reference", batch)


def nobody(params: Params, batch: Batch, mesh: Mesh, places: Places) -> Tensor:
    """Return zeros: of an objective that knows no reference."""
    return torch.zeros(len(places.at), device=places.at.device)


def frozen_model(reference: Params, arch: Arch, how: Forward = DEFAULT, chunk: int | None = None) -> Reference:
    """Return the reference that is a model of its own. Leaves: this rank's, of any frozen form that ``how`` reads."""

    @torch.no_grad()
    def score(params: Params, batch: Batch, mesh: Mesh, places: Places) -> Tensor:
        return place_log_probs(reference, batch, arch, mesh, how, places, chunk)[0]

    return score


def base_model(arch: Arch, how: Forward = DEFAULT, chunk: int | None = None) -> Reference:
    """Return the reference that is the trained model without its adapter: no second copy of anything."""

    @torch.no_grad()
    def score(params: Params, batch: Batch, mesh: Mesh, places: Places) -> Tensor:
        base = tree.select(params, lambda path: not is_adapter(path))
        return place_log_probs(base, batch, arch, mesh, how, places, chunk)[0]

    return score


def pair_loss(
    arch: Arch,
    objective: Objective,
    reference: Reference = in_batch,
    how: Forward = DEFAULT,
    *,
    chunk: int | None = None,
    penalties: bool = True,
) -> Loss:
    """Return the loss (params, batch, mesh) -> sum over the pairs, each of weight 1.

    The batch is as `types.Batch` has it: ``weight`` is 1 where a completion is asked for, and the completions of even
    ``segment`` are preferred to those after them; both begin alike, see ``until``. how: without dropout, which would
    part the policy from its reference. penalties: a mixture of experts adds its routers' losses, each row as often as
    it has pairs.

    Metrics, means over the pairs: reward_chosen, reward_rejected, margin, accuracy (the share of margins above 0),
    logp_chosen, logp_rejected (sums over a completion), and kl, the mean log ratio of both sides to the reference.
    """

    def loss(params: Params, batch: Batch, mesh: Mesh) -> LossSum:
        places, scored, seen = _score(params, batch, mesh, arch, how, reference, chunk)
        chosen, rejected = scored.take(CHOSEN), scored.take(REJECTED)
        reward_chosen, reward_rejected = (objective.reward(each).detach() for each in (chosen, rejected))
        margin = reward_chosen - reward_rejected
        metrics = {
            "reward_chosen": reward_chosen,
            "reward_rejected": reward_rejected,
            "margin": margin,
            "accuracy": (margin > 0).to(margin.dtype),
            "logp_chosen": chosen.log_probs,
            "logp_rejected": rejected.log_probs,
        }
        if objective.refers:
            metrics["kl"] = (chosen.ratio + rejected.ratio) / 2
        losses = objective.loss(chosen, rejected)
        return summed(losses, metrics, places, seen, batch, arch, mesh, penalties)

    return loss


def unpaired_loss(
    arch: Arch,
    objective: Unpaired,
    reference: Reference = in_batch,
    how: Forward = DEFAULT,
    *,
    chunk: int | None = None,
    penalties: bool = True,
) -> Loss:
    """Return the loss (params, batch, mesh) -> sum over the completions of even ``segment``, each of weight 1.

    ``liked`` [rows, length] is 1 where one is liked and 0 where not. The completion after it answers another prompt:
    the mean log ratio of these over the whole batch, or 0 if it is less, is the baseline, and nothing learns from
    them. So all ranks call this together, and the whole batch at once: its sums over micro-batches are another loss.

    Metrics, means over the completions: reward; margin, the reward with its sign turned where one is not liked;
    accuracy, the share of rewards on the right side of the baseline's; logp; kl, the baseline.
    """

    def loss(params: Params, batch: Batch, mesh: Mesh) -> LossSum:
        places, scored, seen = _score(params, batch, mesh, arch, how, reference, chunk)
        own, other = scored.take(CHOSEN), scored.take(REJECTED)
        first = torch.tensor((0, *places.sizes), device=places.at.device).cumsum(0)[:-1]
        is_liked = places.of("liked", batch)[first][CHOSEN] > 0
        ratio = other.ratio.detach()
        total, count = sum_over_rows(torch.stack([ratio.sum().double(), ratio.new_tensor(len(ratio)).double()]), mesh)
        baseline = (total / count.clamp(min=1)).clamp(min=0).to(ratio.dtype)
        reward, sign = objective.reward(own).detach(), torch.where(is_liked, 1.0, -1.0)
        above = reward - objective.reward(Scored(baseline, torch.zeros_like(baseline), torch.ones_like(baseline)))
        metrics = {
            "reward": reward,
            "margin": sign * reward,
            "accuracy": (sign * above > 0).to(reward.dtype),
            "logp": own.log_probs,
            "kl": baseline.expand_as(reward),
        }
        losses = objective.loss(own, is_liked, baseline)
        return summed(losses, metrics, places, seen, batch, arch, mesh, penalties)

    return loss


def check_pairs(places: Places, batch: Batch) -> None:
    """Hold a batch to what `pair_loss` reads it as."""
    segments = places.keys % batch["weight"].shape[1]
    paired = torch.equal(places.keys[CHOSEN] + 1, places.keys[REJECTED]) and not (segments[CHOSEN] % 2).any()
    assert paired, "every completion has its other, and both are asked for something"


def _score(
    params: Params, batch: Batch, mesh: Mesh, arch: Arch, how: Forward, reference: Reference, chunk: int | None
) -> tuple[Places, Scored, Seen]:
    places = asked_places(batch)
    check_pairs(places, batch)
    log_probs, seen = place_log_probs(params, batch, arch, mesh, how, places, chunk)
    told = reference(params, batch, mesh, places)
    sizes = torch.tensor(places.sizes, dtype=log_probs.dtype, device=log_probs.device)
    return places, Scored(places.sums(log_probs), places.sums(told.to(log_probs.dtype)), sizes), seen


def summed(
    losses: Tensor,
    metrics: dict[str, Tensor],
    places: Places,
    seen: Seen,
    batch: Batch,
    arch: Arch,
    mesh: Mesh,
    penalties: bool,
) -> LossSum:
    """Return the losses and metrics [pairs] as sums, with the routers' losses if they have a part in it."""
    total, weight = losses.sum(), losses.new_tensor(len(losses))
    sums = {name: value.detach().sum() for name, value in metrics.items()}
    if arch.moe is None or not seen:
        return LossSum(total, weight, sums)
    counts = {"load": seen["load"].sum(0), "dropped": seen["dropped"].sum(0)}
    if not penalties:
        return LossSum(total, weight, sums, counts)
    rows = torch.bincount(places.keys[CHOSEN] // batch["weight"].shape[1], minlength=len(batch["weight"]))
    added, of_routers = router_loss(seen, rows[:, None].to(total.device), arch.moe, mesh)
    return LossSum(total + added, weight, {"preference": total.detach(), **sums, **of_routers}, counts)
