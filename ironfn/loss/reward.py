"""Teach a model that ends in a number to give the preferred text of a pair the higher one."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ironfn.loss.log_probs import asked_places
from ironfn.loss.pairs import CHOSEN, REJECTED, check_pairs, summed
from ironfn.mesh.axis import Mesh
from ironfn.model.arch import Arch
from ironfn.model.forward import DEFAULT, Forward
from ironfn.model.score import scores_at
from ironfn.types import Batch, Loss, LossSum, Params


def bradley_terry(chosen: Tensor, rejected: Tensor, center: float = 0.0) -> Tensor:
    """Return the loss of each pair of rewards: -log of the odds that the chosen wins (Bradley & Terry 1952).

    center: weight of the square of their sum, which the odds leave free (Eisenstein et al. 2023, arXiv 2312.09244).
    """
    return -F.logsigmoid(chosen - rejected) + center * (chosen + rejected).square()


def reward_loss(arch: Arch, how: Forward = DEFAULT, *, center: float = 0.0, penalties: bool = True) -> Loss:
    """Return the loss (params, batch, mesh) -> sum over the pairs, each of weight 1.

    The batch is that of `pairs.pair_loss`, but for ``weight``: 1 at the last place of each completion alone, whose
    hidden state is scored. Metrics, means over the pairs: reward_chosen, reward_rejected, margin, accuracy.
    """

    def loss(params: Params, batch: Batch, mesh: Mesh) -> LossSum:
        places = asked_places(batch)
        check_pairs(places, batch)
        rewards, seen = scores_at(params, batch, places.at, arch, mesh, how)
        chosen, rejected = rewards[CHOSEN], rewards[REJECTED]
        margin = chosen - rejected
        metrics = {
            "reward_chosen": chosen,
            "reward_rejected": rejected,
            "margin": margin,
            "accuracy": (margin > 0).to(margin.dtype),
        }
        losses = bradley_terry(chosen, rejected, center)
        return summed(losses, metrics, places, seen, batch, arch, mesh, penalties)

    return loss
