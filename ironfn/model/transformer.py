"""Compute a decoder: one pure function over a tree of parameters.

Legend of shapes: B rows, T length, D width, H heads, K kv_heads, C head_dim, F ffn, V rows of the vocabulary table.
Under a mesh, H, K, F and V are this rank's shares; under sequence parallelism T is too, between the blocks' halves.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional as F

from ironfn import tree
from ironfn.mesh.axis import Mesh
from ironfn.mesh.pairs import enter, leave
from ironfn.model import fused
from ironfn.model.arch import Arch
from ironfn.model.attention import Attend, Attention, Dropout, by_span
from ironfn.tree import branch, leaf
from ironfn.types import Batch, Params

Block = Callable[..., Tensor]


def keep(block: Block, *arguments: Any) -> Tensor:
    """Run a block and keep what its backward needs: the default. `ironfn.grad.remat.recompute` is the other choice."""
    return block(*arguments)


@frozen
class Forward:
    """Choose how to compute, not what: none of this changes the mathematics.

    compute: dtype of the matrix products; None takes the parameters'. float32: leaves (path regex) kept in float32.
    attention: how documents are kept apart. run: how a block is called. dropout: None when evaluating.
    """

    compute: torch.dtype | None = None
    float32: tuple[str, ...] = ("norm",)
    attention: Attention = by_span
    run: Callable[..., Tensor] = keep
    dropout: Dropout | None = None


DEFAULT = Forward()


def cast(params: Params, how: Forward) -> Params:
    """Return the leaves in the dtypes that ``how`` asks for. Their gradients come back in their own."""
    if how.compute is None:
        return params

    def to(path: str, x: Tensor) -> Tensor:
        high = any(re.search(pattern, path) for pattern in how.float32)
        return x.to(torch.float32 if high and how.compute != torch.float64 else how.compute)

    return tree.map_path(to, params)


def _norm(x: Tensor, p: Params, arch: Arch) -> Tensor:
    if arch.norm == "rms":
        return fused.rms_norm(x, leaf(p, "scale"), arch.norm_eps)
    scale, bias = leaf(p, "scale"), _maybe(p, "bias")
    high = scale.dtype if scale.dtype != x.dtype else x.dtype
    return F.layer_norm(x.to(high), (arch.width,), scale, bias, arch.norm_eps).to(x.dtype)


def _maybe(p: Params, name: str) -> Tensor | None:
    return leaf(p, name) if name in p else None


def _plus(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


ACTIVATIONS = (
    ("swiglu", fused.SILU),
    ("geglu", fused.GELU_TANH),
    ("gelu", fused.GELU),
    ("gelu_tanh", fused.GELU_TANH),
)


def _mlp(x_BTD: Tensor, p: Params, arch: Arch) -> Tensor:
    act = dict(ACTIVATIONS)[arch.mlp]
    w_up, w_down = leaf(p, "w_up"), leaf(p, "w_down")
    if arch.gated and "b_up" not in p:
        return fused.gated_mlp(x_BTD, leaf(p, "w_gate"), w_up, w_down, act)
    up_BTF = _plus(fused.linear(x_BTD, w_up), _maybe(p, "b_up"))
    if not arch.gated:
        return fused.activate_down(up_BTF, w_down, act)
    gate_BTF = _plus(fused.linear(x_BTD, leaf(p, "w_gate")), _maybe(p, "b_gate"))
    return fused.linear(act.value(gate_BTF) * up_BTF, w_down)


def _attention(x_BTD: Tensor, p: Params, arch: Arch, attend: Attend, angles: tuple[Tensor, Tensor] | None) -> Tensor:
    q, k, v = (
        _plus(fused.linear(x_BTD, leaf(p, f"w{name}")), _maybe(p, f"b{name}")).unflatten(-1, (-1, arch.head_dim))
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
        x = x + F.embedding(_share(position_BT, mesh), leaf(embed, "positions"))
    return x


def _share(x_BT: Tensor, mesh: Mesh) -> Tensor:
    """Return the positions that this rank holds between the tensor-parallel regions."""
    return x_BT.chunk(mesh.tp.size, 1)[mesh.tp.index] if mesh.sequence_parallel else x_BT


def _block(
    x: Tensor,
    p: Params,
    arch: Arch,
    mesh: Mesh,
    how: Forward,
    attend: Attend,
    angle: tuple[Tensor, Tensor] | None,
    drop: Callable[[Tensor, str], Tensor],
) -> Tensor:
    p = cast(p, how)
    attn, mlp = branch(p, "attn"), branch(p, "mlp")
    mixed = leave(_attention(enter(_norm(x, branch(p, "norm1"), arch), mesh), attn, arch, attend, angle), mesh)
    x = x + drop(_plus(mixed, _maybe(attn, "bo")), "attn")
    mixed = leave(_mlp(enter(_norm(x, branch(p, "norm2"), arch), mesh), mlp, arch), mesh)
    return x + drop(_plus(mixed, _maybe(mlp, "b_down")), "mlp")


def hidden(params: Params, batch: Batch, arch: Arch, mesh: Mesh, how: Forward = DEFAULT) -> Tensor:
    """Return the last hidden states [B, T, D] (T a share under sequence parallelism), ready for the head.

    batch needs ``tokens``; ``position`` (else 0, 1, …), ``segment`` and ``row`` (with dropout) as in `types.Batch`.
    ValueError where the text is longer than the model's context with learned positions.
    """
    tokens = batch["tokens"]
    if arch.positions == "learned" and tokens.shape[1] > arch.context:
        raise ValueError(f"{tokens.shape[1]} tokens do not fit model.context {arch.context}; shorten the rows")
    position = batch.get("position", torch.arange(tokens.shape[1], device=tokens.device)[None])
    segment, dropout = batch.get("segment"), how.dropout
    attend = how.attention(segment)
    angle = angles(position, arch)
    head = cast({"embed": params["embed"], "norm": params["norm"]}, how)
    x = _embed(head, tokens, position.expand_as(tokens), arch, mesh)
    first = mesh.tp.index * x.shape[1] if mesh.sequence_parallel else 0

    def drop(x: Tensor, place: str) -> Tensor:
        return x if dropout is None else dropout.hidden(x, place, batch["row"], first)

    x = drop(x, "embed")
    for layer, block in enumerate(branch(params, "blocks").values()):
        if dropout is not None:
            first_head = mesh.tp.index * (arch.heads // mesh.tp.size)
            attend = dropout.attention(segment, f"{layer}/probabilities", batch["row"], first_head)
        x = how.run(_block, x, block, arch, mesh, how, attend, angle, lambda x, p, at=layer: drop(x, f"{at}/{p}"))
    return _norm(x, branch(head, "norm"), arch)


def head_weight(params: Params, arch: Arch) -> Tensor:
    """Return the matrix [V, D] that turns hidden states into logits: the embedding itself where it is tied."""
    return leaf(branch(params, "embed"), "tokens") if arch.tied else leaf(branch(params, "head"), "w")


def logits(params: Params, batch: Batch, arch: Arch, mesh: Mesh, how: Forward = DEFAULT) -> Tensor:
    """Return the logits [B, T, vocab] of every position, whole on every rank: to look at, not to train with."""
    x = enter(hidden(params, batch, arch, mesh, how), mesh)
    weight = head_weight(params, arch).to(x.dtype)
    return mesh.tp.backend.all_gather(x @ weight.t(), 2)[..., : arch.vocab]
