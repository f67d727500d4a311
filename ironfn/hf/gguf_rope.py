"""Read and write what a GGUF file says of stretched rotary angles: keys, and tensors of a factor for each pair."""

from __future__ import annotations

import math
from typing import Any

from ironfn.hf.config import Aspect, Config, Fields
from ironfn.model.arch import Arch
from ironfn.model.rope import attention_factor
from ironfn.spec.records import RopeSpec

FACTORS = ("rope_freqs", "rope_factors_long", "rope_factors_short")
"""The tensors that say by how much each pair is slowed down."""


def need(config: Config, name: str) -> Any:
    """Return a key's value. ValueError where it is missing."""
    if name not in config:
        raise ValueError(f"{name} is missing")
    return config[name]


def llama3_factors(rope: RopeSpec, theta: float, dim: int) -> list[float]:
    """Return by how much each pair is slowed down under Llama 3.1's stretching: what ``rope_freqs.weight`` holds."""
    found: list[float] = []
    for i in range(0, dim, 2):
        turns = (rope.original_context or 0) / (2 * math.pi * theta ** (i / dim))
        part = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        part = min(1.0, max(0.0, part))
        found.append(1 / ((1 - part) / rope.factor + part))
    return found


def _read_stretch(config: Config) -> Fields:
    factors = config.get("rope_freqs")
    kind = config.get("rope.scaling.type", "none")
    original = config.get("rope.scaling.original_context_length")
    if factors is not None:
        # a file gives the factors alone: find the numbers of which they were made
        dim, theta = 2 * len(factors), config.get("rope.freq_base", 10000.0)
        rope = RopeSpec("llama3", round(max(factors), 4), original or 8192)
        if any(abs(a - b) > 1e-4 * b for a, b in zip(factors, llama3_factors(rope, theta, dim), strict=True)):
            raise ValueError("rope_freqs.weight does not hold the factors of Llama 3's stretched rotation")
        return {"rope.kind": "llama3", "rope.factor": rope.factor, "rope.original_context": rope.original_context}
    if kind == "none" and "rope_factors_long" not in config:
        return {}
    if kind == "linear":
        return {"rope.kind": kind, "rope.factor": need(config, "rope.scaling.factor")}
    if kind == "yarn":
        return {
            "rope.kind": kind,
            "rope.factor": need(config, "rope.scaling.factor"),
            "rope.original_context": original,
        }
    raise ValueError(f"a rotation stretched as {kind} with rope factors is not supported")


def _write_stretch(arch: Arch) -> dict[str, Any]:
    rope = arch.rope
    if rope.kind == "llama3":
        return {
            "rope_freqs": llama3_factors(rope, arch.rope_theta, arch.rotary_dim),
            "rope.scaling.original_context_length": rope.original_context,
        }
    if rope.kind not in ("linear", "yarn"):
        return {}
    found: dict[str, Any] = {"rope.scaling.type": rope.kind, "rope.scaling.factor": rope.factor}
    return found | ({"rope.scaling.original_context_length": rope.original_context} if rope.kind == "yarn" else {})


STRETCH = Aspect(_read_stretch, _write_stretch)


def _read_longrope(config: Config) -> Fields:
    if not any(name in config for name in FACTORS[1:]):
        return _read_stretch(config)
    context, original = need(config, "context_length"), need(config, "rope.scaling.original_context_length")
    if type(original) is not int or original < 2:
        raise ValueError(f"rope.scaling.original_context_length is {original!r}")
    factor = context / original
    fields: Fields = {"rope.kind": "longrope", "rope.factor": factor, "rope.original_context": original}
    fields |= {f"rope.{size}_factor": need(config, f"rope_factors_{size}") for size in ("short", "long")}
    usual = attention_factor(RopeSpec("longrope", factor), original)
    told = config.get("rope.scaling.attn_factor", 1.0)
    return fields | ({} if abs(told - usual) <= 1e-6 * usual else {"rope.attention_factor": told})


def _write_longrope(arch: Arch) -> dict[str, Any]:
    rope = arch.rope
    if rope.kind != "longrope":
        return _write_stretch(arch)
    original = rope.original_context or arch.context
    return {
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": attention_factor(rope, original),
        "rope_factors_long": rope.long_factor,
        "rope_factors_short": rope.short_factor,
    }


LONGROPE = Aspect(_read_longrope, _write_longrope)
"""Phi-3's, which may be LongRoPE (Ding et al. 2024, arXiv 2402.13753); `Phi3MiniModel` of `convert_hf_to_gguf.py`."""
