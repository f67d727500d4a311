"""Send every token through its experts and bring the results back, weighted: two ways with one result.

Legend of shapes: B rows, T length, N = B T tokens, K choices a token, D width, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from ironfn.mesh.axis import Axis
from ironfn.mesh.pairs import exchange
from ironfn.model.fused import Activation
from ironfn.model.grouped import grouped_mlp
from ironfn.model.mlp import maybe
from ironfn.tree import leaf
from ironfn.types import Params


@frozen
class Choice:
    """Hold each token's experts [B, T, K] (any id where it is not ``kept``), the weights and the bool mask ``kept``."""

    experts: Tensor
    weights: Tensor
    kept: Tensor


class _Spread(torch.autograd.Function):
    """(x [N, D], order [N K], inverse [N, K]) -> each token once for each choice, in ``order``.

    Backward gathers and adds instead of scattering: every sum has one order, on every device.
    """

    @staticmethod
    def forward(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.index_select(0, order // inverse.shape[1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (inverse,) = ctx.saved_tensors
        first, *others = inverse.unbind(1)
        total = grad.index_select(0, first)
        for column in others:
            total += grad.index_select(0, column)
        return total, None, None


class _Collect(torch.autograd.Function):
    """(rows [N K, D], weights [N, K], order, inverse) -> [N, D], each token's rows weighted and added up."""

    @staticmethod
    def forward(rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        first, *others = (
            rows.index_select(0, column).mul(weight[:, None])
            for column, weight in zip(inverse.unbind(1), weights.unbind(1), strict=True)
        )
        for other in others:
            first += other
        return first.to(rows.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows, weights, order, inverse = ctx.saved_tensors
        spread = grad.index_select(0, order // inverse.shape[1])
        shares = torch.linalg.vecdot(rows.to(weights.dtype), spread.to(weights.dtype))
        return (spread * weights.flatten()[order, None]).to(rows.dtype), shares[inverse], None, None


class _Permute(torch.autograd.Function):
    """(x [n, D], order [n], its inverse) -> x[order]."""

    @staticmethod
    def forward(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.index_select(0, order)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def grouped(x_BTD: Tensor, choice: Choice, p: Params, act: Activation, ep: Axis) -> Tensor:
    """Sort the (token, choice) pairs by expert, compute each expert's rows at once, and bring them back: the default.

    ``p`` holds this rank's experts; with more than one rank on ``ep`` the rows travel to the ranks whose experts they
    chose. The weights are applied at home.
    """
    count = leaf(p, "w_up").shape[0] * ep.size
    key = torch.where(choice.kept, choice.experts, count).flatten()  # whoever is not kept goes to the end
    order = key.argsort(stable=True)
    sizes = key.new_zeros(count + 1).scatter_add_(0, key, torch.ones_like(key))[:count]
    inverse = _inverse(order).view(-1, choice.experts.shape[-1])
    rows: Tensor = _Spread.apply(x_BTD.flatten(0, 1), order, inverse)  # pyright: ignore[reportAssignmentType]
    done = _here(rows, sizes, p, act) if ep.size == 1 else _there(rows, sizes, p, act, ep)
    y: Tensor = _Collect.apply(done, choice.weights.flatten(0, 1), order, inverse)  # pyright: ignore[reportAssignmentType]
    return y.view_as(x_BTD)


def _here(rows: Tensor, sizes: Tensor, p: Params, act: Activation) -> Tensor:
    return grouped_mlp(rows, maybe(p, "w_gate"), leaf(p, "w_up"), leaf(p, "w_down"), sizes, act)


def _there(rows: Tensor, sizes: Tensor, p: Params, act: Activation, ep: Axis) -> Tensor:
    """Send the rows to the ranks of their experts, compute what comes from everywhere, and send it home.

    The ranks first tell each other how many rows will come: the one time that the host waits for the device.
    """
    ones = [1] * ep.size
    leaving = sizes.view(ep.size, -1)
    coming = ep.backend.all_to_all(leaving, ones, ones)
    send, receive = torch.stack([leaving.sum(1), coming.sum(1)]).tolist()
    ours = coming.shape[1]
    arrived = exchange(rows[: sum(send)], ep, send, receive)
    # they come sorted by rank and then by expert, and are wanted by expert alone
    experts = torch.arange(ours, device=rows.device).repeat(ep.size)
    order = experts.repeat_interleave(coming.flatten(), output_size=sum(receive)).argsort(stable=True)
    inverse = _inverse(order)
    by_expert: Tensor = _Permute.apply(arrived, order, inverse)  # pyright: ignore[reportAssignmentType]
    done = _here(by_expert, coming.sum(0), p, act)
    by_rank: Tensor = _Permute.apply(done, inverse, order)  # pyright: ignore[reportAssignmentType]
    home = exchange(by_rank, ep, receive, send)
    return torch.cat([home, home.new_zeros(len(rows) - len(home), home.shape[1])])


def written_out(x_BTD: Tensor, choice: Choice, p: Params, act: Activation, ep: Axis) -> Tensor:
    """Compute every expert for every token, and add up by weights that are mostly 0: for `torch.func`, and as a check.

    ValueError where the experts are spread over ranks.
    """
    if ep.size > 1:
        raise ValueError(f"experts that are written out have to be here, not on {ep.size} ranks; use experts.grouped")
    w_up, w_down, w_gate = leaf(p, "w_up"), leaf(p, "w_down"), maybe(p, "w_gate")
    kept = torch.where(choice.kept, choice.weights, 0.0)
    none = kept.new_zeros(*kept.shape[:-1], len(w_up))
    share = none.scatter_add(-1, torch.where(choice.kept, choice.experts, 0), kept)
    x = x_BTD[None]
    up = x @ w_up[:, None]
    middle = act.value(up) if w_gate is None else act.value(x @ w_gate[:, None]) * up
    return ((middle @ w_down[:, None]) * share.movedim(-1, 0)[..., None]).sum(0).to(x_BTD.dtype)
