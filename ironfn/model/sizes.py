"""List published models by name: the family each belongs to, and its numbers.

The numbers are those of the models' own config files; `tests/test_sizes.py` counts every one to its published size.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

Size = tuple[str, Mapping[str, object]]


def _of(family: str, vocab: int, width: int, layers: int, heads: int, kv: int, ffn: int | None, **more: Any) -> Size:
    fields = {"vocab_size": vocab, "width": width, "layers": layers, "heads": heads, "kv_heads": kv, "ffn": ffn}
    return family, MappingProxyType(fields | more)


def _gpt(family: str, width: int, layers: int, heads: int) -> Size:
    return _of(family, 50257, width, layers, heads, heads, None, context=1024 if family == "gpt2" else 2048)


def _llama1(width: int, layers: int, heads: int, ffn: int) -> Size:
    return _of("llama", 32000, width, layers, heads, heads, ffn, norm_eps=1e-6, tied=False, context=2048)


def _neox(vocab: int, width: int, layers: int, heads: int) -> Size:
    return _of("gpt-neox", vocab, width, layers, heads, heads, 4 * width)


def _smol(width: int, layers: int, heads: int, kv: int, ffn: int, **more: Any) -> Size:
    return _of("llama", 49152, width, layers, heads, kv, ffn, context=8192, tied=True, **more)


SIZES: Mapping[str, Size] = MappingProxyType(
    {
        "gpt2-small": _gpt("gpt2", 768, 12, 12),
        "gpt2-medium": _gpt("gpt2", 1024, 24, 16),
        "gpt2-large": _gpt("gpt2", 1280, 36, 20),
        "gpt2-xl": _gpt("gpt2", 1600, 48, 25),
        "gpt3-small": _gpt("gpt3", 768, 12, 12),
        "gpt3-medium": _gpt("gpt3", 1024, 24, 16),
        "gpt3-large": _gpt("gpt3", 1536, 24, 16),
        "gpt3-xl": _gpt("gpt3", 2048, 24, 16),
        "gpt3-2.7b": _gpt("gpt3", 2560, 32, 32),
        "gpt3-6.7b": _gpt("gpt3", 4096, 32, 32),
        "gpt3-13b": _gpt("gpt3", 5120, 40, 40),
        "gpt3-175b": _gpt("gpt3", 12288, 96, 96),
        "llama-7b": _llama1(4096, 32, 32, 11008),
        "llama-13b": _llama1(5120, 40, 40, 13824),
        "llama-30b": _llama1(6656, 60, 52, 17920),
        "llama-65b": _llama1(8192, 80, 64, 22016),
        "llama2-7b": _of("llama2", 32000, 4096, 32, 32, 32, 11008),
        "llama2-13b": _of("llama2", 32000, 5120, 40, 40, 40, 13824),
        "llama2-70b": _of("llama2", 32000, 8192, 80, 64, 8, 28672),
        "llama3-8b": _of("llama3", 128256, 4096, 32, 32, 8, 14336),
        "llama3-70b": _of("llama3", 128256, 8192, 80, 64, 8, 28672),
        "llama3.1-8b": _of("llama3.1", 128256, 4096, 32, 32, 8, 14336),
        "llama3.1-70b": _of("llama3.1", 128256, 8192, 80, 64, 8, 28672),
        "llama3.2-1b": _of("llama3.2", 128256, 2048, 16, 32, 8, 8192, head_dim=64),
        "llama3.2-3b": _of("llama3.2", 128256, 3072, 28, 24, 8, 8192, head_dim=128),
        "smollm2-135m": _smol(576, 30, 9, 3, 1536, rope_theta=1e5),
        "smollm2-360m": _smol(960, 32, 15, 5, 2560, rope_theta=1e5),
        "smollm2-1.7b": _smol(2048, 24, 32, 32, 8192, rope_theta=13e4),
        "mistral-7b": _of("mistral", 32000, 4096, 32, 32, 8, 14336),
        "qwen2.5-0.5b": _of("qwen2.5", 151936, 896, 24, 14, 2, 4864, tied=True),
        "qwen2.5-1.5b": _of("qwen2.5", 151936, 1536, 28, 12, 2, 8960, tied=True),
        "qwen2.5-3b": _of("qwen2.5", 151936, 2048, 36, 16, 2, 11008, tied=True),
        "qwen2.5-7b": _of("qwen2.5", 152064, 3584, 28, 28, 4, 18944, tied=False),
        "qwen2.5-14b": _of("qwen2.5", 152064, 5120, 48, 40, 8, 13824, tied=False),
        "qwen2.5-32b": _of("qwen2.5", 152064, 5120, 64, 40, 8, 27648, tied=False),
        "qwen2.5-72b": _of("qwen2.5", 152064, 8192, 80, 64, 8, 29568, tied=False),
        "qwen3-0.6b": _of("qwen3", 151936, 1024, 28, 16, 8, 3072, head_dim=128, tied=True),
        "qwen3-1.7b": _of("qwen3", 151936, 2048, 28, 16, 8, 6144, head_dim=128, tied=True),
        "qwen3-4b": _of("qwen3", 151936, 2560, 36, 32, 8, 9728, head_dim=128, tied=True),
        "qwen3-8b": _of("qwen3", 151936, 4096, 36, 32, 8, 12288, head_dim=128, tied=False),
        "qwen3-14b": _of("qwen3", 151936, 5120, 40, 40, 8, 17408, head_dim=128, tied=False),
        "qwen3-32b": _of("qwen3", 151936, 5120, 64, 64, 8, 25600, head_dim=128, tied=False),
        "gemma-2b": _of("gemma", 256000, 2048, 18, 8, 1, 16384, head_dim=256),
        "gemma-7b": _of("gemma", 256000, 3072, 28, 16, 16, 24576, head_dim=256),
        "gemma2-2b": _of("gemma2", 256000, 2304, 26, 8, 4, 9216, head_dim=256),
        "gemma2-9b": _of("gemma2", 256000, 3584, 42, 16, 8, 14336, head_dim=256),
        "gemma2-27b": _of("gemma2", 256000, 4608, 46, 32, 16, 36864, head_dim=128, attention_scale=144**-0.5),
        "gemma3-1b": _of(
            "gemma3", 262144, 1152, 26, 4, 1, 6912, head_dim=256, windows=[512] * 5 + [0], context=32768,
            rope={"kind": "none", "factor": 1.0},
        ),
        "gemma3-4b": _of("gemma3", 262208, 2560, 34, 8, 4, 10240, head_dim=256),
        "gemma3-12b": _of("gemma3", 262208, 3840, 48, 16, 8, 15360, head_dim=256),
        "phi-1": _of("phi", 51200, 2048, 24, 32, 32, 8192),
        "phi-1.5": _of("phi", 51200, 2048, 24, 32, 32, 8192),
        "phi-2": _of("phi", 51200, 2560, 32, 32, 32, 10240, rope_fraction=0.4),
        "phi3-mini": _of("phi3", 32064, 3072, 32, 32, 32, 8192),
        "pythia-70m": _neox(50304, 512, 6, 8),
        "pythia-160m": _neox(50304, 768, 12, 12),
        "pythia-410m": _neox(50304, 1024, 24, 16),
        "pythia-1b": _neox(50304, 2048, 16, 8),
        "pythia-1.4b": _neox(50304, 2048, 24, 16),
        "pythia-2.8b": _neox(50304, 2560, 32, 32),
        "pythia-6.9b": _neox(50432, 4096, 32, 32),
        "pythia-12b": _neox(50688, 5120, 36, 40),
        "gpt-neox-20b": _neox(50432, 6144, 44, 64),
        "stablelm-3b": _of("stablelm", 50304, 2560, 32, 32, 32, 6912),
        "olmo2-1b": _of("olmo2", 100352, 2048, 16, 16, 16, 8192),
        "olmo2-7b": _of("olmo2", 100352, 4096, 32, 32, 32, 11008),
        "olmo2-13b": _of("olmo2", 100352, 5120, 40, 40, 40, 13824),
        "mpt-7b": _of("mpt", 50432, 4096, 32, 32, 32, 16384),
        "mpt-30b": _of("mpt", 50432, 7168, 48, 64, 64, 28672, context=8192),
        "bloom-560m": _of("bloom", 250880, 1024, 24, 16, 16, 4096),
        "bloom-1b7": _of("bloom", 250880, 2048, 24, 16, 16, 8192),
        "bloom-7b1": _of("bloom", 250880, 4096, 30, 32, 32, 16384),
        "bloom-176b": _of("bloom", 250880, 14336, 70, 112, 112, 57344),
        "mixtral-8x7b": _of("mixtral", 32000, 4096, 32, 32, 8, 14336),
        "mixtral-8x22b": _of("mixtral", 32768, 6144, 56, 48, 8, 16384, context=65536),
        "qwen1.5-moe-a2.7b": _of(
            "qwen2-moe", 151936, 2048, 24, 16, 16, 5632, moe={"ffn": 1408, "shared_ffn": 5632}
        ),
        "qwen3-30b-a3b": _of("qwen3-moe", 151936, 2048, 48, 32, 4, 6144, head_dim=128, moe={"ffn": 768}),
        "olmoe-1b-7b": _of("olmoe", 50304, 2048, 16, 16, 16, 1024),
    }
)  # fmt: skip
"""From the name of a model to its family and what it fixes there; ``moe`` and ``rope`` lie over the family's."""
