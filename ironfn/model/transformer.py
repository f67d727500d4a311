"""Compute a decoder: one pure function over a tree of parameters.

Legend of shapes: B rows, T length, D width, H heads, K kv_heads, C head_dim, F ffn, V rows of the vocabulary table.
Under a mesh, H, K, F and V are this rank's shares; under sequence parallelism T is too, between the blocks' halves.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ironfn.mesh.axis import Mesh
from ironfn.mesh.pairs import enter, leave
from ironfn.model import fused
from ironfn.model.arch import Arch
from ironfn.model.attention import Attend
from ironfn.model.forward import DEFAULT, Forward, ready, share
from ironfn.model.mlp import feed_forward, maybe, plus
from ironfn.model.moe import Seen, joined, mixture
from ironfn.model.routing import check_given
from ironfn.tree import branch, leaf
from ironfn.types import Batch, Params


def _norm(x: Tensor, p: Params, arch: Arch) -> Tensor:
    if arch.norm == "rms":
        return fused.rms_norm(x, leaf(p, "scale"), arch.norm_eps)
    scale, bias = leaf(p, "scale"), maybe(p, "bias")
    high = scale.dtype if scale.dtype != x.dtype else x.dtype
    return F.layer_norm(x.to(high), (arch.width,), scale, bias, arch.norm_eps).to(x.dtype)


def _attention(x_BTD: Tensor, p: Params, arch: Arch, attend: Attend, angles: tuple[Tensor, Tensor] | None) -> Tensor:
    q, k, v = (
        plus(fused.linear(x_BTD, leaf(p, f"w{name}")), maybe(p, f"b{name}")).unflatten(-1, (-1, arch.head_dim))
        for name in "qkv"
    )
    if angles is not None:
        q, k = fused.rotate(q, *angles), fused.rotate(k, *angles)
    return fused.linear(attend(q, k, v).flatten(2), leaf(p, "wo"))


def angles(position_BT: Tensor, arch: Arch) -> tuple[Tensor, Tensor] | None:
    """Return cos and (negated, plain) sin [B, T, 1, C] of the rotary angles, in float32 whatever the model's dtype.

    Su et al. 2021, arXiv 2104.09864; the pairs are (i, i + C/2) as in `transformers`.
    """
    if arch.positions != "rotary":
        return None
    exponents = torch.arange(0, arch.head_dim, 2, dtype=torch.float32, device=position_BT.device) / arch.head_dim
    angle = position_BT[..., None].float() * (1.0 / arch.rope_theta**exponents)
    angle = torch.cat([-angle, angle], -1)[:, :, None]  # cos is even, sin is odd
    return angle.cos(), angle.sin()


def _embed(params: Params, tokens_BT: Tensor, position_BT: Tensor, arch: Arch, mesh: Mesh) -> Tensor:
    """Look the tokens up in this rank's rows of the table; positions are added after the ranks' parts are."""
    embed = branch(params, "embed")
    table = leaf(embed, "tokens")
    if mesh.tp.size == 1:
        x = F.embedding(tokens_BT, table)
    else:
        local = tokens_BT - mesh.tp.index * table.shape[0]
        mine = (local >= 0) & (local < table.shape[0])
        x = leave(F.embedding(local.clamp(0, table.shape[0] - 1), table) * mine[..., None], mesh)
    if arch.positions == "learned":
        x = x + F.embedding(share(position_BT, mesh), leaf(embed, "positions"))
    return x


def _block(
    x: Tensor,
    p: Params,
    layer: int,
    arch: Arch,
    mesh: Mesh,
    how: Forward,
    attend: Attend,
    angle: tuple[Tensor, Tensor] | None,
    batch: Batch,
    drop: Callable[[Tensor, str], Tensor],
) -> tuple[Tensor, Seen]:
    p = ready(p, how, f"blocks/{layer}/")
    attn, mlp = branch(p, "attn"), branch(p, "mlp")
    seen: Seen = {}
    mixed = leave(_attention(enter(_norm(x, branch(p, "norm1"), arch), mesh), attn, arch, attend, angle), mesh)
    x = x + drop(plus(mixed, maybe(attn, "bo")), "attn")
    normed = _norm(x, branch(p, "norm2"), arch)
    if arch.has_experts(layer):
        mixed, seen = mixture(normed, mlp, layer, arch, mesh, how, batch)
    else:
        mixed = leave(feed_forward(enter(normed, mesh), mlp, arch), mesh)
    return x + drop(plus(mixed, maybe(mlp, "b_down")), "mlp"), seen


def hidden(params: Params, batch: Batch, arch: Arch, mesh: Mesh, how: Forward = DEFAULT) -> tuple[Tensor, Seen]:
    """Return the last hidden states [B, T, D] (T a share under sequence parallelism), and what the experts tell.

    batch needs ``tokens``; ``position`` (else 0, 1, …), ``segment``, ``row`` (with dropout or jitter) and ``experts``
    as in `types.Batch`. ValueError where the text is longer than the model's context with learned positions.

    With L blocks of E experts and K choices a token, on every rank of tp the same: ``experts`` int64 [B, T, L, K], the
    choices (-1 on padding), which may be given back in the batch; ``load`` int64 [B, L, E], the tokens of each row that
    chose each expert; ``dropped`` int64 [B, L], the choices that found it full; ``scores`` [B, L, E], the router's
    scores, summed over the row, and ``z`` [B, L], its mean squared logsumexp: `loss.experts` makes losses of these.
    """
    tokens = batch["tokens"]
    if arch.positions == "learned" and tokens.shape[1] > arch.context:
        raise ValueError(f"{tokens.shape[1]} tokens do not fit model.context {arch.context}; shorten the rows")
    if "experts" in batch:
        check_given(batch, arch)
    position = batch.get("position", torch.arange(tokens.shape[1], device=tokens.device)[None])
    segment, dropout = batch.get("segment"), how.dropout
    attend = how.attention(segment)
    angle = angles(position, arch)
    # Under FSDP the whole table must not outlive its use.
    x = _embed(ready({"embed": params["embed"]}, how), tokens, position.expand_as(tokens), arch, mesh)
    first = mesh.tp.index * x.shape[1] if mesh.sequence_parallel else 0

    def drop(x: Tensor, place: str) -> Tensor:
        return x if dropout is None else dropout.hidden(x, place, batch["row"], first)

    x = drop(x, "embed")
    told: list[Seen] = []
    for layer, block in enumerate(branch(params, "blocks").values()):
        if dropout is not None:
            first_head = mesh.tp.index * (arch.heads // mesh.tp.size)
            attend = dropout.attention(segment, f"{layer}/probabilities", batch["row"], first_head)
        x, seen = how.run(
            _block, x, block, layer, arch, mesh, how, attend, angle, batch, lambda x, p, at=layer: drop(x, f"{at}/{p}")
        )
        told.append(seen)
    return _norm(x, branch(ready({"norm": params["norm"]}, how), "norm"), arch), joined([seen for seen in told if seen])


def head_weight(params: Params, arch: Arch, how: Forward = DEFAULT) -> Tensor:
    """Return the matrix [V, D] that turns hidden states into logits: the embedding itself where it is tied.

    It is in the parameters' dtype: the head's float32 accumulation is its caller's choice.
    """
    path = "embed/tokens" if arch.tied else "head/w"
    table = leaf(branch(params, path.split("/")[0]), path.split("/")[1])
    return how.fetch(path, table, table.dtype)


def logits(params: Params, batch: Batch, arch: Arch, mesh: Mesh, how: Forward = DEFAULT) -> Tensor:
    """Return the logits [B, T, vocab] of every position, whole on every rank: to look at, not to train with."""
    x = enter(hidden(params, batch, arch, mesh, how)[0], mesh)
    weight = head_weight(params, arch, how).to(x.dtype)
    return mesh.tp.backend.all_gather(x @ weight.t(), 2)[..., : arch.vocab]
