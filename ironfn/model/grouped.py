"""Multiply rows that are sorted by expert by their experts' matrices, in grouped products.

Rows past the sum of ``sizes`` belong to nobody: their results and gradients are 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ironfn.model.fused import Activation


def _one_kernel(x: Tensor, w: Tensor) -> bool:
    """Tell whether `grouped_mm` takes these: it wants strides of 16 bytes, and sizes stay on the device."""
    return (
        x.device.type == "cuda"
        and x.dtype == w.dtype == torch.bfloat16
        and all(size % 8 == 0 for size in (*x.shape[1:], *w.shape[1:]))
    )


def _ends(sizes: Tensor) -> Tensor:
    return sizes.cumsum(0).to(torch.int32)


def _without_tail(x: Tensor, sizes: Tensor) -> Tensor:
    """Zero the rows that belong to nobody, without waiting for the device to know how many they are."""
    return torch.where(torch.arange(len(x), device=x.device)[:, None] < sizes.sum(), x, 0.0)


def products(x: Tensor, w: Tensor, sizes: Tensor) -> Tensor:
    """Return the rows x [n, in] times their experts' w [experts, in, out], the first ``sizes[0]`` times w[0], ….

    It has no derivative: call it inside an `autograd.Function`.
    """
    if _one_kernel(x, w):
        return _without_tail(F.grouped_mm(x, w, offs=_ends(sizes)), sizes)
    out, start = x.new_empty(len(x), w.shape[2]), 0
    for expert, size in enumerate(sizes.tolist()):
        torch.mm(x[start : start + size], w[expert], out=out[start : start + size])
        start += size
    out[start:].zero_()
    return out


def weight_grads(x: Tensor, grad: Tensor, sizes: Tensor) -> Tensor:
    """Return each expert's xᵀ grad over its own rows: [experts, in, out]; 0 for one without a row."""
    if x.device.type == "cuda" and x.dtype == torch.bfloat16 and x.shape[1] % 8 == grad.shape[1] % 8 == 0:
        return F.grouped_mm(x.t(), grad, offs=_ends(sizes))
    out, start = x.new_empty(len(sizes), x.shape[1], grad.shape[1]), 0
    for expert, size in enumerate(sizes.tolist()):
        torch.mm(x[start : start + size].t(), grad[start : start + size], out=out[expert])
        start += size
    return out


class _GroupedMlp(torch.autograd.Function):
    """(x, w_gate or None, w_up, w_down, sizes, act) -> (rows, gate or None, up); keeps gate and up as `gated_mlp`."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor, sizes: Tensor, act: Activation
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        gate = None if w_gate is None else products(x, w_gate, sizes)
        up = products(x, w_up, sizes)
        middle = act.value(up) if gate is None else act.value(gate).mul_(up)
        return products(middle, w_down, sizes), gate, up

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.act = inputs
        ctx.mark_non_differentiable(*(t for t in output[1:] if t is not None))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, output[1], output[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w_gate, w_up, w_down, sizes, gate, up = ctx.saved_tensors
        need_x, need_gate, need_up, need_down = ctx.needs_input_grad[:4]
        middle_grad = products(grad, w_down.transpose(1, 2), sizes)
        if gate is None:
            down_grad = weight_grads(ctx.act.value(up), grad, sizes) if need_down else None
            up_grad = ctx.act.backward(middle_grad, up)
            x_grad = products(up_grad, w_up.transpose(1, 2), sizes) if need_x else None
            return x_grad, None, weight_grads(x, up_grad, sizes) if need_up else None, down_grad, None, None
        value = ctx.act.value(gate)
        down_grad = weight_grads(value * up, grad, sizes) if need_down else None
        up_grad = value.mul_(middle_grad)
        gate_grad = ctx.act.backward(middle_grad.mul_(up), gate)
        x_grad = None
        if need_x:
            x_grad = products(gate_grad, w_gate.transpose(1, 2), sizes)
            x_grad = x_grad.add_(products(up_grad, w_up.transpose(1, 2), sizes))
        return (
            x_grad,
            weight_grads(x, gate_grad, sizes) if need_gate else None,
            weight_grads(x, up_grad, sizes) if need_up else None,
            down_grad,
            None,
            None,
        )


def grouped_mlp(
    x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor, sizes: Tensor, act: Activation
) -> Tensor:
    """Return every row's own expert's feed-forward of it, gated where there is a ``w_gate``.

    x [n, width], sorted by expert; sizes int64 [experts], the rows of each; w_gate and w_up [experts, width, ffn],
    w_down [experts, ffn, width].
    """
    return _GroupedMlp.apply(x, w_gate, w_up, w_down, sizes, act)[0]  # pyright: ignore[reportOptionalSubscript]
