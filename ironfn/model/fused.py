"""Fuse the parts whose plain form would keep too much: each saves its inputs and recomputes the rest backward.

Every function here has a formula for each of torch's three modes: `backward`, `jvp` and (generated) `vmap`,
so that a loss built on them works under `torch.func` too. None of them changes a value beyond rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from ironfn.model.matmul import product, weight_grad
from ironfn.model.weights import Weight

aten: Any = torch.ops.aten


@frozen
class Activation:
    """Pair an activation with the product of its derivative and a gradient."""

    value: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


SILU = Activation(F.silu, lambda grad, x: aten.silu_backward(grad, x))
GELU = Activation(F.gelu, lambda grad, x: aten.gelu_backward(grad, x))
GELU_TANH = Activation(
    lambda x: F.gelu(x, approximate="tanh"), lambda grad, x: aten.gelu_backward(grad, x, approximate="tanh")
)


def _rstd(x: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(mean(x²) + eps) over the last dimension, in float32 or better whatever the dtype of ``x``."""
    high = torch.promote_types(x.dtype, torch.float32)
    squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=high).square()
    return squares.div_(x.shape[-1]).add_(eps).rsqrt_()


def _underived() -> bool:
    """Tell whether nobody asks for a derivative of what is computed now."""
    return not (torch.is_grad_enabled() or forward_ad_is_on() or torch._C._are_functorch_transforms_active())


def call(function: Any, *arguments: Any) -> Any:
    """Apply a function, or only its plain form where nobody asks for a derivative: `apply` costs as much as a product.

    A compiler cannot look into a function that has a ``jvp``: it is given the plain form, too.
    """
    return (function.forward if _underived() or torch.compiler.is_compiling() else function.apply)(*arguments)


def forward_ad_is_on() -> bool:
    """Tell whether somebody may ask for forward derivatives: only then is anything kept for them."""
    return forward_ad._current_level >= 0


