"""List the architectures of `transformers` that ironfn reads and writes, a table of keys and names each."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from ironfn.hf import names
from ironfn.hf.config import Aspect, Config, Family, Fields, Key, choice, key
from ironfn.hf.rope import (
    GEMMA2_WINDOWS,
    GEMMA3_ROTARY,
    GEMMA3_WINDOWS,
    QWEN_WINDOWS,
    rotary,
    window_everywhere,
)
from ironfn.model.arch import Arch

_SILU = choice("mlp", "hidden_act", {"silu": "swiglu", "swish": "swiglu"}, "silu")
_GELU = MappingProxyType(
    {"gelu_new": "gelu_tanh", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}
)
_LAYER_NORM = MappingProxyType(
    {"norm": "layer", "norm_bias": True, "attention_bias": True, "mlp_bias": True, "positions": "rotary"}
)


def _common(tied: bool, context: int, kv_heads: int | None = None, eps: float = 1e-6) -> tuple[Key, ...]:
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


def _head_dim(default: int | None) -> Key:
    return key("head_dim", "head_dim", default)


def _bias(ours: str = "attention_bias", theirs: str = "attention_bias", default: bool = False) -> Key:
    return key(ours, theirs, default)


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


def _dense_layers(config: Config) -> Fields:
    dense = config.get("mlp_only_layers") or []
    if dense != list(range(len(dense))):
        raise ValueError(f"mlp_only_layers is {dense!r}, and only the first layers can be without experts")
    return {"moe.dense_layers": len(dense)}


def _write_dense_layers(arch: Arch) -> dict[str, Any]:
    return {"mlp_only_layers": list(range(0 if arch.moe is None else arch.moe.dense_layers))}


def _moe(count: tuple[str, ...], ffn: str | None, top_k: int, aux: float) -> tuple[Key, ...]:
    """Return the keys of a mixture. count, ffn: what the number of experts and the width of one are called."""
    return (
        Key("moe.experts", count),
        key("moe.top_k", "num_experts_per_tok", top_k),
        key("moe.balance_weight", "router_aux_loss_coef", aux),
        *((key("moe.ffn", ffn),) if ffn else ()),
    )


_QWEN_MOE_KEYS = (key("moe.renormalize", "norm_topk_prob", False), key("moe.every", "decoder_sparse_step", 1))
_DENSE_LAYERS = Aspect(_dense_layers, _write_dense_layers)

LLAMA = Family(
    "LlamaForCausalLM",
    "llama",
    names.LLAMA,
    (*_common(False, 2048), _head_dim(None), _bias(), _bias("mlp_bias", "mlp_bias")),
    (_SILU, rotary()),
)
MISTRAL = Family(
    "MistralForCausalLM",
    "mistral",
    names.LLAMA,
    (*_common(False, 131072, 8), _head_dim(None)),
    (_SILU, rotary(), window_everywhere(4096)),
)
QWEN2 = Family(
    "Qwen2ForCausalLM",
    "qwen2",
    names.LLAMA,
    _common(False, 32768, 32),
    (_SILU, rotary(), QWEN_WINDOWS),
    MappingProxyType({"attention_bias": True, "attention_out_bias": False}),
)
QWEN3 = Family(
    "Qwen3ForCausalLM",
    "qwen3",
    names.LLAMA,
    (*_common(False, 32768, 32), _head_dim(128), _bias()),
    (_SILU, rotary(), QWEN_WINDOWS),
    MappingProxyType({"qk_norm": "head"}),
)
_GEMMA = MappingProxyType({"mlp": "geglu", "norm_offset": True, "embed_scale": True})
_GEMMA_TANH = choice("mlp", "hidden_activation", {"gelu_pytorch_tanh": "geglu", "gelu": "geglu", None: "geglu"}, None)
GEMMA = Family(
    "GemmaForCausalLM",
    "gemma",
    names.LLAMA,
    (*_common(True, 8192, 16), _head_dim(256), _bias()),
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
        *_common(True, 8192, 4),
        _head_dim(256),
        _bias(),
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
        *_common(True, 131072, 4),
        _head_dim(256),
        _bias(),
        key("attention_softcap", "attn_logit_softcapping", None),
        key("logit_softcap", "final_logit_softcapping", None),
    ),
    (_GEMMA_TANH, GEMMA3_ROTARY, GEMMA3_WINDOWS, _attention_scale("query_pre_attn_scalar", 256)),
    MappingProxyType({**_GEMMA, "post_norms": True, "qk_norm": "head"}),
    MappingProxyType({"use_bidirectional_attention": False}),
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
    (
        *(row for row in _common(False, 2048) if row.ours != "norm_eps"),
        key("norm_eps", "layer_norm_eps", 1e-5),
    ),
    (choice("mlp", "hidden_act", _GELU, "gelu_new"), rotary(fraction=0.5)),
    MappingProxyType({**_LAYER_NORM, "parallel": True, "head_bias": True}),
    MappingProxyType({"qk_layernorm": False}),
)
PHI3 = Family(
    "Phi3ForCausalLM",
    "phi3",
    names.PHI3,
    _common(False, 4096, eps=1e-5),
    (_SILU, rotary(fraction=1.0, su="longrope"), window_everywhere(None)),
)


def _read_mpt(config: Config) -> Fields:
    attention = config.get("attn_config") or {}
    only = {"alibi": True, "alibi_bias_max": 8, "qk_ln": False, "clip_qkv": None, "prefix_lm": False}
    only |= {"attn_type": "multihead_attention", "kv_n_heads": None}
    if wrong := [
        f"attn_config.{n} is {attention[n]!r}" for n, value in only.items() if attention.get(n, value) != value
    ]:
        raise ValueError(f"{', '.join(wrong)}, which is not supported")
    return {"attention_scale": attention.get("softmax_scale")}


def _write_mpt(arch: Arch) -> dict[str, Any]:
    return {"attn_config": {"alibi": True, "alibi_bias_max": 8, "softmax_scale": arch.attention_scale}}


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
MIXTRAL = Family(
    "MixtralForCausalLM",
    "mixtral",
    names.MIXTRAL,
    (
        *_common(False, 131072, 8, 1e-5),
        _head_dim(None),
        *_moe(("num_local_experts", "num_experts"), None, 2, 0.001),
        key("moe.jitter", "router_jitter_noise", 0.0),
    ),
    (_SILU, rotary(1_000_000.0), window_everywhere(None)),
    MappingProxyType({"moe.renormalize": True}),
)
QWEN2_MOE = Family(
    "Qwen2MoeForCausalLM",
    "qwen2_moe",
    names.QWEN_MOE,
    (
        *_common(False, 32768, 16),
        *_moe(("num_experts",), "moe_intermediate_size", 4, 0.001),
        *_QWEN_MOE_KEYS,
        key("moe.shared_ffn", "shared_expert_intermediate_size"),
        _bias(theirs="qkv_bias", default=True),
    ),
    (_SILU, rotary(), QWEN_WINDOWS, _DENSE_LAYERS),
    MappingProxyType({"attention_out_bias": False, "moe.shared": 1, "moe.shared_gate": True}),
)
QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    names.QWEN_MOE,
    (
        *_common(False, 32768, 4),
        _head_dim(None),
        *_moe(("num_experts", "num_local_experts"), "moe_intermediate_size", 8, 0.001),
        *_QWEN_MOE_KEYS,
        _bias(),
    ),
    (_SILU, rotary(), _DENSE_LAYERS),
    MappingProxyType({"qk_norm": "head"}),
    MappingProxyType({"use_sliding_window": False}),
)
OLMOE = Family(
    "OlmoeForCausalLM",
    "olmoe",
    names.QWEN_MOE,
    (
        *_common(False, 4096, eps=1e-5),
        *_moe(("num_experts",), None, 8, 0.01),
        key("moe.renormalize", "norm_topk_prob", False),
        _bias(),
    ),
    (_SILU, rotary()),
    MappingProxyType({"qk_norm": "width"}),
    MappingProxyType({"clip_qkv": None}),
)
FAMILIES = (
    GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, PHI, PHI3, MPT, BLOOM,
    MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE,
)  # fmt: skip
"""In the order in which they are tried where a model does not say what it is."""
