"""Measure how much the gradients of single rows disagree: the gradient noise scale."""

from __future__ import annotations

import torch
from torch import Tensor

from ironfn import tree
from ironfn.mesh.axis import Mesh, sum_over_rows
from ironfn.types import Batch, Loss, Params


def per_row_grads(loss: Loss, params: Params, batch: Batch, mesh: Mesh) -> Params:
    """Return the gradient of every row's own mean loss: leaves [rows, …], by `torch.func.vmap` over `torch.func.grad`.

    Its attention must be `attention.written_out`: vmap can neither branch on data nor enter SDPA's CPU kernel.
    """

    def mean(params: Params, row: Batch) -> Tensor:
        out = loss(params, {name: value[None] for name, value in row.items()}, mesh)
        return out.total / out.weight.clamp(min=1e-30)

    return torch.func.vmap(torch.func.grad(mean), in_dims=(None, 0))(params, batch)


def noise_scale(loss: Loss, params: Params, batch: Batch, mesh: Mesh, *, at_once: int = 2) -> dict[str, float]:
    """Return ``noise_scale``, the rows a batch should have for half of its gradient to be signal, and its two parts.

    With g_i the gradient of row i of n: ``noise`` tr Σ = (mean |g_i|² - |mean g_i|²) n / (n - 1), ``signal``
    |G|² = |mean g_i|² - noise / n; the scale is their ratio (McCandlish et al. 2018, arXiv 1812.06162, appendix A.1).
    NaN where the signal drowns. The parameters are whole on every rank, and the ranks have equally many rows.
    at_once: rows whose gradients are held at one time. ValueError for fewer than two rows.
    """
    rows = len(batch["tokens"])
    squares, total = torch.zeros((), dtype=torch.float64), None
    for start in range(0, rows, at_once):
        part = {name: value[start : start + at_once] for name, value in batch.items()}
        grads = tree.leaves(per_row_grads(loss, params, part, mesh))
        squares += sum(g.double().square().sum().cpu() for g in grads)
        sums = [g.sum(0) for g in grads]
        total = sums if total is None else torch._foreach_add(total, sums)
    assert total is not None, "a batch has rows"
    if mesh.shares > 1:
        rows = rows * mesh.shares
        squares = sum_over_rows(squares.to(total[0].device), mesh)
        total = [sum_over_rows(part, mesh) for part in total]
    if rows < 2:
        raise ValueError("the noise scale compares rows; give a batch of at least two")
    mean_square = float(squares) / rows
    square_mean = float(sum(part.double().square().sum().cpu() for part in total)) / rows**2
    noise = (mean_square - square_mean) * rows / (rows - 1)
    signal = square_mean - noise / rows
    return {"noise_scale": noise / signal if signal > 0 else float("nan"), "noise": noise, "signal": signal}
