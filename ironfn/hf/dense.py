"""Describe the dense architectures of `transformers`, a table of keys and names each."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from ironfn.hf import names
from ironfn.hf.config import Aspect, Config, Family, Fields, Key, choice, key, section
from ironfn.hf.rope import (
    GEMMA2_WINDOWS,
    GEMMA3_ROTARY,
    GEMMA3_WINDOWS,
    QWEN_WINDOWS,
    rotary,
    window_everywhere,
)
from ironfn.model.arch import Arch

SILU = choice("mlp", "hidden_act", {"silu": "swiglu", "swish": "swiglu"}, "silu")
_GELU = MappingProxyType(
    {"gelu_new": "gelu_tanh", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}
)
_LAYER_NORM = MappingProxyType(
    {"norm": "layer", "norm_bias": True, "attention_bias": True, "mlp_bias": True, "positions": "rotary"}
)


def common(tied: bool, context: int, kv_heads: int | None = None, eps: float = 1e-6) -> tuple[Key, ...]:
    """Return the keys that nearly all share, with the defaults of a family's config class."""
    return (
        key("vocab_size", "vocab_size"),
        key("width", "hidden_size"),
        key("layers", "num_hidden_layers"),
        key("heads", "num_attention_heads"),
        key("ffn", "intermediate_size"),
        key("kv_heads", "num_key_value_heads", kv_heads),
        key("context", "max_position_embeddings", context),
        key("tied", "tie_word_embeddings", tied),
        key("norm_eps", "rms_norm_eps", eps),
        key("init_std", "initializer_range", 0.02),
    )


def head_dim(default: int | None) -> Key:
    return key("head_dim", "head_dim", default)


def bias(ours: str = "attention_bias", theirs: str = "attention_bias", default: bool = False) -> Key:
    return key(ours, theirs, default)


def _layer_norm(keys: tuple[Key, ...]) -> tuple[Key, ...]:
    """Give what is added to the variance the name that it has beside a LayerNorm."""
    return tuple(key("norm_eps", "layer_norm_eps", 1e-5) if row.ours == "norm_eps" else row for row in keys)


def _read_residual(config: Config) -> Fields:
    """Read whether a block is parallel, each half with a norm of its own (GPT-NeoX)."""
    return dict.fromkeys(("parallel", "parallel_norms"), config.get("use_parallel_residual", True))


def _attention_scale(theirs: str, default: int) -> Aspect:
    """Return the aspect of Gemma's ``query_pre_attn_scalar``, of which the scores are divided by the root."""

    def write(arch: Arch) -> dict[str, Any]:
        scalar = arch.head_dim if arch.attention_scale is None else arch.attention_scale**-2
        return {theirs: round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar}

    return Aspect(lambda config: {"attention_scale": _positive(config, theirs, default) ** -0.5}, write)


def _positive(config: Config, name: str, default: Any) -> Any:
    value = config.get(name, default)
    if type(value) not in (int, float) or value <= 0:
        raise ValueError(f"{name} is {value!r}, not a number above 0")
    return value


