"""Choose experts for every token: the router's scores, the choice, its weights, and what the losses need of them.

Legend of shapes: B rows, T length (t: this rank's share of it under sequence parallelism), D width, E experts,
K choices a token. The router works between the tensor-parallel regions, in float32 or better.
"""

from __future__ import annotations

import math

import torch
from attrs import frozen
from torch import Tensor

from ironfn import rng
from ironfn.mesh.axis import Mesh
from ironfn.mesh.pairs import LENGTH, reduce
from ironfn.model import fused
from ironfn.model.arch import Arch
from ironfn.model.forward import Forward, share
from ironfn.model.matmul import plain
from ironfn.model.mlp import maybe
from ironfn.spec.records import MoeSpec
from ironfn.tree import leaf
from ironfn.types import Batch, Params


@frozen
class Routing:
    """Hold where the tokens of a block go, whole rows on every rank of tp but for the weights.

    experts: int64 [B, T, K], -1 on padding. kept: bool [B, T, K], False on padding and where the expert is full.
    weights: [B, t, K], with gradient. scores: [B, E], summed over the row's real tokens, each token's adding up to 1;
    z: [B], the mean of logsumexp(logits)²: both with gradient. load: int64 [B, E], the tokens that chose each expert.
    """

    experts: Tensor
    kept: Tensor
    weights: Tensor
    scores: Tensor
    z: Tensor
    load: Tensor


def route(x_BtD: Tensor, p: Params, layer: int, arch: Arch, mesh: Mesh, how: Forward, batch: Batch) -> Routing:
    """Return the routing of x, by the router's leaves ``p``, or to ``batch["experts"]`` where that is given.

    Padding (segment -1) goes nowhere and counts nowhere.
    """
    moe = arch.moe
    assert moe is not None
    real = real_tokens(batch).to(x_BtD.device)
    logits = _logits(x_BtD, p, layer, moe, mesh, how, batch)
    scores = logits.sigmoid() if moe.score == "sigmoid" else logits.softmax(-1)
    if "experts" in batch:
        whole = batch["experts"][:, :, arch.expert_layers.index(layer)].to(logits.device, torch.int64)
        chosen = share(whole, mesh).clamp(min=0)
    else:
        chosen = _choose(logits, scores, maybe(p, "bias"), moe)
        whole = mesh.tp.backend.all_gather(chosen, LENGTH) if mesh.sequence_parallel else chosen
    experts = torch.where(real[..., None], whole, -1)
    mine = share(real, mesh)[..., None]
    shares = scores / scores.sum(-1, keepdim=True) if moe.score == "sigmoid" else scores
    tokens = real.sum(1).clamp(min=1)
    z = (logits.logsumexp(-1, keepdim=True).square() * mine).sum((1, 2)) / tokens
    return Routing(
        experts=experts,
        kept=_within_capacity(experts, real, moe),
        weights=_weights(logits, scores, chosen, moe),
        scores=_over_positions((shares * mine).sum(1), mesh),
        z=_over_positions(z, mesh),
        load=_counts(experts, moe.experts),
    )


def real_tokens(batch: Batch) -> Tensor:
    """Return the bool mask [B, T] of the tokens that are no padding."""
    return batch["segment"] >= 0 if "segment" in batch else torch.ones_like(batch["tokens"], dtype=torch.bool)


def check_given(batch: Batch, arch: Arch) -> None:
    """Refuse a ``batch["experts"]`` that is no routing of this batch by this model: ValueError with the place."""
    moe, given, tokens = arch.moe, batch["experts"], batch["tokens"]
    if moe is None:
        raise ValueError("batch['experts'] tells a routing, but the model has no experts; leave it out")
    shape = (*tokens.shape, len(arch.expert_layers), moe.top_k)
    if given.shape != shape or given.is_floating_point():
        raise ValueError(
            f"batch['experts'] is {given.dtype} {list(given.shape)}; this model and batch want integers {list(shape)}: "
            "rows, length, layers with experts, choices"
        )
    if not plain(given):
        return  # a transform of torch.func looks on, and no value can be read
    given = given[real_tokens(batch).to(given.device)]
    wrong = (given < 0) | (given >= moe.experts)
    if wrong.any():
        raise ValueError(f"batch['experts'] names expert {int(given[wrong][0])}; there are 0 to {moe.experts - 1}")
    if (given.sort(-1).values.diff(dim=-1) == 0).any():
        raise ValueError("batch['experts'] names an expert twice for one token; a token's choices differ")


