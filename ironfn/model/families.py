"""List the families: what each one fixes, as plain values beneath the fields of a model spec."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

from ironfn.model.sizes import SIZES
from ironfn.spec.records import ModelSpec, MoeSpec, RopeSpec

Preset = Mapping[str, object]


def _family(base: Preset = MappingProxyType({}), **fields: object) -> Preset:
    return MappingProxyType(dict(base) | fields)


LLAMA = _family(
    norm="rms", norm_eps=1e-5, positions="rotary", rope_theta=10000.0, mlp="swiglu",
    attention_bias=False, mlp_bias=False, norm_bias=False,
)  # fmt: skip
"""Touvron et al. 2023, arXiv 2302.13971."""

_FREE = _family(LLAMA, tied=False)
_QWEN = _family(LLAMA, norm_eps=1e-6, rope_theta=1e6)
_ALL_BIASES: Preset = MappingProxyType({"attention_bias": True, "mlp_bias": True, "norm_bias": True})

GPT2 = _family(_ALL_BIASES, norm="layer", norm_eps=1e-5, positions="learned", mlp="gelu_tanh", tied=True)
"""Radford et al. 2019; the values of `openai-community/gpt2`."""

_PHI = _family(
    _ALL_BIASES, norm="layer", norm_eps=1e-5, positions="rotary", rope_theta=10000.0, rope_fraction=0.5,
    parallel=True, mlp="gelu_tanh", head_bias=True, tied=False, context=2048,
)  # fmt: skip
_GEMMA = _family(LLAMA, norm_eps=1e-6, norm_offset=True, embed_scale=True, mlp="geglu", tied=True, context=8192)

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "llama": LLAMA,
        "llama2": _family(_FREE, context=4096),
        "llama3": _family(_FREE, rope_theta=5e5, context=8192),
        "llama3.1": _family(
            _FREE, rope_theta=5e5, context=131072, rope={"kind": "llama3", "factor": 8.0, "original_context": 8192}
        ),
        "llama3.2": _family(
            LLAMA, rope_theta=5e5, context=131072, rope={"kind": "llama3", "factor": 32.0, "original_context": 8192}
        ),
        "mistral": _family(_FREE, windows=[4096], context=32768),
        "qwen2": _family(_QWEN, attention_bias=True, attention_out_bias=False, context=32768),
        "qwen2.5": _family(_QWEN, attention_bias=True, attention_out_bias=False, context=32768),
        "qwen3": _family(_QWEN, qk_norm="head", context=40960),
        "gemma": _GEMMA,
        "gemma2": _family(_GEMMA, post_norms=True, windows=[4096, 0], attention_softcap=50.0, logit_softcap=30.0),
        "gemma3": _family(
            _GEMMA, post_norms=True, windows=[1024] * 5 + [0], qk_norm="head", rope_theta=1e6, rope_local_theta=1e4,
            context=131072, rope={"kind": "linear", "factor": 8.0},
        ),
        "phi": _PHI,
        "phi3": _family(_FREE, windows=[2047], context=4096),
        "gpt-neox": _family(
            _ALL_BIASES, norm="layer", norm_eps=1e-5, positions="rotary", rope_theta=10000.0, rope_fraction=0.25,
            parallel=True, parallel_norms=True, mlp="gelu", tied=False, context=2048,
        ),
        "stablelm": _family(_FREE, norm="layer", norm_bias=True, rope_fraction=0.25, context=4096),
        "olmo2": _family(
            _FREE, norm_eps=1e-6, rope_theta=5e5, pre_norms=False, post_norms=True, qk_norm="width", context=4096
        ),
        "gpt2": GPT2,
        "gpt3": _family(GPT2, context=2048),
        "mpt": _family(
            norm="layer", norm_eps=1e-5, positions="alibi", mlp="gelu", tied=True, context=2048,
            attention_bias=False, mlp_bias=False, norm_bias=False,
        ),
        "bloom": _family(
            _ALL_BIASES, norm="layer", norm_eps=1e-5, positions="alibi", mlp="gelu_tanh", embed_norm=True, tied=True,
            context=2048,
        ),
        "mixtral": _family(
            _FREE, rope_theta=1e6, context=32768, moe={"experts": 8, "top_k": 2, "score": "softmax_chosen"}
        ),
        "qwen2-moe": _family(
            _QWEN, attention_bias=True, attention_out_bias=False, tied=False, context=8192,
            moe={"experts": 60, "top_k": 4, "renormalize": False, "shared": 1, "shared_gate": True},
        ),
        "qwen3-moe": _family(
            _QWEN, qk_norm="head", tied=False, context=40960, moe={"experts": 128, "top_k": 8, "balance_weight": 1e-3}
        ),
        "olmoe": _family(
            _FREE, qk_norm="width", context=4096, moe={"experts": 64, "top_k": 8, "renormalize": False}
        ),
        "deepseek-v3": _family(
            _FREE, norm_eps=1e-6, context=4096,
            moe={
                "experts": 256, "top_k": 8, "shared": 1, "dense_layers": 3, "score": "sigmoid", "scale": 2.5,
                "groups": 8, "group_top_k": 4, "bias_rate": 1e-3, "balance_weight": 1e-4,
            },
        ),
    }
)  # fmt: skip
"""From the name of a family to its values. `deepseek-v3` is the routing of arXiv 2412.19437 over plain attention."""


def _over(base: Preset, fields: Preset) -> Preset:
    """Lay fields over a preset's; the dicts of ``moe`` and ``rope`` are joined, too."""
    joined = {
        name: dict(cast(Preset, base.get(name, {}))) | dict(cast(Preset, value))
        if isinstance(value, Mapping)
        else value
        for name, value in fields.items()
    }
    return MappingProxyType(dict(base) | joined)


NAMED: Mapping[str, Preset] = MappingProxyType(
    dict(PRESETS) | {name: _over(PRESETS[family], fields) for name, (family, fields) in SIZES.items()}
)
"""All that ``model.preset`` may name: the families, and the models that `sizes` describes."""

_RECORDS: Mapping[str, Any] = MappingProxyType({"moe": MoeSpec, "rope": RopeSpec})


def model_spec(preset: str, **fields: Any) -> ModelSpec:
    """Return the spec of a family or a named model, with these fields in place of its own.

    moe, rope: a record, or a dict of values to lay over the preset's. KeyError for a preset that does not exist.

    >>> model_spec("mixtral", width=64, moe={"experts": 4}).moe.top_k
    2
    """
    known: dict[str, Any] = dict(_over(NAMED[preset], fields))
    for name, record in _RECORDS.items():
        if isinstance(known.get(name), Mapping):
            known[name] = record(**known[name])
    return ModelSpec(preset=preset, **known)
