"""Describe the mixtures of experts of `transformers`, a table of keys and names each."""

from __future__ import annotations

import itertools
from types import MappingProxyType
from typing import Any

from ironfn.hf import names
from ironfn.hf.config import Aspect, Config, Family, Fields, Key, choice, key
from ironfn.hf.dense import SILU, bias, common, head_dim
from ironfn.hf.rope import QWEN_WINDOWS, rotary, window_everywhere
from ironfn.model.arch import Arch


def _dense_layers(config: Config) -> Fields:
    dense = config.get("mlp_only_layers") or []
    first = next(n for n in itertools.count() if n not in dense)
    return {"moe.dense_layers": first, "moe.dense_at": [n for n in dense if type(n) is not int or n >= first]}


def _write_dense_layers(arch: Arch) -> dict[str, Any]:
    moe = arch.moe
    return {"mlp_only_layers": [] if moe is None else [*range(moe.dense_layers), *moe.dense_at]}


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

MIXTRAL = Family(
    "MixtralForCausalLM",
    "mixtral",
    names.MIXTRAL,
    (
        *common(False, 131072, 8, 1e-5),
        head_dim(None),
        *_moe(("num_local_experts", "num_experts"), None, 2, 0.001),
        key("moe.jitter", "router_jitter_noise", 0.0),
    ),
    (SILU, rotary(1_000_000.0), window_everywhere(None)),
    MappingProxyType({"moe.renormalize": True}),
)
QWEN2_MOE = Family(
    "Qwen2MoeForCausalLM",
    "qwen2_moe",
    names.QWEN_MOE,
    (
        *common(False, 32768, 16),
        *_moe(("num_experts",), "moe_intermediate_size", 4, 0.001),
        *_QWEN_MOE_KEYS,
        key("moe.shared_ffn", "shared_expert_intermediate_size"),
        bias(theirs="qkv_bias", default=True),
    ),
    (SILU, rotary(), QWEN_WINDOWS, _DENSE_LAYERS),
    MappingProxyType({"attention_out_bias": False, "moe.shared": 1, "moe.shared_gate": True}),
)
QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    names.QWEN_MOE,
    (
        *common(False, 32768, 4),
        head_dim(None),
        *_moe(("num_experts", "num_local_experts"), "moe_intermediate_size", 8, 0.001),
        *_QWEN_MOE_KEYS,
        bias(),
    ),
    (SILU, rotary(), _DENSE_LAYERS),
    MappingProxyType({"qk_norm": "head"}),
    MappingProxyType({"use_sliding_window": False}),
)
OLMOE = Family(
    "OlmoeForCausalLM",
    "olmoe",
    names.QWEN_MOE,
    (
        *common(False, 4096, eps=1e-5),
        *_moe(("num_experts",), None, 8, 0.01),
        key("moe.renormalize", "norm_topk_prob", False),
        key("attention_clip", "clip_qkv", None),
        bias(),
    ),
    (SILU, rotary()),
    MappingProxyType({"qk_norm": "width"}),
)
GLM4_MOE = Family(
    "Glm4MoeForCausalLM",
    "glm4_moe",
    names.GLM_MOE,
    (
        *common(False, 131072, 8, 1e-5),
        head_dim(None),
        key("moe.experts", "n_routed_experts"),
        key("moe.top_k", "num_experts_per_tok", 8),
        key("moe.ffn", "moe_intermediate_size"),
        key("moe.shared", "n_shared_experts", 1),
        key("moe.scale", "routed_scaling_factor", 1.0),
        key("moe.groups", "n_group", 1),
        key("moe.group_top_k", "topk_group", 1),
        key("moe.dense_layers", "first_k_dense_replace", 1),
        key("moe.renormalize", "norm_topk_prob", True),
        bias(),
    ),
    (SILU, rotary(fraction=0.5), choice("qk_norm", "use_qk_norm", {False: "none", True: "head"}, False)),
    # how fast the biases move is not told; DeepSeek-V3's rate
    MappingProxyType({"attention_out_bias": False, "moe.score": "sigmoid", "moe.bias_rate": 0.001}),
    bias=True,
)
