"""Update matrices with Muon: momentum, made orthogonal (Jordan 2024; Liu et al. 2025, arXiv 2502.16982)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from ironfn import tree
from ironfn.layout.table import WHOLE_TABLE, Table, by_path
from ironfn.mesh.axis import SINGLE, Axis, Mesh
from ironfn.optim.newton_schulz import orthogonalize
from ironfn.optim.optimizer import Optimizer, fits, part
from ironfn.optim.whole import matrix_cuts, on_whole, whole_matrix
from ironfn.types import Flat, Params


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
    layout: Table = WHOLE_TABLE,
    mesh: Mesh = SINGLE,
) -> Optimizer:
    """Return Muon for matrices [inputs, outputs] and stacks of them [matrices, inputs, outputs].

    Its state is ``momentum``, float32 (float64 for float64).

        m = momentum m + (1 - momentum) g;   u = (1 - momentum) g + momentum m, or m without nesterov
        p = p (1 - lr weight_decay) - lr scale(inputs, outputs) orthogonalize(u)

    steps: of the Newton-Schulz iteration, which is computed in ``precision`` (in float64 for float64 parameters, unless
    it is bfloat16). layout: how the mesh cuts the leaves. Momentum and parameters stay as they are cut; every matrix of
    the directions is orthogonalised whole, by one rank (`whole.on_whole`), and scaled by its whole shape.
    ValueError for a leaf that is no matrix and no stack, naming it, and for numbers out of range.
    """
    _check(momentum, weight_decay, steps)

    def direction(path: str, m: Tensor, g: Tensor) -> Tensor:
        fits(path, g, m)
        g = g.to(m.dtype)
        m.lerp_(g, 1.0 - momentum)
        dtype = precision if precision.itemsize < 4 else torch.promote_types(m.dtype, precision)
        return (g.lerp_(m, momentum) if nesterov else m).to(dtype)

    def move(p: Tensor, orthogonal: Tensor, lr: float, cuts: list[tuple[Axis, int]]) -> None:
        exact = p.to(torch.promote_types(p.dtype, torch.float32))
        rate = lr * scale(*whole_matrix(p.shape, cuts))
        p.copy_(exact.mul_(1.0 - lr * weight_decay).add_(orthogonal, alpha=-rate))

    @torch.no_grad()
    def update(grads: Params, state: Params, params: Params, lr: float) -> tuple[Params, Params]:
        flat_p, flat_m, flat_g = (tree.flatten(t) for t in (params, part(state, "momentum"), grads))
        places = by_path(layout, flat_g)
        cuts = {path: matrix_cuts(places[path], flat_p[path].ndim, mesh) for path in flat_g}
        for paths in _rounds({path: flat_p[path] for path in flat_g}, cuts):
            directions = {path: direction(path, flat_m[path], flat_g[path]) for path in paths}
            orthogonal = on_whole(partial(_orthogonal, steps=steps), directions, places, mesh)
            for path in paths:
                move(flat_p[path], orthogonal[path], lr, cuts[path])
        return params, state

    return Optimizer(_init, update)


def _check(momentum: float, weight_decay: float, steps: int) -> None:
    if not 0.0 <= momentum < 1.0:
        raise ValueError(f"muon: momentum is {momentum}; it must be at least 0 and below 1")
    if not weight_decay >= 0.0:
        raise ValueError(f"muon: weight_decay is {weight_decay}; it must not be negative")
    if not 1 <= steps < 100:
        raise ValueError(f"muon: steps is {steps}; the iteration takes between 1 and 99, 5 as a rule")


def _init(params: Params) -> Params:
    for path, p in tree.flatten(params).items():
        if p.ndim not in (2, 3):
            raise ValueError(
                f"muon: {path!r} has shape {tuple(p.shape)}; Muon moves matrices only, give this leaf to adamw"
            )
    return {"momentum": tree.map(_momentum_like, params)}


def _momentum_like(p: Tensor) -> Tensor:
    return torch.zeros(p.shape, dtype=torch.promote_types(p.dtype, torch.float32), device=p.device)


_TOGETHER_CPU, _TOGETHER = 2**20, 2**26
"""Numbers orthogonalised in one go: as many as a CPU's cache holds, or as keep another device busy."""

_TRAVEL = 2**26
"""Numbers of the cut matrices that a rank sends in one go: enough matrices to share out evenly."""


def _together(x: Tensor) -> int:
    return _TOGETHER_CPU if x.device.type == "cpu" else _TOGETHER


def _rounds(flat: Flat, cuts: dict[str, list[tuple[Axis, int]]]) -> Iterator[list[str]]:
    """Cut the paths into lists of one dtype and device; of uncut matrices, of one shape. Alike on all ranks."""
    groups: dict[object, list[str]] = {}
    for path, p in flat.items():
        groups.setdefault((p.dtype, p.device, None if cuts[path] else p.shape), []).append(path)
    for paths in groups.values():
        limit = _TRAVEL if cuts[paths[0]] else _together(flat[paths[0]])
        some, numbers = list[str](), 0
        for path in paths:
            if some and numbers + flat[path].numel() > limit:
                yield some
                some, numbers = [], 0
            some.append(path)
            numbers += flat[path].numel()
        yield some


def _orthogonal(whole: Flat, steps: int) -> Flat:
    """Return the leaves with each of their matrices made orthogonal; those of one shape go together."""
    alike: dict[torch.Size, list[str]] = {}
    for path, x in whole.items():
        alike.setdefault(x.shape[-2:], []).append(path)
    done: Flat = {}
    for shape, paths in alike.items():
        stacks = [whole[path].reshape(-1, *shape) for path in paths]
        together = max(1, _together(stacks[0]) // max(1, shape.numel()))
        chunks = [orthogonalize(some, steps) for some in torch.cat(stacks).split(together)]
        orthogonal = chunks[0] if len(chunks) == 1 else torch.cat(chunks)
        parts = orthogonal.split([len(stack) for stack in stacks])
        done |= {path: x.reshape(whole[path].shape) for path, x in zip(paths, parts, strict=True)}
    return done
