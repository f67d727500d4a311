"""Compute a feed-forward: up, an activation or a gate, and down."""

from __future__ import annotations

from torch import Tensor

from ironfn.model import fused
from ironfn.model.arch import Arch
from ironfn.model.weights import Weight
from ironfn.tree import leaf
from ironfn.types import Params

_ACTIVATIONS = (
    ("swiglu", fused.SILU),
    ("geglu", fused.GELU_TANH),
    ("gelu", fused.GELU),
    ("gelu_tanh", fused.GELU_TANH),
)


def activation(arch: Arch) -> fused.Activation:
    """Return the activation of the feed-forwards: of the gate, where there is one."""
    return dict(_ACTIVATIONS)[arch.mlp]


def maybe(p: Params, name: str) -> Tensor | None:
    """Return the leaf of that name, None where there is none."""
    return leaf(p, name) if name in p else None


def plus(x: Tensor, bias: Tensor | None) -> Tensor:
    """Add a bias, where there is one."""
    return x if bias is None else x + bias


def feed_forward(x_BTD: Tensor, p: Params, arch: Arch) -> Tensor:
    """Return the feed-forward of x without its last bias: inside a tensor-parallel region it is a part of a sum."""
    act = activation(arch)
    w_up, w_down = leaf(p, "w_up"), leaf(p, "w_down")
    plain = not any(isinstance(p.get(name), Weight) for name in ("w_gate", "w_up", "w_down"))
    if arch.gated and "b_up" not in p and plain:
        return fused.gated_mlp(x_BTD, leaf(p, "w_gate"), w_up, w_down, act)
    up_BTF = plus(fused.linear(x_BTD, w_up), maybe(p, "b_up"))
    if not arch.gated:
        return fused.activate_down(up_BTF, w_down, act)
    gate_BTF = plus(fused.linear(x_BTD, leaf(p, "w_gate")), maybe(p, "b_gate"))
    return fused.linear(act.value(gate_BTF) * up_BTF, w_down)
