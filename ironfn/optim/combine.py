"""Make optimizers out of optimizers: each leaf to its own, half-precision parameters through fp32 copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ironfn import tree
from ironfn.optim.optimizer import Optimizer, part
from ironfn.types import Flat, Params


def partition(optimizers: Mapping[str, Optimizer], label_of: Callable[[str], str]) -> Optimizer:
    """Return the optimizer that gives every leaf to the one whose label ``label_of(path)`` says.

    The state is {label: state}, without the labels that no leaf has. ValueError, listing the leaves, for a label that
    no optimizer has.
    """

    def split(params: Params) -> dict[str, Params]:
        groups: dict[str, Flat] = {}
        for path, p in tree.flatten(params).items():
            groups.setdefault(label_of(path), {})[path] = p
        unknown = {label: list(flat) for label, flat in groups.items() if label not in optimizers}
        if unknown:
            raise ValueError(f"no optimizer has the labels of {unknown}; there are {sorted(optimizers)}")
        return {label: tree.unflatten(groups[label]) for label in optimizers if label in groups}

    def init(params: Params) -> Params:
        return {label: optimizers[label].init(group) for label, group in split(params).items()}

    def update(grads: Params, state: Params, params: Params, lr: float) -> tuple[Params, Params]:
        groups, group_grads, new_state, new_params = split(params), split(grads), dict(state), tree.flatten(params)
        # A group without gradients here may have some on another rank, and their counts go on together.
        for label in [label for label in optimizers if label in groups or label in state]:
            some, old = group_grads.get(label, {}), part(state, label)
            moved, new_state[label] = optimizers[label].update(some, old, groups.get(label, {}), lr)
            new_params |= tree.flatten(moved)
        return tree.unflatten(new_params), new_state

    return Optimizer(init, update)


def master_weights(inner: Optimizer) -> Optimizer:
    """Return the optimizer that moves float32 copies of half-precision parameters and rounds what it returns.

    A bfloat16 weight of 1.0 cannot move by less than 2^-8; its copy can. The state is ``inner`` and ``master``, the
    copies of the half-precision leaves alone: a float32 leaf is its own master.
    """

    def with_copies(inner_state: Params, copies: Flat) -> Params:
        state: Params = {"inner": inner_state}
        return state | {"master": tree.unflatten(copies)} if copies else state

    def init(params: Params) -> Params:
        copies = {path: p.float() for path, p in tree.flatten(params).items() if p.dtype in _HALF}
        exact = tree.unflatten(tree.flatten(params) | copies)
        return with_copies(inner.init(exact), copies)

    @torch.no_grad()
    def update(grads: Params, state: Params, params: Params, lr: float) -> tuple[Params, Params]:
        rounded, copies = tree.flatten(params), tree.flatten(part(state, "master"))
        moved, inner_state = inner.update(grads, part(state, "inner"), tree.unflatten(rounded | copies), lr)
        exact = tree.flatten(moved)
        new_params = {path: p.copy_(exact[path]) if path in copies else exact[path] for path, p in rounded.items()}
        return tree.unflatten(new_params), with_copies(inner_state, {path: exact[path] for path in copies})

    return Optimizer(init, update)


_HALF = frozenset({torch.bfloat16, torch.float16})
