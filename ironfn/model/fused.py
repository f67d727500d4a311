"""Fuse the parts whose plain form would keep too much: each saves its inputs and recomputes the rest backward.

Every function here has a formula for each of torch's three modes: `backward`, `jvp` and (generated) `vmap`,
so that a loss built on them works under `torch.func` too. None of them changes a value beyond rounding.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional as F

from ironfn.model.matmul import plain, product, weight_grad
from ironfn.model.modes import call, forward_ad_is_on
from ironfn.model.norms import Normed, normed
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


def _kept(ctx: Any, wanted: bool, x: Tensor, source: list[Tensor], *others: Tensor) -> None:
    """Save the others and, where x is wanted for a gradient, its source."""
    forward = forward_ad_is_on()
    ctx.dtype, ctx.others = x.dtype, len(others)
    saved = (*others, *((source or [x]) if wanted or forward else ()))
    ctx.save_for_backward(*saved)
    if forward:
        ctx.save_for_forward(*saved)


def _saved(ctx: Any) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """Return what gives x, when it is wanted, and the others, as they were given to `_kept`."""
    tensors = list(ctx.saved_tensors)  # unpacked once: remat does not allow it twice
    others, source = tensors[: ctx.others], tensors[ctx.others :]
    return (lambda: source[0] if len(source) == 1 else normed(ctx.dtype, *source)), others


class _Linears(torch.autograd.Function):
    """(x, number of weights, weights and then the source of x) -> the products."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(product(x, w) for w in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, count, *tensors = inputs
        ctx.set_materialize_grads(False)
        _kept(ctx, any(ctx.needs_input_grad[2 : 2 + count]), x, tensors[count:], *tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weights = _saved(ctx)
        need_x, _, *need = ctx.needs_input_grad
        x_grad: Tensor | None = None
        for grad, w in zip(grads, weights, strict=True):
            if need_x and grad is not None:
                part = product(grad, w.t())
                x_grad = part if x_grad is None else x_grad.add_(part)
        value = x() if any(need[: len(weights)]) else None
        weight_grads = (
            None if value is None or grad is None or not wanted else weight_grad(value, grad)
            for grad, wanted in zip(grads, need, strict=False)
        )
        return x_grad, None, *weight_grads, *(None,) * (len(need) - len(weights))

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, _: None, *changes: Tensor | None) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        source, weights = _saved(ctx)
        x = source()
        zero = torch.zeros_like(x)
        return tuple(
            (zero if dx is None else dx) @ w + (0 if dw is None else x @ dw)
            for w, dw in zip(weights, changes, strict=False)
        )


def linears(x: Normed, *weights: Tensor) -> tuple[Tensor, ...]:
    """Return x w for every w, as `linear` does. Keeps the source of x once for all."""
    if any(isinstance(w, Weight) for w in weights):
        return tuple(_read(x, w) for w in weights)
    return call(_Linears, x.value, len(weights), *weights, *(x.source if x.remake is normed else ()))


def _read(x: Normed, w: Tensor) -> Tensor:
    return w.reads(x) if isinstance(w, Weight) and w.reads is not None else linear(x.value, w)


def linear(x: Tensor, w: Tensor) -> Tensor:
    """Return x w with x [..., in] and w [in, out], or a `weights.Weight` in its place."""
    return w.times(x) if isinstance(w, Weight) else linears(Normed(x), w)[0]


