"""Compute a feed-forward: up, an activation or a gate, and down."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ironfn.model import fused
from ironfn.model.arch import Arch
from ironfn.model.norms import Normed
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
    return fused.linear(act.value(gate_BTF) * plus(up_BTF, maybe(p, "b_up")), w_down)