def _logits(x_BtD: Tensor, p: Params, layer: int, moe: MoeSpec, mesh: Mesh, how: Forward, batch: Batch) -> Tensor:
    high = torch.promote_types(x_BtD.dtype, torch.float32)
    x_BtD = x_BtD.to(high)
    if moe.jitter and how.jitter is not None:
        length, device = x_BtD.shape[1], x_BtD.device
        first = mesh.tp.index * length if mesh.sequence_parallel else 0
        places = torch.arange(first, first + length, device=device)
        coordinates = [batch["row"].to(device), places, torch.arange(x_BtD.shape[2], device=device)]
        # Fedus et al. 2021, arXiv 2101.03961: only the router sees the noise
        uniform = rng.bits(rng.key(how.jitter, "jitter", layer), coordinates).to(high) / 2**31 - 1.0
        x_BtD = x_BtD * (1.0 + moe.jitter * uniform)
    return fused.linear(x_BtD, leaf(p, "w").to(high))


def _choose(logits: Tensor, scores: Tensor, bias: Tensor | None, moe: MoeSpec) -> Tensor:
    """Return the ids [B, t, K] of the highest: of the scores plus the bias (arXiv 2412.19437, eq. 16), or the logits.

    The logits order as the scores do, and still differ where the scores are all 0 or 1. The sort is stable, so that of
    equals the first wins, on every mesh and device.
    """
    high = (logits if bias is None else scores + bias.to(scores.dtype)).detach()
    if moe.groups > 1:
        # the groups are judged by scores (arXiv 2412.19437, section 2.1.2): two logits do not add up as they do
        judged = (high if bias is not None else scores.detach()).unflatten(-1, (moe.groups, -1))
        best = judged.topk(min(2, judged.shape[-1])).values.sum(-1)
        order = best.sort(dim=-1, descending=True, stable=True).indices[..., : moe.group_top_k]
        shut = torch.ones_like(best, dtype=torch.bool).scatter(-1, order, False)
        high = high.unflatten(-1, (moe.groups, -1)).masked_fill(shut[..., None], -math.inf).flatten(-2)
    return high.sort(dim=-1, descending=True, stable=True).indices[..., : moe.top_k]


def _weights(logits: Tensor, scores: Tensor, chosen: Tensor, moe: MoeSpec) -> Tensor:
    if moe.score == "softmax_chosen":
        weights = logits.gather(-1, chosen).softmax(-1)
    else:
        weights = scores.gather(-1, chosen)
        if moe.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # sigmoids may all be 0
    return weights * moe.scale


def _over_positions(x: Tensor, mesh: Mesh) -> Tensor:
    return reduce(x, mesh.tp) if mesh.sequence_parallel else x


def _counts(experts: Tensor, count: int) -> Tensor:
    """Count each row's choices of every expert: int64 [B, E]."""
    ids = torch.where(experts < 0, count, experts).flatten(1)
    zeros = ids.new_zeros(ids.shape[0], count + 1)
    return zeros.scatter_add(1, ids, torch.ones_like(ids))[:, :count]


def _within_capacity(experts: Tensor, real: Tensor, moe: MoeSpec) -> Tensor:
    """Return which choices find room: an expert takes the first ceil(capacity K n / E) of a row's n real tokens.

    All first choices come before all second ones, and of one rank the earlier position comes first, as in GShard
    (Lepikhin et al. 2020, arXiv 2006.16668, algorithm 1).
    """
    kept = real[..., None].expand_as(experts)
    if moe.capacity is None:
        return kept
    share = moe.capacity * moe.top_k / moe.experts
    limit = (real.sum(1).double() * share - 1e-9).ceil()  # the product's rounding must not make room
    queue = experts.transpose(1, 2).flatten(1)
    order = queue.sort(dim=1, stable=True)
    at = torch.arange(queue.shape[1], device=queue.device).expand_as(queue)
    start = order.values.diff(dim=1, prepend=order.values[:, :1] - 1) != 0
    place = at - torch.where(start, at, 0).cummax(1).values
    place = torch.zeros_like(queue).scatter(1, order.indices, place)
    return kept & (place < limit[:, None]).unflatten(1, (moe.top_k, -1)).transpose(1, 2)
