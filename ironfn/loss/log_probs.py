"""Give tokens and whole texts their log-probabilities, without ever holding the logits of a batch.

What a token's log-probability will be multiplied by is known only when all of them are. So the logits are made twice:
once for the values, and once for the gradient, when autograd brings the factors; see `cross_entropy`. Where the head is
frozen, as under an adapter, once is enough.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional as F

from ironfn.loss.cross_entropy import (
    CrossEntropy,
    log_softmax_at,
    logits_of,
    pieces_of,
    sum_of_rows,
    to_gradient,
    wanted,
)
from ironfn.mesh.axis import Axis, Mesh
from ironfn.mesh.pairs import enter
from ironfn.model.arch import Arch
from ironfn.model.forward import Forward
from ironfn.model.matmul import plain
from ironfn.model.modes import forward_ad_is_on
from ironfn.model.moe import Seen
from ironfn.model.transformer import head_bias, head_weight, hidden
from ironfn.model.weights import Weight
from ironfn.types import Batch, Params


class _TokenLogProbs(torch.autograd.Function):
    """(x [N, D], w [V, D], b [V] or None, targets [N]) -> log p [N]."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        x: Tensor, w: Tensor, b: Tensor | None, targets: Tensor, axis: Axis, vocab: int, cap: float | None, chunk: int
    ) -> Tensor:
        first, w = axis.index * w.shape[0], w.to(x.dtype)
        found = [x.new_empty(0, dtype=torch.promote_types(x.dtype, torch.float32))]
        for x_part, target in zip(x.split(chunk), targets.split(chunk), strict=True):
            local = target - first
            mine = (local >= 0) & (local < w.shape[0])
            logits, _ = logits_of(x_part, w, b, first, vocab, cap)
            found.append(log_softmax_at(logits, local.clamp(0, w.shape[0] - 1), mine, axis)[0])
        return torch.cat(found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.rest = inputs[4:]
        ctx.save_for_backward(*inputs[:4])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # The sum of log p times its gradient is a cross-entropy of these weights, whose gradients are made at once.
        need = ctx.needs_input_grad[:3]
        x, w, bias, targets = ctx.saved_tensors
        _, *grads = CrossEntropy.forward(x, w, bias, targets, -grad, *ctx.rest, *need)
        return *(g if wants else None for g, wants in zip(grads, need, strict=True)), *(None,) * 5


class _FrozenHead(torch.autograd.Function):
    """(x [N, D], w [V, D], b [V] or None, targets [N]) -> (log p [N], the gradient of each by its own x [N, D]).

    A token's log p depends on its own x alone, so its gradient is known at once, but for a factor. The logits are made
    once; a head that is trained would need its gradient's factors first.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        x: Tensor, w: Tensor, b: Tensor | None, targets: Tensor, axis: Axis, vocab: int, cap: float | None, chunk: int
    ) -> tuple[Tensor, Tensor]:
        first, w = axis.index * w.shape[0], w.to(x.dtype)
        found, grads = [x.new_empty(0, dtype=torch.promote_types(x.dtype, torch.float32))], torch.empty_like(x)
        for start in range(0, len(x), chunk):
            place = slice(start, start + chunk)
            local = targets[place] - first
            mine = (local >= 0) & (local < w.shape[0])
            local = local.clamp(0, w.shape[0] - 1)
            grad, tanh = logits_of(x[place], w, b, first, vocab, cap)
            log_p, sums = log_softmax_at(grad, local, mine, axis)
            to_gradient(grad, sums, local, mine, -torch.ones_like(sums), tanh)
            grads[place] = sum_of_rows(grad.to(x.dtype), w)
            found.append(log_p)
        return torch.cat(found), grads

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (own,) = ctx.saved_tensors
        return (None if grad is None else own * grad[:, None].to(own.dtype), *(None,) * 7)


def token_log_probs(
    x: Tensor,
    w: Tensor | Weight,
    targets: Tensor,
    axis: Axis,
    *,
    vocab: int,
    bias: Tensor | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Return log softmax(x wᵀ + bias)[target] of each target, float32 [N] (float64 for float64).

    x [N, width] and targets [N]; the rest as `cross_entropy` has it, but a head that is had by pieces is there whole.
    Under `torch.func` all logits are held.
    """
    if isinstance(w, Weight):
        w = torch.cat(list(pieces_of(w, x.dtype)))
    chunk = chunk or max(64, (1 << 23) // w.shape[0])
    if not (plain(x) and plain(w)) or forward_ad_is_on():
        assert axis.size == 1, "torch.func sees one process"
        return _written_out(x, w, targets, vocab, bias, softcap)
    arguments = (x, w, bias, targets, axis, vocab, softcap, chunk)
    if wanted(x) and not (wanted(w) or wanted(bias)):
        return _FrozenHead.apply(*arguments)[0]  # pyright: ignore[reportOptionalSubscript]
    if any(map(wanted, (x, w, bias))):
        return _TokenLogProbs.apply(*arguments)  # pyright: ignore[reportReturnType]
    return _TokenLogProbs.forward(*arguments)


def _written_out(
    x: Tensor, w: Tensor, targets: Tensor, vocab: int, bias: Tensor | None, softcap: float | None
) -> Tensor:
    logits = x @ w[:vocab].t().to(x.dtype)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if bias is not None:
        logits = logits + bias[:vocab]
    if softcap is not None:
        logits = (logits / softcap).tanh() * softcap
    return F.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]


@frozen(eq=False)
class Places:
    """Say which places of a batch are asked for, and of which text: text after text.

    at: int64 [N], among the flattened places. targets: int64 [N]. sizes: of each text, how many of them are its own.
    keys: int64 [texts], each text's row times the length of a row, and its segment.
    """

    at: Tensor
    targets: Tensor
    sizes: tuple[int, ...]
    keys: Tensor

    def sums(self, values: Tensor) -> Tensor:
        """Add up values [N] of the places to [texts], in float32 or better: in one order, on any device."""
        high = values.to(torch.promote_types(values.dtype, torch.float32))
        return torch.stack([part.sum() for part in high.split(self.sizes)]) if self.sizes else high

    def of(self, name: str, batch: Batch) -> Tensor:
        """Return [N], what a field of the batch says of the places."""
        return batch[name].flatten()[self.at]


def asked_places(batch: Batch) -> Places:
    """Find the places with a weight, and number the texts that have any: row after row, in their order.

    A place belongs to the text of its ``segment``: what is asked for belongs to one text alone.
    """
    at = batch["weight"].flatten().nonzero()[:, 0]
    length = batch["weight"].shape[1]
    here = at.to(batch["segment"].device)
    keys, sizes = torch.unique_consecutive(
        here // length * length + batch["segment"].flatten()[here], return_counts=True
    )
    assert len(keys) == len(keys.unique()), "what a text is asked for stands together"
    return Places(at, batch["targets"].flatten()[at], tuple(sizes.tolist()), keys)


def place_log_probs(
    params: Params, batch: Batch, arch: Arch, mesh: Mesh, how: Forward, places: Places, chunk: int | None = None
) -> tuple[Tensor, Seen]:
    """Return the log-probabilities [N] of what the places ask for, in nats, and what the experts tell.

    The head runs at these places only. chunk: as `cross_entropy`.
    """
    x, seen = hidden(params, batch, arch, mesh, how)
    asked = enter(x, mesh).flatten(0, 1).index_select(0, places.at)
    head: dict[str, Any] = {"vocab": arch.vocab, "bias": head_bias(params, arch, how), "softcap": arch.logit_softcap}
    w = head_weight(params, arch, how)
    return token_log_probs(asked, w, places.targets, mesh.tp, chunk=chunk, **head), seen
