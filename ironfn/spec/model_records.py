"""Describe a model: the sections ``model``, ``model.rope`` and ``model.moe`` of a run's description."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen


@frozen
class MoeSpec:
    """Replace the feed-forward of a block by a mixture of experts. ``experts`` 0 means dense.

    top_k: experts a token. ffn: width of one expert; None takes model.ffn. shared: experts that every token goes
    through as well, each ``shared_ffn`` wide (None: as the others); shared_gate: a sigmoid weighs them (Qwen2-MoE).
    dense_layers: this many first blocks stay dense; of the rest those whose number, from 1, is a multiple of ``every``
    are mixtures, but not those that dense_at lists, from 0. groups: a token chooses within the ``group_top_k`` groups
    whose two best experts are best together (DeepSeek-V3).
    score: ``softmax`` over all experts, ``softmax_chosen`` over the chosen ones alone, or ``sigmoid``.
    renormalize: the chosen weights sum to 1. scale: what they are multiplied by at the end.
    balance: the load-balancing loss: of each ``sequence``, of the whole ``batch``, or ``none``.
    bias_rate: above 0, a bias on the choice alone is moved by this much a step towards equal loads (DeepSeek-V3).
    z_weight: of the router z-loss. jitter: the router's input is multiplied by 1 ± this at random.
    capacity: an expert takes at most this multiple of its fair share of a sequence; None drops nothing.
    """

    experts: int = 0
    top_k: int = 2
    ffn: int | None = None
    shared: int = 0
    shared_ffn: int | None = None
    shared_gate: bool = False
    dense_layers: int = 0
    dense_at: list[int] = field(factory=list)
    every: int = 1
    groups: int = 1
    group_top_k: int = 1
    score: Literal["softmax", "softmax_chosen", "sigmoid"] = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    balance: Literal["sequence", "batch", "none"] = "sequence"
    balance_weight: float = 0.01
    bias_rate: float = 0.0
    z_weight: float = 0.0
    jitter: float = 0.0
    capacity: float | None = None


@frozen
class RopeSpec:
    """Stretch the rotary angles over longer texts than a model was trained on, as `transformers` computes it.

    factor: how many times longer. original_context: the length before; None takes model.context.
    low_freq_factor, high_freq_factor: of ``llama3``. beta_fast, beta_slow, mscale, mscale_all_dim, truncate: of
    ``yarn`` (Peng et al. 2023, arXiv 2309.00071). short_factor, long_factor: of ``longrope``, one for each pair.
    attention_factor: what cos and sin are multiplied by; None takes the one that yarn and longrope recommend.
    ``dynamic`` and ``longrope`` look at the length of each document, not of the batch.
    """

    kind: Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope"] = "none"
    factor: float = 1.0
    original_context: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    attention_factor: float | None = None
    short_factor: list[float] = field(factory=list)
    long_factor: list[float] = field(factory=list)


@frozen
class ModelSpec:
    """Describe a decoder. ``preset`` names the family, or the model, whose values fill what the file leaves out.

    vocab_size: ids that exist; None takes the tokenizer's. pad_vocab_to: the table's rows are rounded up to a multiple.
    kv_heads, head_dim, ffn: None means heads, width / heads, and the family's usual multiple of the width.
    norm_offset: norms multiply by 1 + scale. pre_norms, post_norms: a norm before, and after, each half of a block.
    parallel: both halves of a block read what it began with, under one norm, or, parallel_norms, each under its own.
    rope_fraction: the share of a head that is turned.
    rope_local_theta: base of the layers that have a window; they are not stretched then.
    windows: how many tokens a layer's positions see, themselves included, repeated over the layers; 0 sees all.
    qk_norm: of queries and keys before the turn, each ``head`` alone or over their whole ``width``.
    attention_bias: of q, k and v; attention_out_bias: of o, None as the others. attention_scale: of the scores; None
    is 1 / sqrt(head_dim). attention_softcap, logit_softcap: c of c tanh(x / c) on scores and logits.
    attention_clip: the most that a number of q, k and v may be, either way.
    embed_scale: the embeddings are multiplied by sqrt(width). embed_norm: and have a norm of their own.
    score: the model ends in one number for each place, a reward, and has no logits.
    init_from: the run, checkpoint or Hugging Face directory that holds the first weights; None draws them.
    """

    preset: str = "llama"
    vocab_size: int | None = None
    pad_vocab_to: int = 1
    width: int = 384
    layers: int = 6
    heads: int = 6
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    context: int = 1024
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    norm_offset: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    parallel: bool = False
    parallel_norms: bool = False
    positions: Literal["rotary", "learned", "alibi", "none"] = "rotary"
    rope_theta: float = 10000.0
    rope_fraction: float = 1.0
    rope: RopeSpec = field(factory=RopeSpec)
    rope_local_theta: float | None = None
    windows: list[int] = field(factory=list)
    qk_norm: Literal["none", "head", "width"] = "none"
    mlp: Literal["gelu", "gelu_tanh", "swiglu", "geglu"] = "swiglu"
    attention_bias: bool = False
    attention_out_bias: bool | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    attention_clip: float | None = None
    mlp_bias: bool = False
    norm_bias: bool = False
    embed_scale: bool = False
    embed_norm: bool = False
    head_bias: bool = False
    logit_softcap: float | None = None
    tied: bool = True
    score: bool = False
    dropout: float = 0.0
    init_std: float = 0.02
    init_from: str | None = None
    moe: MoeSpec = field(factory=MoeSpec)
