"""Update with AdamW: Adam's two moments, weight decay apart from them (Loshchilov & Hutter 2019, arXiv 1711.05101)."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from ironfn import tree
from ironfn.optim.optimizer import Optimizer, fits, part
from ironfn.types import Params


def adamw(beta1: float = 0.9, beta2: float = 0.95, eps: float = 1e-8, weight_decay: float = 0.1) -> Optimizer:
    """Return AdamW. Its state is ``count``, ``m`` and ``v``; the moments are float32 (float64 for float64 parameters).

    With the gradient g of update t, counted from 1:

        m = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g²
        p = p (1 - lr weight_decay) - lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)

    A half-precision parameter is updated in float32 and rounded once; small steps are lost in that rounding, so train
    such parameters inside ``master_weights``. ValueError for a beta outside [0, 1), an eps or a decay below 0.
    """
    _check(beta1, beta2, eps, weight_decay)
    move = partial(_move, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay)

    def init(params: Params) -> Params:
        return {
            "count": torch.zeros((), dtype=torch.int64),
            "m": tree.map(_moment_like, params),
            "v": tree.map(_moment_like, params),
        }

    @torch.no_grad()
    def update(grads: Params, state: Params, params: Params, lr: float) -> tuple[Params, Params]:
        moments = part(state, "m"), part(state, "v")
        flat_p, flat_m, flat_v = (tree.flatten(t) for t in (params, *moments))
        count = tree.leaf(state, "count")
        done = int(count)
        alike: dict[object, list[_Leaf]] = {}
        for path, g in tree.flatten(grads).items():
            old = flat_p[path], flat_m[path], flat_v[path]
            fits(path, g, old[0])
            p, m, v = new = tuple(_dense(x, old[1].dtype) for x in old)
            moved = p, _dense(g, m.dtype), m, v
            if g.dtype == m.dtype and all(x is y for x, y in zip(old, new, strict=True)):
                alike.setdefault((p.dtype, p.device), []).append(moved)
                continue
            # One at a time, so that only one leaf's copies are alive at once.
            move([moved], done, lr)
            for x, y in zip(old, new, strict=True):
                x.copy_(y)
        for leaves in alike.values():
            move(leaves, done, lr)
        return params, {**state, "count": count + 1}

    return Optimizer(init, update)


_Leaf: TypeAlias = "tuple[Tensor, Tensor, Tensor, Tensor]"
"""A parameter, its gradient and its two moments."""

_FUSED = frozenset({"cpu", "cuda", "mps", "xpu", "hpu"})
"""The kinds of device that torch has a fused kernel for."""


def _move(leaves: list[_Leaf], count: int, lr: float, **numbers: Any) -> None:
    """Move leaves of one dtype and device, in place and in one call, for the time ``count`` + 1."""
    ps, gs, ms, vs = (list(column) for column in zip(*leaves, strict=True))
    device = ps[0].device
    fused = device.type in _FUSED
    # The peer adds one to each of the counts, and wants them beside the parameters when it is fused.
    counts = list(torch.full((len(ps),), float(count), device=device if fused else None).unbind())
    torch_adamw(ps, gs, ms, vs, [], counts, fused=fused, foreach=False, amsgrad=False, maximize=False, lr=lr, **numbers)


def _moment_like(p: Tensor) -> Tensor:
    dtype = torch.promote_types(p.dtype, torch.float32)
    return torch.zeros(p.shape, dtype=dtype, device=p.device)


def _dense(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x`` itself where it is contiguous and of that dtype, else such a copy.

    The fused kernel walks memory and not strides: a transposed gradient, which autograd may return, or a column shard
    would be read in the wrong order without a word.
    """
    return x.to(dtype).contiguous()


def _check(beta1: float, beta2: float, eps: float, weight_decay: float) -> None:
    for name, value in (("beta1", beta1), ("beta2", beta2)):
        if not 0.0 <= value < 1.0:
            raise ValueError(f"adamw: {name} is {value}; it must be at least 0 and below 1")
    for name, value in (("eps", eps), ("weight_decay", weight_decay)):
        if not value >= 0.0:
            raise ValueError(f"adamw: {name} is {value}; it must not be negative")
