"""Predict the next token: the loss of pretraining."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ironfn.loss.cross_entropy import cross_entropy
from ironfn.mesh.axis import Mesh
from ironfn.mesh.pairs import enter
from ironfn.model.arch import Arch
from ironfn.model.forward import DEFAULT, Forward
from ironfn.model.moe import Seen
from ironfn.model.transformer import head_weight, hidden
from ironfn.types import Batch, Loss, LossSum, Params


def lm_loss(
    arch: Arch, how: Forward = DEFAULT, *, chunk: int | None = None, body: Callable[..., tuple[Tensor, Seen]] = hidden
) -> Loss:
    """Return the loss (params, batch, mesh) -> sum over the targets of -log p(target) * weight, in nats.

    The batch needs ``tokens``, ``targets`` and ``weight``; see `types.Batch`. Nothing is shifted here.
    chunk: positions whose logits exist at one time; see `cross_entropy`.
    body: the model up to its head; ``torch.compile(hidden)`` with ``Forward(attention=by_mask)`` compiles a run. The
    cross-entropy stays outside: it passes over the positions of weight 0, and which those are only the data know.
    """

    def loss(params: Params, batch: Batch, mesh: Mesh) -> LossSum:
        x, _ = body(params, batch, arch, mesh, how)
        w, weight = head_weight(params, arch, how), batch["weight"]
        total = cross_entropy(enter(x, mesh), w, batch["targets"], weight, mesh.tp, vocab=arch.vocab, chunk=chunk)
        return LossSum(total, weight.sum())

    return loss
