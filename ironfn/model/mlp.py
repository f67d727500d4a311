"""Compute a feed-forward: up, an activation or a gate, and down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ironfn.model import fused
from ironfn.model.arch import Arch
from ironfn.model.modes import call
from ironfn.model.norms import Normed
from ironfn.model.weights import Weight
from ironfn.tree import leaf
from ironfn.types import Params

_ACTIVATIONS: Mapping[str, fused.Activation] = MappingProxyType(
    {"swiglu": fused.SILU, "geglu": fused.GELU_TANH, "gelu": fused.GELU, "gelu_tanh": fused.GELU_TANH}
)


def activation(arch: Arch) -> fused.Activation:
    """Return the activation of the feed-forwards: of the gate, where there is one."""
    return _ACTIVATIONS[arch.mlp]


def maybe(p: Params, name: str) -> Tensor | None:
    """Return the leaf of that name, None where there is none."""
    return leaf(p, name) if name in p else None


def plus(x: Tensor, bias: Tensor | None) -> Tensor:
    """Add a bias, where there is one."""
    return x if bias is None else x + bias


def products(x: Normed, p: Params, *names: str) -> Sequence[Tensor]:
    """Return x w for every leaf w of these names: one product, where `prepared` has joined them."""
    joint = p.get("+".join(names))
    if isinstance(joint, Weight):
        return joint.times(x.value).split_with_sizes(joint.sizes, -1)
    return fused.linears(x, *(leaf(p, name) for name in names))


def feed_forward(x_BTD: Normed, p: Params, arch: Arch) -> Tensor:
    """Return the feed-forward of x without its last bias: inside a tensor-parallel region it is a part of a sum."""
    act = activation(arch)
    w_down = leaf(p, "w_down")
    if not arch.gated:
        return fused.activate_down(plus(products(x_BTD, p, "w_up")[0], maybe(p, "b_up")), w_down, act)
    plain = all(isinstance(p.get(name), Tensor) for name in ("w_gate", "w_up", "w_down"))
    if plain and "b_up" not in p:
        return fused.gated_mlp(x_BTD, leaf(p, "w_gate"), leaf(p, "w_up"), w_down, act)
    gate_BTF, up_BTF = products(x_BTD, p, "w_gate", "w_up")
    gate_BTF = plus(gate_BTF, maybe(p, "b_gate"))
    return fused.linears(_gated(gate_BTF, plus(up_BTF, maybe(p, "b_up")), act), w_down)[0]


class _Gated(torch.autograd.Function):
    """(gate, up, act) -> act(gate) * up; keeps these two, which whoever reads the result may keep as well."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gate: Tensor, up: Tensor, act: fused.Activation) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return act.value(gate).mul_(up)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        gate, up, ctx.act = inputs
        ctx.save_for_backward(gate, up)
        ctx.save_for_forward(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = ctx.saved_tensors
        return ctx.act.backward(grad * up, gate), ctx.act.value(gate).mul_(grad), None

    @staticmethod
    def jvp(ctx: Any, d_gate: Tensor | None, d_up: Tensor | None, _: None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = ctx.saved_tensors
        change = torch.zeros_like(gate) if d_gate is None else ctx.act.backward(d_gate, gate) * up
        return change if d_up is None else change + ctx.act.value(gate) * d_up


def _gated(gate: Tensor, up: Tensor, act: fused.Activation) -> Normed:
    return Normed(call(_Gated, gate, up, act), (gate, up), partial(_gated_again, act))


def _gated_again(act: fused.Activation, dtype: torch.dtype, gate: Tensor, up: Tensor) -> Tensor:
    return (act.value(gate) * up).to(dtype)
