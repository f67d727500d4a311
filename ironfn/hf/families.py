"""List the architectures of `transformers` that ironfn reads and writes."""

from __future__ import annotations

from ironfn.hf import dense, mixtures

FAMILIES = (
    dense.GPT2, dense.LLAMA, dense.MISTRAL, dense.QWEN2, dense.QWEN3, dense.GEMMA, dense.GEMMA2, dense.GEMMA3,
    dense.PHI, dense.PHI3, dense.MPT, dense.BLOOM, dense.GPT_NEOX, dense.STABLELM, dense.OLMO2,
    mixtures.MIXTRAL, mixtures.QWEN2_MOE, mixtures.QWEN3_MOE, mixtures.OLMOE, mixtures.GLM4_MOE,
)  # fmt: skip
"""In the order in which they are tried where a model does not say what it is."""
