"""Complete a model's description: every number that the forward pass needs, none left open."""

from __future__ import annotations

import math
from typing import Literal

from attrs import evolve, frozen

from ironfn.spec.records import ModelSpec, MoeSpec


@frozen
class Arch:
    """Fix the shapes and the mathematics of a decoder.

    vocab: ids that exist. rows: rows of the embedding, a multiple chosen by the spec; logits past ``vocab`` are none.
    moe: None for a dense model; its ffn is filled in.
    """

    vocab: int
    rows: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    context: int
    norm: Literal["rms", "layer"]
    norm_eps: float
    positions: Literal["rotary", "learned", "none"]
    rope_theta: float
    mlp: Literal["gelu", "gelu_tanh", "swiglu", "geglu"]
    attention_bias: bool
    mlp_bias: bool
    norm_bias: bool
    tied: bool
    dropout: float
    init_std: float
    moe: MoeSpec | None = None

    @property
    def gated(self) -> bool:
        """Tell whether the feed-forward has a gate (Shazeer 2020, arXiv 2002.05202)."""
        return self.mlp in ("swiglu", "geglu")

    def has_experts(self, layer: int) -> bool:
        """Tell whether this block is a mixture of experts."""
        return self.moe is not None and layer >= self.moe.dense_layers


def complete(spec: ModelSpec, vocab_size: int) -> Arch:
    """Return the architecture that a spec and a tokenizer of ``vocab_size`` ids describe.

    ValueError where the numbers do not fit each other.
    """
    vocab = spec.vocab_size or vocab_size
    if vocab < vocab_size:
        raise ValueError(
            f"model.vocab_size is {vocab}, but the tokenizer has {vocab_size} ids; leave it out or raise it"
        )
    if spec.head_dim is None and spec.width % spec.heads:
        raise ValueError(f"model.width {spec.width} does not divide by model.heads {spec.heads}; set model.head_dim")
    kv_heads = spec.kv_heads or spec.heads
    if spec.heads % kv_heads:
        raise ValueError(f"model.heads {spec.heads} does not divide by model.kv_heads {kv_heads}")
    head_dim = spec.head_dim or spec.width // spec.heads
    if spec.positions == "rotary" and head_dim % 2:
        raise ValueError(f"rotary positions turn pairs: head_dim {head_dim} is odd; choose an even model.head_dim")
    ffn = spec.ffn or _usual_ffn(spec)
    return Arch(
        vocab=vocab,
        rows=math.ceil(vocab / spec.pad_vocab_to) * spec.pad_vocab_to,
        width=spec.width,
        layers=spec.layers,
        heads=spec.heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        context=spec.context,
        norm=spec.norm,
        norm_eps=spec.norm_eps,
        positions=spec.positions,
        rope_theta=spec.rope_theta,
        mlp=spec.mlp,
        attention_bias=spec.attention_bias,
        mlp_bias=spec.mlp_bias,
        norm_bias=spec.norm_bias,
        tied=spec.tied,
        dropout=spec.dropout,
        init_std=spec.init_std,
        moe=_experts(spec, ffn),
    )


def _experts(spec: ModelSpec, ffn: int) -> MoeSpec | None:
    moe = spec.moe
    if moe.experts == 0:
        return None
    if moe.top_k > moe.experts:
        raise ValueError(f"model.moe.top_k is {moe.top_k}, but there are {moe.experts} experts to choose from")
    if moe.dense_layers >= spec.layers:
        raise ValueError(f"model.moe.dense_layers {moe.dense_layers} leaves none of {spec.layers} layers with experts")
    if spec.mlp_bias:
        raise ValueError("experts have no biases: set model.mlp_bias to false, or model.moe.experts to 0")
    return evolve(moe, ffn=moe.ffn or ffn)


def _usual_ffn(spec: ModelSpec) -> int:
    """Return 4 x width, or 8/3 x width rounded up to a multiple of 64 where a gate adds a third matrix."""
    if spec.mlp in ("swiglu", "geglu"):
        return math.ceil(spec.width * 8 / 3 / 64) * 64
    return 4 * spec.width