class _RmsNorm(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rstd = _rstd(x, eps)
        return (x * rstd).mul_(scale).to(x.dtype), rstd

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, scale, ctx.eps = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, scale, output[1])
        ctx.save_for_forward(x, scale, output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, scale, rstd = ctx.saved_tensors
        width = x.shape[-1]
        high, x_high, scale_high = (t.to(rstd.dtype) for t in (grad, x, scale))
        # LayerNorm's fused backward with a mean of 0 lacks one term: it takes the mean of the gradient away, which no
        # RMSNorm does. Putting that back is still an order of magnitude less work than the formula in plain operations.
        x_grad, scale_grad, _ = aten.native_layer_norm_backward(
            high, x_high, [width], torch.zeros_like(rstd), rstd, scale_high, None, [True, True, False]
        )
        x_grad = x_grad.add_((high @ scale_high).unsqueeze(-1) * rstd / width)
        return x_grad.to(grad.dtype), scale_grad.to(scale.dtype), None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dscale: Tensor | None, _: None) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, scale, rstd = ctx.saved_tensors
        unit = x * rstd
        change = (
            torch.zeros_like(unit) if dx is None else (dx - unit * (unit * dx).mean(-1, keepdim=True)) * rstd * scale
        )
        if dscale is not None:
            change = change + unit * dscale
        return change.to(x.dtype), None


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) * scale over the last dimension (Zhang & Sennrich 2019, arXiv 1910.07467).

    Statistics are float32 or better; the result has the dtype of ``x``. Keeps ``x`` and one number a row.
    """
    if x.dtype == scale.dtype and x.dtype in (torch.float32, torch.float64) and _underived():
        return F.rms_norm(x, scale.shape, scale, eps)
    return call(_RmsNorm, x, scale, eps)[0]


class _Linear(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return product(x, w)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, w = inputs
        need_x, need_w = ctx.needs_input_grad
        ctx.save_for_backward(x if need_w else None, w if need_x else None)
        if forward_ad_is_on():
            ctx.save_for_forward(x, w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w = ctx.saved_tensors
        need_x, need_w = ctx.needs_input_grad
        return product(grad, w.t()) if need_x else None, weight_grad(x, grad) if need_w else None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dw: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w = ctx.saved_tensors
        change = torch.zeros_like(x @ w) if dx is None else dx @ w
        return change if dw is None else change + x @ dw


def linear(x: Tensor, w: Tensor) -> Tensor:
    """Return x w with x [..., in] and w [in, out], or a `weights.Weight` in its place."""
    return w.times(x) if isinstance(w, Weight) else call(_Linear, x, w)


class _GatedMlp(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, act: Activation
    ) -> tuple[Tensor, Tensor, Tensor]:
        gate, up = product(x, w_gate), product(x, w_up)
        return product(act.value(gate).mul_(up), w_down), gate, up

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.act = inputs
        ctx.mark_non_differentiable(output[1], output[2])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, output[1], output[2])
        ctx.save_for_forward(*tensors, output[1], output[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w_gate, w_up, w_down, gate, up = ctx.saved_tensors
        need_x, need_gate, need_up, need_down, _ = ctx.needs_input_grad
        middle_grad = product(grad, w_down.t())
        value = ctx.act.value(gate)
        down_grad = weight_grad(value * up, grad) if need_down else None
        up_grad = value.mul_(middle_grad)
        gate_grad = ctx.act.backward(middle_grad.mul_(up), gate)
        return (
            product(gate_grad, w_gate.t()).add_(product(up_grad, w_up.t())) if need_x else None,
            weight_grad(x, gate_grad) if need_gate else None,
            weight_grad(x, up_grad) if need_up else None,
            down_grad,
            None,
        )

    @staticmethod
    def jvp(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, dx: Tensor | None, d_gate: Tensor | None, d_up: Tensor | None, d_down: Tensor | None, _: None
    ) -> tuple[Tensor, None, None]:
        x, w_gate, w_up, w_down, gate, up = ctx.saved_tensors
        zero = torch.zeros_like
        dx = zero(x) if dx is None else dx
        gate_change = dx @ w_gate + (0 if d_gate is None else x @ d_gate)
        up_change = dx @ w_up + (0 if d_up is None else x @ d_up)
        value = ctx.act.value(gate)
        change = (ctx.act.backward(gate_change, gate) * up + value * up_change) @ w_down
        return change if d_down is None else change + (value * up) @ d_down, None, None


def gated_mlp(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, act: Activation) -> Tensor:
    """Return (act(x w_gate) * (x w_up)) w_down (Shazeer 2020, arXiv 2002.05202).

    x [..., width]; w_gate and w_up [width, ffn], w_down [ffn, width]. Keeps gate and up, not their product.
    """
    return call(_GatedMlp, x, w_gate, w_up, w_down, act)[0]


class _ActDown(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w_down: Tensor, act: Activation) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return product(act.value(x), w_down)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, w_down, ctx.act = inputs
        ctx.save_for_backward(x, w_down)
        ctx.save_for_forward(x, w_down)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w_down = ctx.saved_tensors
        need_x, need_down, _ = ctx.needs_input_grad
        down_grad = weight_grad(ctx.act.value(x), grad) if need_down else None
        return ctx.act.backward(product(grad, w_down.t()), x) if need_x else None, down_grad, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, d_down: Tensor | None, _: None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w_down = ctx.saved_tensors
        change = torch.zeros_like(x) @ w_down if dx is None else ctx.act.backward(dx, x) @ w_down
        return change if d_down is None else change + ctx.act.value(x) @ d_down


def activate_down(x: Tensor, w_down: Tensor, act: Activation) -> Tensor:
    """Return act(x) w_down with x [..., ffn] and w_down [ffn, width]. Keeps ``x``, not its activation."""
    return w_down.times(act.value(x)) if isinstance(w_down, Weight) else call(_ActDown, x, w_down, act)


class _Rotate(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _turn(x, cos, sin)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, cos, sin = inputs
        ctx.save_for_backward(cos, sin)
        ctx.save_for_forward(cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, -sin), None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, *_: None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _turn(dx, *ctx.saved_tensors)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    other = torch.cat([x[..., half:], x[..., :half]], -1).to(torch.promote_types(x.dtype, cos.dtype))
    return torch.addcmul(other.mul_(sin), x, cos).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + head_dim / 2) of x [rows, length, heads, head_dim] by their angles.

    cos: float32 [rows or 1, length, 1, head_dim], every angle's given twice; sin: likewise, the first time negated.
    The transpose is the turn back.
    """
    return call(_Rotate, x, cos, sin)


def rotate_both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turn q and k by the same angles, at once where nobody asks for a derivative: calls are what that costs."""
    if not _underived():
        return rotate(q, cos, sin), rotate(k, cos, sin)
    q, k = _turn(torch.cat([q, k], 2), cos, sin).split_with_sizes((q.shape[2], k.shape[2]), 2)
    return q, k


def lookup(ids: Tensor, table: Tensor) -> Tensor:
    """Return the rows of table [rows, width] that ``ids`` [...] name, or what a `weights.Weight` makes of the ids."""
    return table.times(ids) if isinstance(table, Weight) else F.embedding(ids, table)
