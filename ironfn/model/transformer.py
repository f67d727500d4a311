"""Compute a decoder: one pure function over a tree of parameters.

Legend of shapes: B rows, T length, D width, H heads, K kv_heads, C head_dim, F ffn, V rows of the vocabulary table.
Under a mesh, H, K, F and V are this rank's shares; under sequence parallelism T is too, between the blocks' halves.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import TypeAlias, cast

import torch
from torch import Tensor

from ironfn import tree
from ironfn.mesh.axis import Mesh
from ironfn.mesh.pairs import copy, enter, leave, reduce
from ironfn.model import fused
from ironfn.model.arch import Arch
from ironfn.model.causal import Look, alibi_slopes
from ironfn.model.forward import DEFAULT, Forward, ready, share
from ironfn.model.mlp import feed_forward, maybe, plus, products
from ironfn.model.moe import Seen, joined, mixture
from ironfn.model.norms import Normed, layer_norm, rms_norm
from ironfn.model.rope import Angles
from ironfn.model.routing import check_given
from ironfn.model.shared import sharing
from ironfn.model.weights import Weight
from ironfn.tree import branch, leaf
from ironfn.types import Batch, Params

Mix: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q, k, v) -> mixed v: an `attention.Attend` that knows how this block looks."""


def _norm(x: Tensor, p: Params, arch: Arch) -> Normed:
    scale = leaf(p, "scale")
    if isinstance(scale, Weight):
        return Normed(scale.times(x))
    if arch.norm == "rms":
        return rms_norm(x, _offset(scale, arch), arch.norm_eps)
    return layer_norm(x, scale, maybe(p, "bias"), arch.norm_eps)


def _entered(x: Normed, mesh: Mesh) -> Normed:
    """Begin a tensor-parallel region, if there is one, with a norm's result."""
    return x if mesh.tp.size == 1 else Normed(enter(x.value, mesh))


def _offset(scale: Tensor, arch: Arch) -> Tensor:
    """Return what a norm multiplies by: Gemma's 1 + scale is added in float32 or better."""
    return scale.to(torch.promote_types(scale.dtype, torch.float32)) + 1 if arch.norm_offset else scale


def _norm_heads(x_BTHC: Tensor, scale: Tensor, arch: Arch, mesh: Mesh) -> Tensor:
    """Normalise queries or keys: each head alone (Qwen3, Gemma 3), or all of them as one vector (OLMoE)."""
    scale = _offset(scale, arch)
    if arch.qk_norm == "head":
        return rms_norm(x_BTHC, scale, arch.norm_eps).value
    x = x_BTHC.flatten(2)
    if mesh.tp.size == 1:
        return rms_norm(x, scale, arch.norm_eps).value.view_as(x_BTHC)
    high, mine = x.to(torch.promote_types(x.dtype, torch.float32)), x.shape[2]
    # every rank's part of the sum acts on all ranks' results: its gradient is added up as the sum was
    squares = copy(reduce(high.square().sum(-1, keepdim=True), mesh.tp), mesh.tp)
    unit = high * torch.rsqrt(squares / len(scale) + arch.norm_eps)
    return (unit * scale[mesh.tp.index * mine :][:mine]).to(x.dtype).view_as(x_BTHC)


def _attention(x_BTD: Normed, p: Params, arch: Arch, mesh: Mesh, attend: Mix, angles: Angles | None) -> Tensor:
    sides, v = _projected(x_BTD, p, arch)
    if arch.qk_norm != "none":
        names = ("q_norm", "k_norm")
        sides = [_norm_heads(x, leaf(branch(p, n), "scale"), arch, mesh) for n, x in zip(names, sides, strict=True)]
    if arch.attention_clip is not None:
        *sides, v = (x.clamp(-arch.attention_clip, arch.attention_clip) for x in (*sides, v))
    if angles is not None:
        sides = [_rotated(x, angles) for x in sides]
    q, k = sides if len(sides) == 2 else sides[0].tensor_split((sides[0].shape[2] - v.shape[2],), 2)
    keys, values = p.get("prefix_k"), p.get("prefix_v")
    if isinstance(keys, Weight) and isinstance(values, Weight):
        k, v = keys.times(k), values.times(v)
    return fused.linear(attend(q, k, v).flatten(2), leaf(p, "wo"))


