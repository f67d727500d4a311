"""Predict the next token: the loss of pretraining."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ironfn.loss.cross_entropy import cross_entropy
from ironfn.loss.experts import router_loss
from ironfn.mesh.axis import Mesh
from ironfn.mesh.pairs import enter
from ironfn.model.arch import Arch
from ironfn.model.forward import DEFAULT, Forward
from ironfn.model.moe import Seen
from ironfn.model.transformer import head_bias, head_weight, hidden
from ironfn.types import Batch, Loss, LossSum, Params


def lm_loss(
    arch: Arch,
    how: Forward = DEFAULT,
    *,
    chunk: int | None = None,
    body: Callable[..., tuple[Tensor, Seen]] = hidden,
    penalties: bool = True,
) -> Loss:
    """Return the loss (params, batch, mesh) -> sum over the targets of -log p(target) * weight, in nats.

    The batch needs ``tokens``, ``targets`` and ``weight``; see `types.Batch`. Nothing is shifted here.
    chunk: positions whose logits exist at one time; see `cross_entropy`.
    body: the model up to its head; ``torch.compile(hidden)`` with ``Forward(attention=by_mask)`` compiles a run. The
    cross-entropy stays outside: it passes over the positions of weight 0, and which those are only the data know.
    penalties: a mixture of experts adds its routers' losses (`loss.experts`), metrics and counts; without them it is
    the plain cross-entropy that an evaluation compares. With ``balance: batch`` all ranks have to call it together, and
    the whole batch at once: its sums over micro-batches are another loss.
    """

    def loss(params: Params, batch: Batch, mesh: Mesh) -> LossSum:
        x, seen = body(params, batch, arch, mesh, how)
        w, weight = head_weight(params, arch, how), batch["weight"]
        head: dict[str, Any] = {"bias": head_bias(params, arch, how), "softcap": arch.logit_softcap}
        total = cross_entropy(
            enter(x, mesh), w, batch["targets"], weight, mesh.tp, vocab=arch.vocab, chunk=chunk, **head
        )
        if arch.moe is None or not seen or not penalties:
            return LossSum(total, weight.sum())
        added, metrics = router_loss(seen, weight, arch.moe, mesh)
        counts = {"load": seen["load"].sum(0), "dropped": seen["dropped"].sum(0)}
        return LossSum(total + added, weight.sum(), {"cross_entropy": total.detach(), **metrics}, counts)

    return loss
