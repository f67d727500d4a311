"""Multiply by a frozen matrix and a trained product of two thin ones beside it, and never make the sum.

Legend: w [in, out], a [in, r], b [r, out]; y = x w + scale (drop(x) a) b (Hu et al. 2021, arXiv 2106.09685).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ironfn.model.matmul import plain, product, weight_grad
from ironfn.model.modes import call, forward_ad_is_on
from ironfn.model.norms import Normed


class Held(Protocol):
    """Stand for a matrix that is kept in another form, and is there only while somebody multiplies by it."""

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return it, [in, out]."""
        ...


def dense(w: Tensor | Held, dtype: torch.dtype) -> Tensor:
    """Return a matrix that can be multiplied by, in that dtype where it has to be made."""
    return w if isinstance(w, Tensor) else w.dense(dtype)


def _plus_product(y: Tensor, u: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return y + scale u b, in the place of y where that can be."""
    if plain(y) and plain(u) and plain(b):
        y.view(-1, y.shape[-1]).addmm_(u.flatten(0, -2), b, alpha=scale)
        return y
    return y + scale * (u @ b)


class _LowRank(torch.autograd.Function):
    """(x, drop(x) or None where that is x, w, a, b, scale, remake, source of x) -> (y, x a).

    Keeps what a's gradient is made of, which is what a read or its source, and x a, which is thin; nothing for a
    frozen w.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        x: Tensor, dropped: Tensor | None, w: Tensor | Held, a: Tensor, b: Tensor, scale: float, *_: Any
    ) -> tuple[Tensor, Tensor]:
        u = product(x if dropped is None else dropped, a)
        return _plus_product(product(x, dense(w, x.dtype)), u, b, scale), u

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, dropped, w, a, b, ctx.scale, ctx.remake, *source = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.held, ctx.dtype, ctx.inputs = None if isinstance(w, Tensor) else w, x.dtype, len(inputs)
        kept = (source or [x]) if dropped is None or ctx.needs_input_grad[2] or forward_ad_is_on() else []
        saved = (dropped, w if ctx.held is None else None, a, b, output[1], *kept)
        ctx.save_for_backward(*saved)
        if forward_ad_is_on():
            ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is None:
            return (None,) * ctx.inputs
        dropped, w, a, b, u, *source = ctx.saved_tensors
        need_x, need_dropped, need_w, need_a, need_b = ctx.needs_input_grad[:5]
        low = product(grad, b.t()) * ctx.scale
        x_grad = None
        if need_x:
            x_grad = product(grad, dense(ctx.held or w, grad.dtype).t())
            x_grad = _plus_product(x_grad, low, a.t(), 1.0) if dropped is None else x_grad
        x = _again(ctx, source) if need_w or (need_a and dropped is None) else grad
        return (
            x_grad,
            product(low, a.t()) if need_dropped else None,
            weight_grad(x, grad) if need_w else None,
            weight_grad(x if dropped is None else dropped, low) if need_a else None,
            weight_grad(u * ctx.scale, grad) if need_b else None,
            *(None,) * (ctx.inputs - 5),
        )

    @staticmethod
    def jvp(ctx: Any, dx: Any, ddropped: Any, dw: Any, da: Any, db: Any, *_: Any) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        dropped, w, a, b, u, *source = ctx.saved_tensors
        x = _again(ctx, source)
        read, dread = (x, dx) if dropped is None else (dropped, ddropped)
        low = torch.zeros_like(u)
        for left, right in ((dread, a), (read, da)):
            low = low if left is None or right is None else low + left @ right
        change = ctx.scale * (low @ b)
        for left, right in ((dx, None if dx is None else dense(ctx.held or w, x.dtype)), (x, dw)):
            change = change if left is None or right is None else change + left @ right
        return change if db is None else change + ctx.scale * (u @ db), None


def _again(ctx: Any, source: list[Tensor]) -> Tensor:
    return source[0] if len(source) == 1 else ctx.remake(ctx.dtype, *source)


def low_rank(x: Normed, w: Tensor | Held, a: Tensor, b: Tensor, scale: float, dropped: Tensor | None = None) -> Tensor:
    """Return x w + scale (dropped a) b, with x [..., in]; dropped: what a reads, None for x itself."""
    return call(_LowRank, x.value, dropped, w, a, b, scale, x.remake, *x.source)[0]


class _Fixed(torch.autograd.Function):
    """(x, w) -> x w: for a matrix in another form, which is made once more for the backward pass."""

    @staticmethod
    def forward(x: Tensor, w: Held) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return product(x, w.dense(x.dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.w = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return product(grad, ctx.w.dense(grad.dtype).t()), None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, _: None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return dx @ ctx.w.dense(dx.dtype)


def fixed(x: Tensor, w: Held) -> Tensor:
    """Return x w. Keeps neither."""
    return call(_Fixed, x, w)
