"""Compose a training step: grad(loss) -> reduce -> update."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from ironfn import tree
from ironfn.grad.value_and_grad import ValueAndGrad
from ironfn.layout.buckets import BUCKET_BYTES
from ironfn.layout.reduce import reduce_grads, squared_norm
from ironfn.layout.table import WHOLE_TABLE, Table
from ironfn.mesh.axis import SINGLE, Mesh, any_of, sum_over_rows
from ironfn.optim.clip import clip_factor
from ironfn.optim.optimizer import Optimizer
from ironfn.types import Batch, LossSum, Params, Schedule


@frozen
class State:
    """Hold all that a run is at a step: the number of steps taken, the parameters, the optimizer's state, and extras.

    skipped: the steps whose update was left out because a gradient was not finite.
    extra: what else the run carries. Its branch ``fixed``, if any, is what the loss sees beside the parameters.
    """

    step: int
    params: Params
    opt: Params
    skipped: int = 0
    extra: Params = field(factory=dict)

    @property
    def model(self) -> Params:
        """Return all that the forward pass sees: the parameters, and the fixed leaves beside them."""
        return tree.merge(self.params, tree.branch(self.extra, "fixed")) if "fixed" in self.extra else self.params


Metrics: TypeAlias = dict[str, float]
Step: TypeAlias = "Callable[[State, Batch], tuple[State, Metrics]]"
Carry: TypeAlias = "Callable[[Params, dict[str, Tensor]], tuple[Params, Metrics]]"
"""(extra, the loss's counts over the whole batch) -> (extra after the step, metrics)."""


class NonFiniteError(ArithmeticError, ValueError):
    """Tell that a loss or a gradient is infinite or not a number; the state was not touched."""


def stop(metrics: Metrics) -> None:
    """Refuse a step that is not finite: the default policy."""
    raise NonFiniteError(
        f"step {metrics['step']:.0f}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}; nothing was "
        "updated: lower optim.lr, lengthen the warm-up, or set optim.nonfinite: skip to leave such steps out"
    )


def skip(metrics: Metrics) -> None:
    """Leave a step that is not finite out, and count it."""


def unmoved(extra: Params, counts: dict[str, Tensor]) -> tuple[Params, Metrics]:
    """Leave the extras as they are: the default."""
    return extra, {}


def make_step(
    vg: ValueAndGrad,
    optimizer: Optimizer,
    schedule: Schedule,
    *,
    table: Table = WHOLE_TABLE,
    mesh: Mesh = SINGLE,
    updates: Table | None = None,
    carry: Carry = unmoved,
    clip: float | None = None,
    on_nonfinite: Callable[[Metrics], None] = stop,
    donate: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
) -> Step:
    """Return the function that takes one step of training.

    vg: loss sum and gradient sum over this rank's rows (`grad.value_and_grad`, with `accumulate` or not).
    table: where the leaves live on the mesh. updates: where the reduced gradients go, if elsewhere, for an optimizer
    such as `zero1` that wants only this rank's share of them. carry: moves ``State.extra`` after a step.
    clip: the largest global gradient norm that is let through.
    on_nonfinite: called, on every rank alike, with the metrics of a step whose loss or gradient is not finite on any
    rank; the update is left out if it returns.
    donate: the step may reuse the buffers of the state that it is given.
    bucket_bytes: gradients are reduced together, about this many bytes at a time.

    The metrics are ``step``, ``loss`` (mean over the global weight), ``grad_norm`` (before clipping), ``lr``,
    ``tokens`` (the global weight), ``skipped``, and the means of the loss's own metrics.
    """

    place = table if updates is None else updates

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        fixed = tree.branch(state.extra, "fixed") if "fixed" in state.extra else None
        loss, grads = vg(state.params, batch, mesh, fixed)
        loss, grads = _sum_over_rows(loss, mesh), reduce_grads(grads, table, mesh, updates, bucket_bytes)
        weight = max(float(loss.weight), 1e-30)
        norm = math.sqrt(float(squared_norm(grads, place, mesh, loss.total.device))) / weight
        lr = schedule(state.step)
        metrics = {"step": state.step, "loss": float(loss.total) / weight, "grad_norm": norm, "lr": lr}
        metrics |= {"tokens": float(loss.weight), "skipped": state.skipped}
        metrics |= {name: float(value) / weight for name, value in loss.metrics.items()}
        # dp and ep have added up loss and norm: their ranks hold the same bits, and decide the same
        if any_of(mesh.tp, not (math.isfinite(metrics["loss"]) and math.isfinite(norm)), loss.total.device):
            on_nonfinite(metrics)
            metrics["skipped"] += 1
            return evolve(state, step=state.step + 1, skipped=state.skipped + 1), metrics
        factor = 1.0 if clip is None else clip_factor(norm, clip)
        if leaves := tree.leaves(grads):  # a rank may have no share of the updates
            torch._foreach_mul_(leaves, factor / weight)
        params, opt = (state.params, state.opt) if donate else (tree.clone(state.params), tree.clone(state.opt))
        params, opt = optimizer.update(grads, opt, params, lr)
        extra, seen = carry(state.extra, loss.counts)
        return evolve(state, step=state.step + 1, params=params, opt=opt, extra=extra), metrics | seen

    return step


def _sum_over_rows(loss: LossSum, mesh: Mesh) -> LossSum:
    """Add the sums of the ranks that hold other rows, in one exchange."""
    if mesh.shares == 1:
        return loss
    values: list[Tensor] = [loss.total, loss.weight, *loss.metrics.values(), *loss.counts.values()]
    joined = sum_over_rows(torch.cat([v.double().flatten() for v in values]), mesh)
    parts = joined.split([v.numel() for v in values])
    total, weight, *rest = (x.view(v.shape) for x, v in zip(parts, values, strict=True))
    metrics = dict(zip(loss.metrics, rest, strict=False))
    return LossSum(total, weight, metrics, dict(zip(loss.counts, rest[len(metrics) :], strict=True)))
