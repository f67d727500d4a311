"""List the architectures of `transformers` that ironfn reads and writes."""

from __future__ import annotations

from ironfn.hf.dense import BLOOM, GEMMA, GEMMA2, GEMMA3, GPT2, LLAMA, MISTRAL, MPT, PHI, PHI3, QWEN2, QWEN3
from ironfn.hf.mixtures import GLM4_MOE, MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE

FAMILIES = (
    GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, PHI, PHI3, MPT, BLOOM,
    MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, GLM4_MOE,
)  # fmt: skip
"""In the order in which they are tried where a model does not say what it is."""
