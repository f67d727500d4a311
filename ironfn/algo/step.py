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
from ironfn.layout.table import WHOLE_TABLE, Table, reduce_grads, squared_norm
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.optim.clip import clip_factor
from ironfn.optim.optimizer import Optimizer
from ironfn.types import Batch, LossSum, Params, Schedule


@frozen
class State:
    """Hold all that a run is at a step: the number of steps taken, the parameters, the optimizer's state, and extras.

    skipped: the steps whose update was left out because a gradient was not finite.
    """

    step: int
    params: Params
    opt: Params
    skipped: int = 0
    extra: Params = field(factory=dict)


Metrics: TypeAlias = dict[str, float]
Step: TypeAlias = "Callable[[State, Batch], tuple[State, Metrics]]"


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


def make_step(
    vg: ValueAndGrad,
    optimizer: Optimizer,
    schedule: Schedule,
    *,
    table: Table = WHOLE_TABLE,
    mesh: Mesh = SINGLE,
    clip: float | None = None,
    on_nonfinite: Callable[[Metrics], None] = stop,
    donate: bool = False,
) -> Step:
    """Return the function that takes one step of training.

    vg: loss sum and gradient sum over this rank's rows (`grad.value_and_grad`, with `accumulate` or not).
    table: where the leaves live on the mesh. clip: the largest global gradient norm that is let through.
    on_nonfinite: called, on every rank alike, with the metrics of a step whose loss or gradient is not finite; the
    update is left out if it returns. donate: the step may reuse the buffers of the state that it is given.

    The metrics are ``step``, ``loss`` (mean over the global weight), ``grad_norm`` (before clipping), ``lr``,
    ``tokens`` (the global weight), ``skipped``, and the means of the loss's own metrics.
    """

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        loss, grads = vg(state.params, batch, mesh)
        loss, grads = _sum_over_rows(loss, mesh), reduce_grads(grads, table, mesh)
        weight = max(float(loss.weight), 1e-30)
        norm = math.sqrt(float(squared_norm(grads, table, mesh))) / weight
        lr = schedule(state.step)
        metrics = {"step": state.step, "loss": float(loss.total) / weight, "grad_norm": norm, "lr": lr}
        metrics |= {"tokens": float(loss.weight), "skipped": state.skipped}
        metrics |= {name: float(value) / weight for name, value in loss.metrics.items()}
        if not (math.isfinite(metrics["loss"]) and math.isfinite(norm)):
            on_nonfinite(metrics)
            metrics["skipped"] += 1
            return evolve(state, step=state.step + 1, skipped=state.skipped + 1), metrics
        factor = 1.0 if clip is None else clip_factor(norm, clip)
        torch._foreach_mul_(tree.leaves(grads), factor / weight)
        params, opt = (state.params, state.opt) if donate else (tree.clone(state.params), tree.clone(state.opt))
        params, opt = optimizer.update(grads, opt, params, lr)
        return evolve(state, step=state.step + 1, params=params, opt=opt), metrics

    return step


def _sum_over_rows(loss: LossSum, mesh: Mesh) -> LossSum:
    """Add the sums of the ranks that hold other rows, in one exchange."""
    if mesh.dp.size == 1:
        return loss
    values: list[Tensor] = [loss.total, loss.weight, *loss.metrics.values()]
    total, weight, *metrics = mesh.dp.backend.all_reduce(torch.stack([v.double() for v in values]))
    return LossSum(total, weight, dict(zip(loss.metrics, metrics, strict=True)))
