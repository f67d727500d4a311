"""Score tokens without ever holding the logits of a batch.

The head, the softmax and their gradients are computed together, a few hundred positions at a time: the gradient of a
sum of losses is known as soon as the logits are (as in Wijmans et al. 2024, arXiv 2411.09009, on the whole vocabulary).
Positions of weight 0 are not computed at all.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ironfn.mesh.axis import Axis
from ironfn.model.matmul import plain, product


def _logits(x: Tensor, weight: Tensor, first: int, vocab: int) -> Tensor:
    """Return float32 (or better) logits of this rank's rows of the vocabulary; rows beyond ``vocab`` get -inf."""
    logits = product(x, weight.t())
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if first + weight.shape[0] > vocab:
        logits[:, max(0, vocab - first) :] = -math.inf
    return logits


def _log_softmax_at(logits: Tensor, local: Tensor, mine: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """Turn logits [N, V] into exp(logit - max) in place; return the targets' log-probabilities and the sums [N]."""
    top = logits.amax(-1)
    if axis.size > 1:
        top = axis.backend.all_gather(top[None], 0).amax(0)
    target = logits.gather(1, local[:, None])[:, 0] - top
    sums = logits.sub_(top[:, None]).exp_().sum(-1)
    if axis.size > 1:
        target = axis.backend.all_reduce(torch.where(mine, target, 0.0))
        sums = axis.backend.all_reduce(sums)
    return target - sums.log(), sums


class _CrossEntropy(torch.autograd.Function):
    """(x [N, D], w [V, D], targets [N], weight [N]) -> (weighted sum of losses, gradient of x, gradient of w)."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        x: Tensor,
        w: Tensor,
        targets: Tensor,
        weight: Tensor,
        axis: Axis,
        vocab: int,
        chunk: int,
        need_x: bool,
        need_w: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        first = axis.index * w.shape[0]
        x_grad = torch.zeros_like(x) if need_x else x.new_empty(0)
        w_grad = torch.zeros_like(w) if need_w else w.new_empty(0)
        w_used = w.to(x.dtype)
        total = torch.zeros((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        trained = weight.nonzero()[:, 0]
        whole = len(trained) == len(weight)
        for start in range(0, len(trained), chunk):
            place: Any = slice(start, start + chunk) if whole else trained[start : start + chunk]
            x_part, share = x[place], weight[place].to(total.dtype)
            local = targets[place] - first
            mine = (local >= 0) & (local < w.shape[0])
            local = local.clamp(0, w.shape[0] - 1)
            grad = _logits(x_part, w_used, first, vocab)
            log_p, sums = _log_softmax_at(grad, local, mine, axis)
            total -= (log_p * share).sum()
            if not (need_x or need_w):
                continue
            grad *= (share / sums)[:, None]
            grad.scatter_add_(1, local[:, None], torch.where(mine, -share, 0.0)[:, None])
            grad = grad.to(x.dtype)
            if need_x:
                x_grad[place] = product(grad, w_used)
            if need_w:
                _add_product(w_grad, grad, x_part)
        return total, x_grad, w_grad

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.mark_non_differentiable(output[1], output[2])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1], output[2])
        ctx.save_for_forward(output[1], output[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_grad, w_grad = ctx.saved_tensors
        need_x, need_w = ctx.needs_input_grad[:2]
        if not (plain(grad) and float(grad) == 1.0):  # nearly always 1: then no second copy of the gradients is made
            x_grad, w_grad = x_grad * grad.to(x_grad.dtype), w_grad * grad.to(w_grad.dtype)
        return x_grad if need_x else None, w_grad if need_w else None, *(None,) * 7

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dw: Tensor | None, *_: None) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_grad, w_grad = ctx.saved_tensors
        change = x_grad.new_zeros((), dtype=torch.promote_types(x_grad.dtype, torch.float32))
        if dx is not None:
            change = change + (x_grad * dx).sum()
        if dw is not None:
            change = change + (w_grad * dw).sum()
        return change, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        """Score one sample after the other: each is a batch of tokens already, and chunks keep it small."""
        samples = [
            _CrossEntropy.apply(*(a if d is None else a.select(d, i) for a, d in zip(arguments, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        return tuple(torch.stack(parts) for parts in zip(*samples, strict=True)), (0, 0, 0)


def _add_product(total: Tensor, grad: Tensor, x: Tensor) -> None:
    """Add gradᵀ x to ``total``, in its dtype."""
    if total.dtype == grad.dtype == torch.float32 or total.dtype == torch.float64:
        total.addmm_(grad.t(), x)
    else:
        total += grad.t() @ x


def _wanted(x: Tensor) -> bool:
    """Tell whether somebody differentiates by ``x``, backward or forward."""
    return torch.is_grad_enabled() and (x.requires_grad or forward_ad.unpack_dual(x).tangent is not None)


def cross_entropy(
    x: Tensor, w: Tensor, targets: Tensor, weight: Tensor, axis: Axis, *, vocab: int, chunk: int | None = None
) -> Tensor:
    """Return the weighted sum of -log softmax(x wᵀ)[target] as a 0-d float32 tensor (float64 for float64).

    x [..., width] hidden states, whole on every rank of ``axis``; w [rows, width], this rank's rows of the head;
    targets and weight [...]. Ids at ``vocab`` and above are padding of the table and have no probability.
    chunk: positions whose logits exist at one time; by default as many as make 32 MiB of them in float32.
    """
    chunk = chunk or max(64, (1 << 23) // w.shape[0])
    flat = (x.flatten(0, -2), w, targets.flatten(), weight.flatten())
    return _CrossEntropy.apply(*flat, axis, vocab, chunk, _wanted(x), _wanted(w))[0]  # pyright: ignore[reportOptionalSubscript]
