"""Differentiate losses: a pure function in, a pure function out."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ironfn import tree
from ironfn.mesh.axis import Mesh
from ironfn.types import Batch, Loss, LossSum, Params


class ValueAndGrad(Protocol):
    """(params, batch, mesh, fixed) -> (loss without a graph, gradient of its total): sums over this rank's rows.

    fixed: leaves that the loss sees in its tree beside the parameters, and that have no gradient.
    """

    def __call__(
        self, params: Params, batch: Batch, mesh: Mesh, fixed: Params | None = None, /
    ) -> tuple[LossSum, Params]: ...


def value_and_grad(loss: Loss) -> ValueAndGrad:
    """Return the function that gives a loss and the gradient of its total with respect to every parameter.

    A parameter that the loss does not touch gets a zero gradient. The given parameters are left as they are.
    `torch.func.grad` would keep the graph of the gradient, at twice the memory; this one frees it.
    """

    def run(params: Params, batch: Batch, mesh: Mesh, fixed: Params | None = None) -> tuple[LossSum, Params]:
        flat = {path: leaf.detach().requires_grad_() for path, leaf in tree.flatten(params).items()}
        with torch.enable_grad():
            whole = tree.unflatten(flat) if not fixed else tree.merge(tree.unflatten(flat), fixed)
            out = loss(whole, batch, mesh)
            leaves = list(flat.values())
            if out.total.requires_grad:
                grads = torch.autograd.grad(out.total, leaves, materialize_grads=True)
            else:  # nothing that is trained takes part in it
                grads = [torch.zeros_like(leaf, requires_grad=False) for leaf in leaves]
        metrics, counts = ({name: x.detach() for name, x in sums.items()} for sums in (out.metrics, out.counts))
        value = LossSum(out.total.detach(), out.weight.detach(), metrics, counts)
        return value, tree.unflatten(dict(zip(flat, grads, strict=True)))

    return run


def split(batch: Batch, parts: int) -> list[Batch]:
    """Cut a batch into ``parts`` groups of rows. ValueError where there are fewer rows than parts, but for 1 part."""
    rows = len(batch["tokens"])
    if not 0 < parts <= max(rows, 1):
        raise ValueError(f"{rows} rows cannot be cut into {parts} parts; choose 1 to {rows}")
    pieces = {name: value.tensor_split(parts) for name, value in batch.items()}
    return [{name: pieces[name][i] for name in batch} for i in range(parts)]


def accumulate(vg: ValueAndGrad, micro_batch: int) -> ValueAndGrad:
    """Compute at most ``micro_batch`` rows at a time and add up losses, weights and gradients.

    Sums add up exactly as the whole would, whatever the number of rows or of targets in each part.
    """

    def run(params: Params, batch: Batch, mesh: Mesh, fixed: Params | None = None) -> tuple[LossSum, Params]:
        first, *rest = split(batch, max(1, -(-len(batch["tokens"]) // micro_batch)))
        loss, grads = vg(params, first, mesh, fixed)
        sums = tree.leaves(grads)
        for part in rest:
            more, part_grads = vg(params, part, mesh, fixed)
            torch._foreach_add_(sums, tree.leaves(part_grads))
            loss = _add(loss, more)
        return loss, grads

    return run


def _add(a: LossSum, b: LossSum) -> LossSum:
    metrics: dict[str, Tensor] = {name: a.metrics[name] + b.metrics[name] for name in a.metrics}
    counts: dict[str, Tensor] = {name: a.counts[name] + b.counts[name] for name in a.counts}
    return LossSum(a.total + b.total, a.weight + b.weight, metrics, counts)
