"""Normalise activations, and let whoever reads the result keep what it came from instead."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ironfn.model.modes import call, underived

aten: Any = torch.ops.aten


def _rstd(x: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(mean(x²) + eps) over the last dimension, in float32 or better whatever the dtype of ``x``."""
    high = torch.promote_types(x.dtype, torch.float32)
    squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=high).square()
    return squares.div_(x.shape[-1]).add_(eps).rsqrt()


def normed(dtype: torch.dtype, x: Tensor, rstd: Tensor, scale: Tensor, *shift: Tensor) -> Tensor:
    """Return a norm's result out of its source, in ``dtype``."""
    mean, bias = shift[:1], shift[1:]
    result = ((x - mean[0]) if mean else x) * rstd
    result = result.mul_(scale)
    return (result.add_(bias[0]) if bias else result).to(dtype)


class Normed(NamedTuple):
    """A norm's result, and the tensors that it can be computed from again: x, 1 / deviation, scale [, mean [, bias]].

    The products that read the result keep those instead of it: they are kept anyway, or small. Without them
    (an input that is no norm's result, or has passed a collective) the value itself is kept. remake: (dtype, *source)
    -> value, where it is another function's result.
    """

    value: Tensor
    source: tuple[Tensor, ...] = ()
    remake: Callable[..., Tensor] = normed


class _RmsNorm(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rstd = _rstd(x, eps)
        return normed(x.dtype, x, rstd, scale), rstd

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


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Normed:
    """Return x / sqrt(mean(x²) + eps) * scale over the last dimension (Zhang & Sennrich 2019, arXiv 1910.07467).

    Statistics are float32 or better; the result has the dtype of ``x``. Keeps ``x`` and one number a row.
    """
    if x.dtype == scale.dtype and x.dtype in (torch.float32, torch.float64) and underived():
        return Normed(F.rms_norm(x, scale.shape, scale, eps))
    value, rstd = call(_RmsNorm, x, scale, eps)
    return Normed(value, (x, rstd, scale))


def fixed_rms_norm(scale: Tensor, eps: float) -> Callable[[Tensor], Tensor]:
    """Return `rms_norm` as a function of x alone, in few calls and without a derivative: x / hypot(|x|, …) times …"""
    width = len(scale)
    least, scale = scale.new_tensor(math.sqrt(width * eps)), scale * math.sqrt(width)
    return partial(_fixed_rms_norm, least, scale)


def _fixed_rms_norm(least: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    return x.div(torch.linalg.vector_norm(x, 2, -1, True).hypot(least)).mul_(scale)


def layer_norm(x: Tensor, scale: Tensor, bias: Tensor | None, eps: float) -> Normed:
    """Return (x - mean) / sqrt(variance + eps) * scale + bias over the last dimension (Ba et al. 2016, 1607.06450).

    Computed in the dtype of ``scale``; the result has that of ``x``.
    """
    high = x.to(scale.dtype)
    value, mean, rstd = torch.native_layer_norm(high, x.shape[-1:], scale, bias, eps)
    return Normed(value.to(x.dtype), (high, rstd, scale, mean, *(() if bias is None else (bias,))))
