"""Score tokens without ever holding the logits of a batch.

The head, the softmax and their gradients are computed together, a few hundred positions at a time: the gradient of a
sum of losses is known as soon as the logits are (as in Wijmans et al. 2024, arXiv 2411.09009, on the whole vocabulary).
Positions of weight 0 are not computed at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ironfn.mesh.axis import Axis
from ironfn.model.matmul import plain, product
from ironfn.model.weights import Weight


def scores(x: Tensor, w: Tensor | Weight) -> Tensor:
    """Return x wᵀ [N, V]; of a head in another form a piece of its rows is there at a time."""
    if isinstance(w, Tensor):
        return product(x, w.t())
    out, at = x.new_empty(len(x), w.sizes[0]), 0
    for part in pieces_of(w, x.dtype):
        out[:, at : at + len(part)] = product(x, part.t())
        at += len(part)
    return out


def pieces_of(w: Weight, dtype: torch.dtype) -> Iterator[Tensor]:
    """Return the rows of a frozen head, some at a time."""
    assert w.pieces is not None, "a head can be had by its rows"
    return w.pieces(dtype)


def sum_of_rows(grad: Tensor, w: Tensor | Weight) -> Tensor:
    """Return grad w [N, D] likewise."""
    if isinstance(w, Tensor):
        return product(grad, w)
    total, at = None, 0
    for part in pieces_of(w, grad.dtype):
        share = product(grad[:, at : at + len(part)], part)
        total, at = share if total is None else total.add_(share), at + len(part)
    assert total is not None, "a vocabulary has rows"
    return total


def rows_of(w: Tensor | Weight) -> int:
    """Return how many rows of the vocabulary a head has."""
    return len(w) if isinstance(w, Tensor) else w.sizes[0]


def logits_of(
    x: Tensor, weight: Tensor | Weight, bias: Tensor | None, first: int, vocab: int, cap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Return float32 (or better) logits of this rank's rows of the vocabulary; rows beyond ``vocab`` get -inf.

    With a cap c the logits are c tanh(logit / c) (Gemma 2, arXiv 2408.00118), and the tanh is returned as well.
    """
    logits = scores(x, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if bias is not None:
        logits += bias
    tanh = None
    if cap is not None:
        tanh = logits.div_(cap).tanh_()
        logits = tanh * cap
    if first + rows_of(weight) > vocab:
        logits[:, max(0, vocab - first) :] = -math.inf
    return logits, tanh


def log_softmax_at(logits: Tensor, local: Tensor, mine: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
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


def to_gradient(exps: Tensor, sums: Tensor, local: Tensor, mine: Tensor, share: Tensor, tanh: Tensor | None) -> None:
    """Turn what `log_softmax_at` left, in place, into the gradient of the sum of -share log p by the logits."""
    exps *= (share / sums)[:, None]
    exps.scatter_add_(1, local[:, None], torch.where(mine, -share, 0.0)[:, None])
    if tanh is not None:
        exps.mul_(tanh.square_().neg_().add_(1.0))


class CrossEntropy(torch.autograd.Function):
    """(x [N, D], w [V, D], b [V] or None, targets [N], weight [N]) -> (weighted sum of losses, its gradients)."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        x: Tensor,
        w: Tensor | Weight,
        b: Tensor | None,
        targets: Tensor,
        weight: Tensor,
        axis: Axis,
        vocab: int,
        cap: float | None,
        chunk: int,
        *need: bool,
    ) -> tuple[Tensor, ...]:
        rows = rows_of(w)
        first = axis.index * rows
        x_grad, w_grad, b_grad = (
            torch.zeros_like(t) if isinstance(t, Tensor) and wanted else x.new_empty(0)
            for t, wanted in zip((x, w, b), need, strict=True)
        )
        w_used = w.to(x.dtype) if isinstance(w, Tensor) else w
        total = torch.zeros((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        trained = weight.nonzero()[:, 0]
        whole = len(trained) == len(weight)
        for start in range(0, len(trained), chunk):
            place: Any = slice(start, start + chunk) if whole else trained[start : start + chunk]
            x_part, share = x[place], weight[place].to(total.dtype)
            local = targets[place] - first
            mine = (local >= 0) & (local < rows)
            local = local.clamp(0, rows - 1)
            grad, tanh = logits_of(x_part, w_used, b, first, vocab, cap)
            log_p, sums = log_softmax_at(grad, local, mine, axis)
            total -= (log_p * share).sum()
            if not any(need):
                continue
            to_gradient(grad, sums, local, mine, share, tanh)
            if need[2]:
                b_grad += grad.sum(0)
            grad = grad.to(x.dtype)
            if need[0]:
                x_grad[place] = sum_of_rows(grad, w_used)
            if need[1]:
                add_product(w_grad, grad, x_part)
            del grad, tanh  # or the next chunk's logits would stand beside them
        return total, x_grad, w_grad, b_grad

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output[1:])
        ctx.save_for_forward(*output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grads = ctx.saved_tensors
        if not (plain(grad) and float(grad) == 1.0):  # nearly always 1: then no second copy of the gradients is made
            grads = [each * grad.to(each.dtype) for each in grads]
        needed = ctx.needs_input_grad[:3]
        return *(g if need else None for g, need in zip(grads, needed, strict=True)), *(None,) * 9

    @staticmethod
    def jvp(ctx: Any, *changes: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grads = ctx.saved_tensors
        total = grads[0].new_zeros((), dtype=torch.promote_types(grads[0].dtype, torch.float32))
        for grad, change in zip(grads, changes, strict=False):
            if change is not None:
                total = total + (grad * change).sum()
        return total, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        """Score one sample after the other: each is a batch of tokens already, and chunks keep it small."""
        samples = [
            CrossEntropy.apply(*(a if d is None else a.select(d, i) for a, d in zip(arguments, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        return tuple(torch.stack(parts) for parts in zip(*samples, strict=True)), (0, 0, 0, 0)


def add_product(total: Tensor, grad: Tensor, x: Tensor) -> None:
    """Add gradᵀ x to ``total``, in its dtype."""
    if total.dtype == grad.dtype == torch.float32 or total.dtype == torch.float64:
        total.addmm_(grad.t(), x)
    else:
        total += grad.t() @ x


def wanted(x: Tensor | Weight | None) -> bool:
    """Tell whether somebody differentiates by ``x``, backward or forward."""
    if not isinstance(x, Tensor) or not torch.is_grad_enabled():
        return False
    return x.requires_grad or forward_ad.unpack_dual(x).tangent is not None


def cross_entropy(
    x: Tensor,
    w: Tensor | Weight,
    targets: Tensor,
    weight: Tensor,
    axis: Axis,
    *,
    vocab: int,
    bias: Tensor | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Return the weighted sum of -log softmax(x wᵀ + bias)[target] as a 0-d float32 tensor (float64 for float64).

    x [..., width] hidden states, whole on every rank of ``axis``; w [rows, width] and bias [rows], this rank's rows of
    the head (a `Weight` where they are frozen and had by pieces); targets and weight [...]. Ids at ``vocab`` and above
    are padding of the table and have no probability.
    softcap: c of c tanh(logit / c), applied before the softmax.
    chunk: positions whose logits exist at one time; by default as many as make 32 MiB of them in float32.
    """
    chunk = chunk or max(64, (1 << 23) // rows_of(w))
    flat = (x.flatten(0, -2), w, bias, targets.flatten(), weight.flatten())
    need = (wanted(x), wanted(w), wanted(bias))
    return CrossEntropy.apply(*flat, axis, vocab, softcap, chunk, *need)[0]  # pyright: ignore[reportOptionalSubscript]
