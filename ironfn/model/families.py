"""List the families: what each one fixes, as plain values beneath the fields of a model spec."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

LLAMA: Mapping[str, object] = MappingProxyType(
    {
        "norm": "rms",
        "norm_eps": 1e-5,
        "positions": "rotary",
        "rope_theta": 10000.0,
        "mlp": "swiglu",
        "attention_bias": False,
        "mlp_bias": False,
        "norm_bias": False,
    }
)
"""Touvron et al. 2023, arXiv 2302.13971."""

GPT2: Mapping[str, object] = MappingProxyType(
    {
        "norm": "layer",
        "norm_eps": 1e-5,
        "positions": "learned",
        "mlp": "gelu_tanh",
        "attention_bias": True,
        "mlp_bias": True,
        "norm_bias": True,
        "tied": True,
    }
)
"""Radford et al. 2019; the values of `openai-community/gpt2`."""

PRESETS: Mapping[str, Mapping[str, object]] = MappingProxyType({"llama": LLAMA, "gpt2": GPT2})
