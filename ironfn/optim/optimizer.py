"""Say what an optimizer is: two functions over trees, the second of which returns new parameters."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen
from torch import Tensor

from ironfn import tree
from ironfn.types import Params


@frozen
class Optimizer:
    """Hold the two functions that make an optimizer.

    init: params -> state, a tree of tensors whose counts are 0-d int64 tensors on the CPU.
    update: (grads, state, params, lr) -> (params, state). It consumes its three trees: it may write the result into any
    of their buffers, and the caller uses only what it returns (donation). A parameter without a gradient is returned as
    it is, neither moved nor decayed; a gradient without a parameter is a KeyError.

    It returns parameters and not updates: an update has no place for the fp32 copy that a bfloat16 parameter needs, nor
    for one rank's share of the work, and adding it is three more passes over memory (docs/decisions.md).
    """

    init: Callable[[Params], Params]
    update: Callable[[Params, Params, Params, float], tuple[Params, Params]]


def pure(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that leaves its arguments as they are, by copying them first. The values are the same."""

    def update(grads: Params, state: Params, params: Params, lr: float) -> tuple[Params, Params]:
        return optimizer.update(tree.clone(grads), tree.clone(state), tree.clone(params), lr)

    return Optimizer(optimizer.init, update)


def scale_lr(optimizer: Optimizer, factor: float) -> Optimizer:
    """Return the optimizer that sees ``factor`` times the learning rate, as one group beside others."""

    def update(grads: Params, state: Params, params: Params, lr: float) -> tuple[Params, Params]:
        return optimizer.update(grads, state, params, lr * factor)

    return Optimizer(optimizer.init, update)


def fits(path: str, grad: Tensor, leaf: Tensor) -> None:
    """Refuse a gradient of another shape than what it moves: torch's fused kernel would read past its end.

    ValueError where a step's ``updates`` are not those of the optimizer, so that one of both has shares.
    """
    if grad.shape != leaf.shape:
        raise ValueError(
            f"{path}: a gradient of shape {list(grad.shape)} cannot move a leaf of shape {list(leaf.shape)}; give "
            "`make_step` the `updates` of the optimizer (`zero1`), and an optimizer of whole leaves none"
        )


def part(state: Params, name: str) -> Params:
    """Return a branch of an optimizer's state, empty where it is not there.

    A rank without a share of a group's leaves has none, and a branch without leaves is lost where a tree is written by
    its paths.
    """
    return tree.branch(state, name) if name in state else {}