def _pieces(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Cut tensors that are alike but for their last dimension into groups of rows, on a CPU in float32 or better.

    What a group makes on its way stays in the cache, and fits where what was kept before has been freed.
    """
    if tensors[0].device.type != "cpu" or tensors[0].dtype.itemsize < 4 or not all(map(plain, tensors)):
        return [tensors]
    rows = max(256, _PIECE // max(x.shape[-1] for x in tensors))
    return zip(*(x.flatten(0, -2).split(rows) for x in tensors), strict=True)


_PIECE = 1 << 20  # numbers: 4 MiB of float32


class _GatedMlp(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, act: Activation, *source: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        gate, up = product(x, w_gate), product(x, w_up)
        return product(act.value(gate).mul_(up), w_down), gate, up

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, w_gate, w_up, w_down, ctx.act, *source = inputs
        ctx.mark_non_differentiable(output[1], output[2])
        ctx.set_materialize_grads(False)
        wanted = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        _kept(ctx, wanted, x, source, w_gate, w_up, w_down, output[1], output[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, (w_gate, w_up, w_down, gate, up) = _saved(ctx)
        need_x, need_gate, need_up, need_down, _, *source = ctx.needs_input_grad
        read = x() if need_gate or need_up else grad
        sums: list[Tensor | None] = [None, None, None]
        x_grads: list[Tensor] = []
        for x_part, grad_part, gate_part, up_part in _pieces(read, grad, gate, up):
            value, middle_grad = ctx.act.value(gate_part), product(grad_part, w_down.t())
            sums[2] = weight_grad(value * up_part, grad_part, sums[2]) if need_down else None
            up_grad = value.mul_(middle_grad)
            gate_grad = ctx.act.backward(middle_grad.mul_(up_part), gate_part)
            if need_x:
                x_grads.append(product(gate_grad, w_gate.t()).add_(product(up_grad, w_up.t())))
            sums[0] = weight_grad(x_part, gate_grad, sums[0]) if need_gate else None
            sums[1] = weight_grad(x_part, up_grad, sums[1]) if need_up else None
        x_grad = (torch.cat(x_grads) if len(x_grads) > 1 else x_grads[0]).view(grad.shape) if need_x else None
        return x_grad, *sums, *(None,) * (1 + len(source))

    @staticmethod
    def jvp(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, dx: Tensor | None, d_gate: Tensor | None, d_up: Tensor | None, d_down: Tensor | None, *_: Any
    ) -> tuple[Tensor, None, None]:
        source, (w_gate, w_up, w_down, gate, up) = _saved(ctx)
        x = source()
        zero = torch.zeros_like
        dx = zero(x) if dx is None else dx
        gate_change = dx @ w_gate + (0 if d_gate is None else x @ d_gate)
        up_change = dx @ w_up + (0 if d_up is None else x @ d_up)
        value = ctx.act.value(gate)
        change = (ctx.act.backward(gate_change, gate) * up + value * up_change) @ w_down
        return change if d_down is None else change + (value * up) @ d_down, None, None


def gated_mlp(x: Normed, w_gate: Tensor, w_up: Tensor, w_down: Tensor, act: Activation) -> Tensor:
    """Return (act(x w_gate) * (x w_up)) w_down (Shazeer 2020, arXiv 2002.05202).

    x [..., width]; w_gate and w_up [width, ffn], w_down [ffn, width]. Keeps gate and up, not their product.
    """
    return call(_GatedMlp, x.value, w_gate, w_up, w_down, act, *x.source)[0]


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
    other = torch.roll(x, x.shape[-1] // 2, -1).to(torch.promote_types(x.dtype, cos.dtype)).mul_(sin)
    # in place, which vmap cannot: a third tensor would leave a hole between those that are kept
    return (other.addcmul_(x, cos) if plain(other) else torch.addcmul(other, x, cos)).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + head_dim / 2) of x [rows, length, heads, head_dim] by their angles.

    cos: float32 [rows or 1, length, 1, head_dim], every angle's given twice; sin: likewise, the first time negated.
    The transpose is the turn back.
    """
    return call(_Rotate, x, cos, sin)


class _Lookup(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(ids: Tensor, table: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return F.embedding(ids, table)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ids, table = inputs
        ctx.rows = len(table)
        ctx.save_for_backward(ids)
        ctx.save_for_forward(ids)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (ids,) = ctx.saved_tensors
        if not plain(grad):
            empty = grad.new_zeros(ctx.rows, grad.shape[-1])
            return None, empty.index_add(0, ids.flatten(), grad.flatten(0, -2))
        if grad.device.type != "cpu":
            return None, aten.embedding_dense_backward(grad, ids, ctx.rows, -1, False)
        # Pages that do not exist until they are written: of a large table only the rows that were looked up do, and
        # where the head is tied, adding the others to its gradient brings none of them into being.
        size = ctx.rows * grad.shape[-1]
        pages = mmap.mmap(-1, size * grad.element_size(), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        table = torch.frombuffer(pages, dtype=grad.dtype).view(ctx.rows, -1)
        return None, table.index_add_(0, ids.flatten(), grad.flatten(0, -2))

    @staticmethod
    def jvp(ctx: Any, _: None, change: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return F.embedding(ctx.saved_tensors[0], change)


def lookup(ids: Tensor, table: Tensor) -> Tensor:
    """Return the rows of table [rows, width] that ``ids`` [...] name, or what a `weights.Weight` makes of the ids."""
    return table.times(ids) if isinstance(table, Weight) else call(_Lookup, ids, table)
