"""Update matrices with Muon: momentum, made orthogonal (Jordan 2024; Liu et al. 2025, arXiv 2502.16982)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ironfn import tree
from ironfn.optim.newton_schulz import orthogonalize
from ironfn.optim.optimizer import Optimizer
from ironfn.types import Params


def jordan(inputs: int, outputs: int) -> float:
    """Scale the update of a matrix [inputs, outputs] by sqrt(max(1, outputs / inputs)), Keller Jordan's rule.

    His rows are the outputs, because a torch linear layer stores [outputs, inputs]; ours are the inputs.

    >>> jordan(2, 8), jordan(8, 2)
    (2.0, 1.0)
    """
    return math.sqrt(max(1.0, outputs / inputs))


def moonshot(inputs: int, outputs: int) -> float:
    """Scale the update by 0.2 sqrt(max(inputs, outputs)), so that its root mean square is AdamW's (arXiv 2502.16982).

    >>> moonshot(25, 16)
    1.0
    """
    return 0.2 * math.sqrt(max(inputs, outputs))


def muon(
    momentum: float = 0.95,
    nesterov: bool = True,
    steps: int = 5,
    weight_decay: float = 0.1,
    scale: Callable[[int, int], float] = moonshot,
    precision: torch.dtype = torch.float32,
) -> Optimizer:
    """Return Muon for whole matrices [inputs, outputs]. Its state is ``momentum``, float32 (float64 for float64).

        m = momentum m + (1 - momentum) g;   u = (1 - momentum) g + momentum m, or m without nesterov
        p = p (1 - lr weight_decay) - lr scale(inputs, outputs) orthogonalize(u)

    steps: of the Newton-Schulz iteration, which is computed in ``precision`` (in float64 for float64 parameters, unless
    it is bfloat16). ValueError for a leaf that is not 2-d, naming it, and for numbers out of range.
    """
    if not 0.0 <= momentum < 1.0:
        raise ValueError(f"muon: momentum is {momentum}; it must be at least 0 and below 1")
    if not weight_decay >= 0.0:
        raise ValueError(f"muon: weight_decay is {weight_decay}; it must not be negative")
    if not 1 <= steps < 100:
        raise ValueError(f"muon: steps is {steps}; the iteration takes between 1 and 99, 5 as a rule")

    def init(params: Params) -> Params:
        for path, p in tree.flatten(params).items():
            if p.ndim != 2:
                raise ValueError(
                    f"muon: {path!r} has shape {tuple(p.shape)}; Muon moves matrices only, give this leaf to adamw"
                )
        return {"momentum": tree.map(_momentum_like, params)}

    @torch.no_grad()
    def update(grads: Params, state: Params, params: Params, lr: float) -> tuple[Params, Params]:
        flat_p, flat_m, flat_g = (tree.flatten(t) for t in (params, tree.branch(state, "momentum"), grads))
        for paths in _alike({path: flat_p[path] for path in flat_g}):
            ps, ms, gs = ([flat[path] for path in paths] for flat in (flat_p, flat_m, flat_g))
            directions: list[Tensor] = []
            dtype = precision if precision.itemsize < 4 else torch.promote_types(ms[0].dtype, precision)
            for m, g in zip(ms, gs, strict=True):
                g = g.to(m.dtype)
                m.lerp_(g, 1.0 - momentum)
                directions.append((g.lerp_(m, momentum) if nesterov else m).to(dtype))
            orthogonal = orthogonalize(torch.stack(directions), steps)
            rate = lr * scale(*ps[0].shape)
            for p, direction in zip(ps, orthogonal, strict=True):
                exact = p.to(torch.promote_types(p.dtype, torch.float32))
                exact.mul_(1.0 - lr * weight_decay).add_(direction, alpha=-rate)
                p.copy_(exact)
        return params, state

    return Optimizer(init, update)


def _momentum_like(p: Tensor) -> Tensor:
    return torch.zeros(p.shape, dtype=torch.promote_types(p.dtype, torch.float32), device=p.device)


_TOGETHER_CPU, _TOGETHER = 2**20, 2**26
"""Numbers orthogonalised in one go: as many as a CPU's cache holds, or as keep another device busy."""


def _alike(flat: dict[str, Tensor]) -> Iterator[list[str]]:
    """Cut the paths into lists whose matrices have one shape, dtype and device."""
    groups: dict[object, list[str]] = {}
    for path, p in flat.items():
        groups.setdefault((p.shape, p.dtype, p.device), []).append(path)
    for paths in groups.values():
        first = flat[paths[0]]
        together = max(1, (_TOGETHER_CPU if first.device.type == "cpu" else _TOGETHER) // max(1, first.numel()))
        for start in range(0, len(paths), together):
            yield paths[start : start + together]
