"""Differentiate losses: a pure function in, a pure function out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from ironfn import tree
from ironfn.mesh.axis import Mesh
from ironfn.types import Batch, Loss, LossSum, Params

ValueAndGrad: TypeAlias = "Callable[[Params, Batch, Mesh], tuple[LossSum, Params]]"
"""(params, batch, mesh) -> (loss without a graph, gradient of its total): sums over this rank's rows, not means."""


def value_and_grad(loss: Loss) -> ValueAndGrad:
    """Return the function that gives a loss and the gradient of its total with respect to every parameter.

    A parameter that the loss does not touch gets a zero gradient. The given parameters are left as they are.
    `torch.func.grad` would keep the graph of the gradient, at twice the memory; this one frees it.
    """

    def run(params: Params, batch: Batch, mesh: Mesh) -> tuple[LossSum, Params]:
        flat = {path: leaf.detach().requires_grad_() for path, leaf in tree.flatten(params).items()}
        with torch.enable_grad():
            out = loss(tree.unflatten(flat), batch, mesh)
            grads = torch.autograd.grad(out.total, list(flat.values()), materialize_grads=True)
        metrics = {name: value.detach() for name, value in out.metrics.items()}
        return LossSum(out.total.detach(), out.weight.detach(), metrics), tree.unflatten(
            dict(zip(flat, grads, strict=True))
        )

    return run


def split(batch: Batch, parts: int) -> list[Batch]:
    """Cut a batch into ``parts`` groups of rows. ValueError where there are fewer rows than parts."""
    rows = len(batch["tokens"])
    if not 0 < parts <= rows:
        raise ValueError(f"{rows} rows cannot be cut into {parts} parts; choose 1 to {rows}")
    pieces = {name: value.tensor_split(parts) for name, value in batch.items()}
    return [{name: pieces[name][i] for name in batch} for i in range(parts)]


def accumulate(vg: ValueAndGrad, micro_batch: int) -> ValueAndGrad:
    """Compute at most ``micro_batch`` rows at a time and add up losses, weights and gradients.

    Sums add up exactly as the whole would, whatever the number of rows or of targets in each part.
    """

    def run(params: Params, batch: Batch, mesh: Mesh) -> tuple[LossSum, Params]:
        first, *rest = split(batch, -(-len(batch["tokens"]) // micro_batch))
        loss, grads = vg(params, first, mesh)
        sums = tree.leaves(grads)
        for part in rest:
            more, part_grads = vg(params, part, mesh)
            torch._foreach_add_(sums, tree.leaves(part_grads))
            loss = _add(loss, more)
        return loss, grads

    return run


def _add(a: LossSum, b: LossSum) -> LossSum:
    metrics: dict[str, Tensor] = {name: a.metrics[name] + b.metrics[name] for name in a.metrics}
    return LossSum(a.total + b.total, a.weight + b.weight, metrics)
