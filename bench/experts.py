"""Measure a layer of experts, forward and backward, against loops over them: same routing, same result held equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional as F

from bench.figure import Figure, alternate
from ironfn.mesh.axis import Axis
from ironfn.model.experts import Choice, grouped
from ironfn.model.fused import SILU

WIDTH, FFN, EXPERTS, TOP_K, ROWS, LENGTH = 384, 1024, 16, 2, 8, 256


@frozen
class Layer:
    """Hold the inputs of a layer of experts: stacked weights as [in, out], and the routing of every token."""

    x: Tensor
    weights: Tensor
    ids: Tensor
    w_gate: Tensor
    w_up: Tensor
    w_down: Tensor
    grad: Tensor


def figures(rounds: int = 5) -> Iterator[Figure]:
    """Yield how many times as fast the grouped layer is as the one of `transformers`, on one thread and on two.

    Theirs, `MixtralExperts` in its eager implementation, is a loop over the experts that were hit, of stacked weights.
    The note tells, too, of a loop over weights that are tensors of their own: no stack's gradient is added up there, so
    that it does hardly anything but the products that all three have in common.
    """
    layer = draw(WIDTH, FFN)
    contenders: dict[str, Callable[[], Any]] = {
        "ironfn": ours(layer),
        "transformers": transformers(layer),
        "separate": separate(layer),
    }
    _agree([call() for call in contenders.values()])
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        seconds = alternate(contenders, rounds)
        note = ", ".join(f"{who} {1000 * s:.0f} ms" for who, s in seconds.items())
        note += f"; {ROWS * LENGTH} tokens, {TOP_K} of {EXPERTS} experts of {WIDTH} x {FFN}"
        ratio = seconds["transformers"] / seconds["ironfn"]
        yield Figure(f"experts_ratio_{threads}_thread{'s' * (threads > 1)}", ratio, ">= 1.5", note)
    torch.set_num_threads(before)


def draw(width: int, ffn: int) -> Layer:
    """Draw a layer whose tokens choose at random, and the gradient that comes back to it."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return std * torch.randn(shape, generator=g)

    weights, ids = normal(ROWS, LENGTH, EXPERTS).softmax(-1).topk(TOP_K)
    return Layer(
        x=normal(ROWS, LENGTH, width),
        weights=weights,
        ids=ids,
        w_gate=normal(EXPERTS, width, ffn, std=0.02),
        w_up=normal(EXPERTS, width, ffn, std=0.02),
        w_down=normal(EXPERTS, ffn, width, std=0.02),
        grad=normal(ROWS, LENGTH, width),
    )


Result = tuple[Tensor, Tensor, Tensor]
"""The output [tokens, width], and the gradients of x and of the first expert's w_down [ffn, width]."""


def ours(layer: Layer) -> Callable[[], Result]:
    """Return our layer's forward and backward."""
    at: Any = {name: getattr(layer, name).clone().requires_grad_() for name in ("x", "weights")}
    p: Any = {name: getattr(layer, name).clone().requires_grad_() for name in ("w_gate", "w_up", "w_down")}
    kept = torch.ones_like(layer.ids, dtype=torch.bool)

    def call() -> Result:
        y = grouped(at["x"], Choice(layer.ids, at["weights"], kept), p, SILU, Axis("ep"))
        x_grad, _, _, _, down = torch.autograd.grad(y, [*at.values(), *p.values()], layer.grad)
        return y.detach().flatten(0, 1), x_grad.flatten(0, 1), down[0]

    return call


def separate(layer: Layer) -> Callable[[], Result]:
    """Return a plain loop over experts whose weights are tensors of their own, laid out as torch's linear layers."""
    x, weights = (t.flatten(0, 1).clone().requires_grad_() for t in (layer.x, layer.weights))
    stacks = (layer.w_gate, layer.w_up, layer.w_down)
    experts = [[w[e].t().contiguous().requires_grad_() for w in stacks] for e in range(EXPERTS)]
    ids = layer.ids.flatten(0, 1)

    def call() -> Result:
        y = torch.zeros_like(x)
        for expert, (gate, up, down) in enumerate(experts):
            token, choice = torch.where(ids == expert)
            mine = x.index_select(0, token)
            out = F.linear(F.silu(F.linear(mine, gate)) * F.linear(mine, up), down)
            y.index_add_(0, token, out * weights[token, choice, None])
        leaves = [w for expert in experts for w in expert]
        x_grad, _, *grads = torch.autograd.grad(y, [x, weights, *leaves], layer.grad.flatten(0, 1))
        return y.detach(), x_grad, grads[2].t()

    return call


def transformers(layer: Layer) -> Callable[[], Result]:
    """Return the layer of `transformers`, as its eager implementation computes it."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    fields: Any = {"hidden_size": WIDTH, "intermediate_size": FFN, "num_local_experts": EXPERTS}
    config = MixtralConfig(**fields | {"experts_implementation": "eager"})
    module: Any = MixtralExperts(config)
    with torch.no_grad():
        module.gate_up_proj.copy_(torch.cat([layer.w_gate, layer.w_up], 2).transpose(1, 2))
        module.down_proj.copy_(layer.w_down.transpose(1, 2))
    x, weights = (t.flatten(0, 1).clone().requires_grad_() for t in (layer.x, layer.weights))
    ids, grad = layer.ids.flatten(0, 1), layer.grad.flatten(0, 1)

    def call() -> Result:
        y = module(x, ids, weights)
        x_grad, _, _, down = torch.autograd.grad(y, [x, weights, module.gate_up_proj, module.down_proj], grad)
        return y.detach(), x_grad, down[0].t()

    return call


def _agree(results: list[Result]) -> None:
    first, *others = results
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