def _projected(x_BTD: Normed, p: Params, arch: Arch) -> tuple[list[Tensor], Tensor]:
    """Return queries and keys, and values. Where one product makes them all, queries and keys stay together."""
    joint = p.get("wq+wk+wv")
    if isinstance(joint, Weight):
        x_BTHC = plus(joint.times(x_BTD.value), maybe(p, "bq+bk+bv")).unflatten(-1, (-1, arch.head_dim))
        *sides, v = x_BTHC.split_with_sizes([size // arch.head_dim for size in _together(joint.sizes, arch)], 2)
        return sides, v
    q, k, v = (
        plus(x, maybe(p, f"b{name}")).unflatten(-1, (-1, arch.head_dim))
        for name, x in zip("qkv", products(x_BTD, p, "wq", "wk", "wv"), strict=True)
    )
    return [q, k], v


def _together(sizes: tuple[int, ...], arch: Arch) -> tuple[int, ...]:
    q, k, v = sizes
    return (q + k, v) if arch.qk_norm == "none" else sizes


def _rotated(x: Tensor, angles: Angles) -> Tensor:
    """Turn the first numbers of each head: all of them, unless there are fewer angles."""
    turned = angles[0].shape[-1]
    if turned == x.shape[-1]:
        return fused.rotate(x, *angles)
    return torch.cat([fused.rotate(x[..., :turned], *angles), x[..., turned:]], -1)


def _embed(params: Params, tokens_BT: Tensor, position_BT: Tensor, arch: Arch, mesh: Mesh) -> Tensor:
    """Look the tokens up in this rank's rows of the table; positions are added after the ranks' parts are."""
    embed = branch(params, "embed")
    table = leaf(embed, "tokens")
    rows = table.sizes[0] if isinstance(table, Weight) else len(table)
    if mesh.tp.size == 1:
        x = fused.lookup(tokens_BT, table)
    else:
        local = tokens_BT - mesh.tp.index * rows
        mine = (local >= 0) & (local < rows)
        x = leave(fused.lookup(local.clamp(0, rows - 1), table) * mine[..., None], mesh)
    if arch.embed_scale:
        x = x * torch.tensor(arch.width**0.5, dtype=x.dtype, device=x.device)  # rounded as Gemma's code rounds it
    if isinstance(prompt := embed.get("prompt"), Weight):
        x = prompt.times(x)
    if arch.embed_norm:
        x = _norm(x, branch(embed, "norm"), arch).value
    if arch.positions == "learned":
        x = x + fused.lookup(share(position_BT, mesh), leaf(embed, "positions"))
    return x


def _read(x: Tensor, p: Params, name: str, arch: Arch) -> Normed:
    """Return what a half of a block reads: x as it is where only results are normed (OLMo 2)."""
    return _norm(x, branch(p, name), arch) if arch.pre_norms else Normed(x)


def _ended(mixed: Tensor, half: Params, bias: str, p: Params, norm: str, arch: Arch) -> Tensor:
    """Return what a half of a block adds to the residual stream: with its last bias, and normed where results are."""
    mixed = plus(mixed, maybe(half, bias))
    return _norm(mixed, branch(p, norm), arch).value if arch.post_norms else mixed


def _block(
    x: Tensor,
    p: Params,
    layer: int,
    arch: Arch,
    mesh: Mesh,
    how: Forward,
    attend: Mix,
    angles: Angles | None,
    batch: Batch,
    drop: Callable[[Tensor, str], Tensor],
) -> tuple[Tensor, Seen]:
    p = ready(p, how, batch, f"blocks/{layer}/")
    attn, mlp = branch(p, "attn"), branch(p, "mlp")
    seen: Seen = {}
    normed = _read(x, p, "norm1", arch)
    mixed = leave(_attention(_entered(normed, mesh), attn, arch, mesh, attend, angles), mesh)
    # In place: a new tensor for the sum would leave a hole among those that are kept, and none of them fits into it.
    start, x = x, drop(_ended(mixed, attn, "bo", p, "post_norm1", arch), f"{layer}/attn").add_(x)
    if not arch.one_norm:
        normed = _read(start if arch.parallel else x, p, "norm2", arch)
    if arch.has_experts(layer):
        mixed, seen = mixture(normed.value, mlp, layer, arch, mesh, how, batch)
    else:
        mixed = leave(feed_forward(_entered(normed, mesh), mlp, arch), mesh)
    return drop(_ended(mixed, mlp, "b_down", p, "post_norm2", arch), f"{layer}/mlp").add_(x), seen


def _look(layer: int, arch: Arch, mesh: Mesh, device: torch.device) -> Look:
    """Return how this rank's heads of a block look."""
    window, slopes = arch.window(layer), None
    if arch.positions == "alibi":
        slopes = torch.tensor(alibi_slopes(arch.heads), dtype=torch.float64, device=device).chunk(mesh.tp.size)[
            mesh.tp.index
        ]
    return Look(arch.attention_scale, window, arch.attention_softcap, slopes, layer)


def hidden(params: Params, batch: Batch, arch: Arch, mesh: Mesh, how: Forward = DEFAULT) -> tuple[Tensor, Seen]:
    """Return the last hidden states [B, T, D] (T a share under sequence parallelism), and what the experts tell.

    batch needs ``tokens``; ``position`` (else 0, 1, …), ``segment``, ``until`` (without dropout), ``lengths``, ``row``
    (with dropout or jitter) and ``experts`` as in `types.Batch`. ValueError where rows without ``position`` are longer
    than a context of learned positions.

    With L blocks of E experts and K choices a token, on every rank of tp the same: ``experts`` int64 [B, T, L, K], the
    choices (-1 on padding), which may be given back in the batch; ``load`` int64 [B, L, E], the tokens of each row that
    chose each expert; ``dropped`` int64 [B, L], the choices that found it full; ``scores`` [B, L, E], the router's
    scores, summed over the row, and ``z`` [B, L], its mean squared logsumexp: `loss.experts` makes losses of these.
    """
    tokens = batch["tokens"]
    if arch.positions == "learned" and tokens.shape[1] > arch.context and "position" not in batch:
        raise ValueError(f"{tokens.shape[1]} tokens do not fit model.context {arch.context}; shorten the rows")
    if "experts" in batch:
        check_given(batch, arch)
    assert how.dropout is None or "until" not in batch, "what texts share would be dropped for all of them alike"
    position = batch.get("position", torch.arange(tokens.shape[1], device=tokens.device)[None])
    segment, dropout = batch.get("segment"), how.dropout
    attention = sharing(batch["until"], how.attention) if "until" in batch else how.attention
    attend, far, near = attention(segment), None, None
    if arch.positions == "rotary":
        far = near = how.angles(position, segment, arch, lengths_BT=batch.get("lengths"))
        if arch.rope_local_theta is not None:
            near = how.angles(position, segment, arch, local=True)
    # Under FSDP the whole table must not outlive its use.
    x = _embed(ready({"embed": params["embed"]}, how, batch), tokens, position.expand_as(tokens), arch, mesh)
    first = mesh.tp.index * x.shape[1] if mesh.sequence_parallel else 0

    def drop(x: Tensor, place: str) -> Tensor:
        return x if dropout is None else dropout.hidden(x, place, batch["row"], first)

    x = drop(x, "embed")
    told: list[Seen] = []
    for layer in range(arch.layers):
        if dropout is not None:
            first_head = mesh.tp.index * (arch.heads // mesh.tp.size)
            attend = dropout.attention(segment, f"{layer}/probabilities", batch["row"], first_head)
        mix = partial(attend, look=_look(layer, arch, mesh, x.device))
        angle = near if arch.window(layer) else far
        block = branch(branch(params, "blocks"), str(layer))
        x, seen = how.run(_block, x, block, layer, arch, mesh, how, mix, angle, batch, drop)
        told.append(seen)
    x = _norm(x, branch(ready({"norm": params["norm"]}, how, batch), "norm"), arch).value
    return x, joined([seen for seen in told if seen])


def head_weight(params: Params, arch: Arch, how: Forward = DEFAULT) -> Tensor:
    """Return the matrix [V, D] that turns hidden states into logits: the embedding itself where it is tied.

    It is in the parameters' dtype: the head's float32 accumulation is its caller's choice. The head's adapter is in it,
    that of a tied embedding is not. A `weights.Weight` comes as it is: it stands for [D, V]. ValueError for a model
    that ends in a reward.
    """
    if arch.score:
        raise ValueError("the model ends in a reward (model.score) and predicts no token; take one that has a head")
    path = "embed/tokens" if arch.tied else "head/w"
    if not arch.tied and isinstance(weight := branch(params, "head").get("w"), Weight):
        return cast("Tensor", weight)
    known = tree.flatten({name: params[name] for name in ("embed", "head") if name in params})
    own = {f"head/w{p.removeprefix(path)}": p for p in known if re.fullmatch(rf"{path}(_nf4/.*)?", p)}
    own |= {p: p for p in known if p.startswith("head/w_lora/")}
    parts = {ours: how.fetch(p, known[p], known[p].dtype) for ours, p in own.items()}
    return leaf(branch(how.adapt(tree.unflatten(parts), "", {}), "head"), "w")


def head_bias(params: Params, arch: Arch, how: Forward = DEFAULT) -> Tensor | None:
    """Return the bias [V] of the logits, None where the model has none."""
    if not arch.head_bias:
        return None
    bias = leaf(branch(params, "head"), "b")
    return how.fetch("head/b", bias, bias.dtype)


def scored(x: Tensor, params: Params, arch: Arch, mesh: Mesh, how: Forward = DEFAULT) -> Tensor:
    """Return the logits [..., vocab] of hidden states [..., D], whole on every rank and in the dtype of ``x``."""
    bias = head_bias(params, arch, how)
    weight = head_weight(params, arch, how)
    product = fused.linear(x, weight if isinstance(weight, Weight) else weight.to(x.dtype).t())
    local = plus(product, None if bias is None else bias.to(x.dtype))
    whole = mesh.tp.backend.all_gather(local, x.dim() - 1)[..., : arch.vocab]
    cap = arch.logit_softcap
    return whole if cap is None else (whole / cap).tanh() * cap


def logits(params: Params, batch: Batch, arch: Arch, mesh: Mesh, how: Forward = DEFAULT) -> Tensor:
    """Return the logits [B, T, vocab] of every position, whole on every rank: to look at, not to train with."""
    return scored(enter(hidden(params, batch, arch, mesh, how)[0], mesh), params, arch, mesh, how)
