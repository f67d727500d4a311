"""Multiply rows that are sorted by expert by their experts' matrices, in grouped products.

Rows past the sum of ``sizes`` belong to nobody: their results and gradients are 0.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ironfn.model.fused import Activation
from ironfn.model.matmul import product


class _GroupedMlp(torch.autograd.Function):
    """(x, w_gate or None, w_up, w_down, sizes, act) -> (rows, gate or None, up); keeps gate and up as `gated_mlp`."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor, sizes: Tensor, act: Activation
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        way = _together if _one_kernel(x, w_up) else _one_by_one
        return way(x, w_gate, w_up, w_down, sizes, act)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.act = inputs
        ctx.mark_non_differentiable(*(t for t in output[1:] if t is not None))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, output[1], output[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, _w, w_up, *_rest = saved = ctx.saved_tensors
        way = _together_backward if _one_kernel(x, w_up) else _one_by_one_backward
        return *way(grad, saved, ctx.act, ctx.needs_input_grad[:4]), None, None


Needs = tuple[bool, bool, bool, bool]
Grads = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def _spans(sizes: Tensor) -> list[slice]:
    """Return each expert's rows, and those at the end that belong to nobody."""
    ends = [0, *sizes.cumsum(0).tolist(), None]
    return [slice(start, end) for start, end in pairwise(ends)]


def _one_by_one(
    x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor, sizes: Tensor, act: Activation
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Take one expert after the other, so that what lies between its products never leaves the cache."""
    up = x.new_empty(len(x), w_up.shape[2])
    gate, out = None if w_gate is None else torch.empty_like(up), torch.empty_like(x)
    *experts, nobody = _spans(sizes)
    for expert, at in enumerate(experts):
        middle = up[at].copy_(product(x[at], w_up[expert]))
        if w_gate is None or gate is None:
            middle = act.value(middle)
        else:
            middle = act.value(gate[at].copy_(product(x[at], w_gate[expert]))).mul_(middle)
        out[at].copy_(product(middle, w_down[expert]))
    out[nobody].zero_()
    return out, gate, up


def _one_by_one_backward(grad: Tensor, saved: tuple[Any, ...], act: Activation, needs: Needs) -> Grads:
    x, w_gate, w_up, w_down, sizes, gate, up = saved
    x_grad = torch.empty_like(x) if needs[0] else None
    gate_grads, up_grads, down_grads = (
        torch.empty_like(w, memory_format=torch.contiguous_format) if need else None
        for w, need in zip((w_gate, w_up, w_down), needs[1:], strict=True)
    )
    *experts, nobody = _spans(sizes)
    for expert, at in enumerate(experts):
        middle_grad = product(grad[at], w_down[expert].t())
        value = act.value(up[at] if gate is None else gate[at])
        _weight_grad(down_grads, expert, value if gate is None else value * up[at], grad[at])
        up_grad = act.backward(middle_grad, up[at]) if gate is None else value.mul_(middle_grad)
        gate_grad = None if gate is None else act.backward(middle_grad.mul_(up[at]), gate[at])
        _weight_grad(up_grads, expert, x[at], up_grad)
        if gate_grad is not None:
            _weight_grad(gate_grads, expert, x[at], gate_grad)
        if x_grad is not None:
            x_grad[at].copy_(product(up_grad, w_up[expert].t()))
            if gate_grad is not None:
                x_grad[at].add_(product(gate_grad, w_gate[expert].t()))
    if x_grad is not None:
        x_grad[nobody].zero_()
    return x_grad, gate_grads, up_grads, down_grads


def _weight_grad(grads: Tensor | None, expert: int, x: Tensor, grad: Tensor) -> None:
    """Write xᵀ grad into its place in the stack; 0 for an expert without a row."""
    if grads is not None:
        torch.mm(x.t(), grad, out=grads[expert])


def _one_kernel(x: Tensor, w: Tensor) -> bool:
    """Tell whether `grouped_mm` takes these: it wants strides of 16 bytes, and leaves the sizes on the device."""
    return x.device.type == "cuda" and x.dtype == w.dtype == torch.bfloat16 and w.shape[1] % 8 == w.shape[2] % 8 == 0


def _together(
    x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor, sizes: Tensor, act: Activation
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Give all experts' products to one kernel, and never ask the device how many rows each of them has."""
    ends = sizes.cumsum(0).to(torch.int32)
    up = F.grouped_mm(x, w_up, offs=ends)
    gate = None if w_gate is None else F.grouped_mm(x, w_gate, offs=ends)
    middle = act.value(up) if gate is None else act.value(gate).mul_(up)
    return _without_tail(F.grouped_mm(middle, w_down, offs=ends), ends), gate, up


def _together_backward(grad: Tensor, saved: tuple[Any, ...], act: Activation, needs: Needs) -> Grads:
    x, w_gate, w_up, w_down, sizes, gate, up = saved
    ends = sizes.cumsum(0).to(torch.int32)
    middle_grad = F.grouped_mm(grad, w_down.transpose(1, 2), offs=ends)
    value = act.value(up if gate is None else gate)
    middle = value if gate is None else value * up
    down_grads = F.grouped_mm(middle.t(), grad, offs=ends) if needs[3] else None
    up_grad = act.backward(middle_grad, up) if gate is None else value.mul_(middle_grad)
    gate_grad = None if gate is None else act.backward(middle_grad.mul_(up), gate)
    x_grad = F.grouped_mm(up_grad, w_up.transpose(1, 2), offs=ends) if needs[0] else None
    if x_grad is not None and gate_grad is not None:
        x_grad += F.grouped_mm(gate_grad, w_gate.transpose(1, 2), offs=ends)
    return (
        None if x_grad is None else _without_tail(x_grad, ends),
        F.grouped_mm(x.t(), gate_grad, offs=ends) if gate_grad is not None and needs[1] else None,
        F.grouped_mm(x.t(), up_grad, offs=ends) if needs[2] else None,
        down_grads,
    )


def _without_tail(x: Tensor, ends: Tensor) -> Tensor:
    """Zero the rows that belong to nobody, which the kernel leaves as it finds them."""
    return torch.where(torch.arange(len(x), device=x.device)[:, None] < ends[-1], x, 0.0)


def grouped_mlp(
    x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor, sizes: Tensor, act: Activation
) -> Tensor:
    """Return every row's own expert's feed-forward of it, gated where there is a ``w_gate``.

    x [n, width], sorted by expert; sizes int64 [experts], the rows of each; w_gate and w_up [experts, width, ffn],
    w_down [experts, ffn, width].
    """
    return _GroupedMlp.apply(x, w_gate, w_up, w_down, sizes, act)[0]  # pyright: ignore[reportOptionalSubscript]
