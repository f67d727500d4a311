"""Complete a model's description: every number that the forward pass needs, none left open."""

from __future__ import annotations

import math
from typing import Any, Literal

import attrs
from attrs import evolve, field, frozen

from ironfn.spec.check_model import model_faults
from ironfn.spec.records import ModelSpec, MoeSpec, RopeSpec


@frozen(kw_only=True)
class Arch:
    """Fix the shapes and the mathematics of a decoder: the fields of `spec.records.ModelSpec`, none left open.

    vocab: ids that exist. rows: rows of the embedding, a multiple chosen by the spec; logits past ``vocab`` are none.
    moe: None for a dense model; its ffn and shared_ffn are filled in.
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
    norm_offset: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    parallel: bool = False
    parallel_norms: bool = False
    positions: Literal["rotary", "learned", "alibi", "none"]
    rope_theta: float
    rope_fraction: float = 1.0
    rope: RopeSpec = field(factory=RopeSpec)
    rope_local_theta: float | None = None
    windows: list[int] = field(factory=list)
    qk_norm: Literal["none", "head", "width"] = "none"
    mlp: Literal["gelu", "gelu_tanh", "swiglu", "geglu"]
    attention_bias: bool
    attention_out_bias: bool | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    attention_clip: float | None = None
    mlp_bias: bool
    norm_bias: bool
    embed_scale: bool = False
    embed_norm: bool = False
    head_bias: bool = False
    logit_softcap: float | None = None
    tied: bool
    score: bool = False
    dropout: float
    init_std: float
    moe: MoeSpec | None = None

    @property
    def gated(self) -> bool:
        """Tell whether the feed-forward has a gate (Shazeer 2020, arXiv 2002.05202)."""
        return self.mlp in ("swiglu", "geglu")

    @property
    def out_bias(self) -> bool:
        """Tell whether attention's last product has a bias."""
        return self.attention_bias if self.attention_out_bias is None else self.attention_out_bias

    @property
    def rotary_dim(self) -> int:
        """Return how many numbers of a head are turned."""
        return int(self.head_dim * self.rope_fraction)

    @property
    def one_norm(self) -> bool:
        """Tell whether both halves of a block read the same norm."""
        return self.parallel and not self.parallel_norms

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Return the numbers of the blocks that are mixtures of experts."""
        moe = self.moe
        if moe is None:
            return ()
        mixtures = range(moe.dense_layers, self.layers)
        return tuple(n for n in mixtures if (n + 1) % moe.every == 0 and n not in moe.dense_at)

    def has_experts(self, layer: int) -> bool:
        """Tell whether this block is a mixture of experts."""
        return layer in self.expert_layers

    def window(self, layer: int) -> int:
        """Return how many tokens the positions of this block see, themselves included; 0 is all before them."""
        return self.windows[layer % len(self.windows)] if self.windows else 0

    def without_capacity(self) -> Arch:
        """Return the decoder whose experts take all that choose them: for rows that are not one sequence each.

        A capacity is a share of a sequence's tokens, and makes a token depend on those after it.
        """
        return self if self.moe is None else evolve(self, moe=evolve(self.moe, capacity=None))


def complete(spec: ModelSpec, vocab_size: int) -> Arch:
    """Return the architecture that a spec and a tokenizer of ``vocab_size`` ids describe.

    ValueError where the numbers do not fit each other.
    """
    vocab = spec.vocab_size or vocab_size
    if vocab < vocab_size:
        raise ValueError(
            f"model.vocab_size is {vocab}, but the tokenizer has {vocab_size} ids; leave it out or raise it"
        )
    for paths, what in model_faults(spec):
        raise ValueError(f"{'.'.join(map(str, paths[0]))}: {what}")
    ffn = spec.ffn or _usual_ffn(spec)
    both = attrs.fields_dict(Arch).keys() & attrs.fields_dict(ModelSpec).keys()
    known: dict[str, Any] = {name: getattr(spec, name) for name in both} | {
        "vocab": vocab,
        "rows": math.ceil(vocab / spec.pad_vocab_to) * spec.pad_vocab_to,
        "kv_heads": spec.kv_heads or spec.heads,
        "head_dim": spec.head_dim or spec.width // spec.heads,
        "ffn": ffn,
        "moe": _experts(spec.moe, ffn),
    }
    return Arch(**known)


def _experts(moe: MoeSpec, ffn: int) -> MoeSpec | None:
    if moe.experts == 0:
        return None
    each = moe.ffn or ffn
    return evolve(moe, ffn=each, shared_ffn=(moe.shared_ffn or each) if moe.shared else None)


def _usual_ffn(spec: ModelSpec) -> int:
    """Return 4 x width, or 8/3 x width rounded up to a multiple of 64 where a gate adds a third matrix."""
    if spec.mlp in ("swiglu", "geglu"):
        return math.ceil(spec.width * 8 / 3 / 64) * 64
    return 4 * spec.width