LLAMA = Family(
    "LlamaForCausalLM",
    "llama",
    names.LLAMA,
    (*common(False, 2048), head_dim(None), bias(), bias("mlp_bias", "mlp_bias")),
    (SILU, rotary()),
)
MISTRAL = Family(
    "MistralForCausalLM",
    "mistral",
    names.LLAMA,
    (*common(False, 131072, 8), head_dim(None)),
    (SILU, rotary(), window_everywhere(4096)),
)
QWEN2 = Family(
    "Qwen2ForCausalLM",
    "qwen2",
    names.LLAMA,
    common(False, 32768, 32),
    (SILU, rotary(), QWEN_WINDOWS),
    MappingProxyType({"attention_bias": True, "attention_out_bias": False}),
)
QWEN3 = Family(
    "Qwen3ForCausalLM",
    "qwen3",
    names.LLAMA,
    (*common(False, 32768, 32), head_dim(128), bias()),
    (SILU, rotary(), QWEN_WINDOWS),
    MappingProxyType({"qk_norm": "head"}),
)
_GEMMA = MappingProxyType({"mlp": "geglu", "norm_offset": True, "embed_scale": True})
_GEMMA_TANH = choice("mlp", "hidden_activation", {"gelu_pytorch_tanh": "geglu", "gelu": "geglu", None: "geglu"}, None)
GEMMA = Family(
    "GemmaForCausalLM",
    "gemma",
    names.LLAMA,
    (*common(True, 8192, 16), head_dim(256), bias()),
    (
        # "gelu" in the first configs meant the tanh form all along
        choice("mlp", "hidden_act", {"gelu_pytorch_tanh": "geglu", "gelu": "geglu"}, "gelu_pytorch_tanh"),
        _GEMMA_TANH,
        rotary(),
    ),
    _GEMMA,
    MappingProxyType({"use_bidirectional_attention": None}),
)
GEMMA2 = Family(
    "Gemma2ForCausalLM",
    "gemma2",
    names.GEMMA2,
    (
        *common(True, 8192, 4),
        head_dim(256),
        bias(),
        key("attention_softcap", "attn_logit_softcapping", 50.0),
        key("logit_softcap", "final_logit_softcapping", 30.0),
    ),
    (_GEMMA_TANH, rotary(), GEMMA2_WINDOWS, _attention_scale("query_pre_attn_scalar", 256)),
    MappingProxyType({**_GEMMA, "post_norms": True}),
    MappingProxyType({"use_bidirectional_attention": None}),
)
GEMMA3 = Family(
    "Gemma3ForCausalLM",
    "gemma3_text",
    names.GEMMA2,
    (
        *common(True, 131072, 4),
        head_dim(256),
        bias(),
        key("attention_softcap", "attn_logit_softcapping", None),
        key("logit_softcap", "final_logit_softcapping", None),
    ),
    (_GEMMA_TANH, GEMMA3_ROTARY, GEMMA3_WINDOWS, _attention_scale("query_pre_attn_scalar", 256)),
    MappingProxyType({**_GEMMA, "post_norms": True, "qk_norm": "head"}),
    MappingProxyType({"use_bidirectional_attention": False}),
)
OLMO2 = Family(
    "Olmo2ForCausalLM",
    "olmo2",
    names.OLMO2,
    (*common(False, 2048, eps=1e-5), bias()),
    (SILU, rotary()),
    MappingProxyType({"qk_norm": "width", "pre_norms": False, "post_norms": True}),
)
STABLELM = Family(
    "StableLmForCausalLM",
    "stablelm",
    names.LLAMA,
    (
        *_layer_norm(common(False, 4096, 32)),
        bias(theirs="use_qkv_bias"),
        key("parallel", "use_parallel_residual", False),
    ),
    (SILU, rotary(fraction=0.25)),
    MappingProxyType({"norm": "layer", "norm_bias": True, "attention_out_bias": False}),
    MappingProxyType({"qk_layernorm": False}),
)
GPT_NEOX = Family(
    "GPTNeoXForCausalLM",
    "gpt_neox",
    names.GPT_NEOX,
    (*(row for row in _layer_norm(common(False, 2048)) if row.ours != "kv_heads"), bias(default=True)),
    (
        choice("mlp", "hidden_act", _GELU, "gelu"),
        rotary(fraction=0.25, old={"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}),
        Aspect(_read_residual, lambda arch: {"use_parallel_residual": arch.parallel}),
    ),
    _LAYER_NORM,
)
GPT2 = Family(
    "GPT2LMHeadModel",
    "gpt2",
    names.GPT2,
    (
        key("vocab_size", "vocab_size"),
        key("width", "n_embd"),
        key("layers", "n_layer"),
        key("heads", "n_head"),
        key("ffn", "n_inner", None),
        key("context", "n_positions", 1024, "n_ctx"),
        key("norm_eps", "layer_norm_epsilon", 1e-5),
        key("tied", "tie_word_embeddings", True),
        key("init_std", "initializer_range", 0.02),
    ),
    (choice("mlp", "activation_function", _GELU, "gelu_new"),),
    MappingProxyType({**_LAYER_NORM, "positions": "learned"}),
    MappingProxyType(
        {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
    ),
)
PHI = Family(
    "PhiForCausalLM",
    "phi",
    names.PHI,
    _layer_norm(common(False, 2048)),
    (choice("mlp", "hidden_act", _GELU, "gelu_new"), rotary(fraction=0.5)),
    MappingProxyType({**_LAYER_NORM, "parallel": True, "head_bias": True}),
    MappingProxyType({"qk_layernorm": False}),
)
PHI3 = Family(
    "Phi3ForCausalLM",
    "phi3",
    names.PHI3,
    common(False, 4096, eps=1e-5),
    (SILU, rotary(fraction=1.0, su="longrope"), window_everywhere(None)),
)


def _read_mpt(config: Config) -> Fields:
    attention = section(config, "attn_config")
    only = {"alibi": True, "alibi_bias_max": 8, "qk_ln": False, "prefix_lm": False}
    only |= {"attn_type": "multihead_attention", "kv_n_heads": None}
    if wrong := [
        f"attn_config.{n} is {attention[n]!r}" for n, value in only.items() if attention.get(n, value) != value
    ]:
        raise ValueError(f"{', '.join(wrong)}, which is not supported")
    clip = attention.get("clip_qkv") or None  # 0 is none, too
    return {"attention_scale": attention.get("softmax_scale"), "attention_clip": clip}


def _write_mpt(arch: Arch) -> dict[str, Any]:
    attention = {"softmax_scale": arch.attention_scale, "clip_qkv": arch.attention_clip}
    return {"attn_config": {"alibi": True, "alibi_bias_max": 8} | attention}


MPT = Family(
    "MptForCausalLM",
    "mpt",
    names.MPT,
    (
        key("vocab_size", "vocab_size"),
        key("width", "d_model"),
        key("layers", "n_layers"),
        key("heads", "n_heads"),
        key("context", "max_seq_len", 2048),
        key("norm_eps", "layer_norm_epsilon", 1e-5),
        key("tied", "tie_word_embeddings", True),
        key("init_std", "initializer_range", 0.02),
    ),
    (Aspect(_read_mpt, _write_mpt),),
    MappingProxyType({"norm": "layer", "mlp": "gelu", "positions": "alibi"}),
    # `transformers` computes with 4 whatever expansion_ratio says
    MappingProxyType({"no_bias": True, "logit_scale": None, "expansion_ratio": 4}),
)
BLOOM = Family(
    "BloomForCausalLM",
    "bloom",
    names.BLOOM,
    (
        key("vocab_size", "vocab_size"),
        Key("width", ("hidden_size", "n_embed")),
        Key("layers", ("n_layer", "num_hidden_layers")),
        Key("heads", ("n_head", "num_attention_heads")),
        key("context", "seq_length", 2048),
        key("norm_eps", "layer_norm_epsilon", 1e-5),
        key("tied", "tie_word_embeddings", True),
        key("init_std", "initializer_range", 0.02),
    ),
    (),
    MappingProxyType({**_LAYER_NORM, "positions": "alibi", "mlp": "gelu_tanh", "embed_norm": True}),
    MappingProxyType({"apply_residual_connection_post_layernorm": False}),
)
