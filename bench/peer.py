"""Build the `transformers` model of a shape of ours."""

from __future__ import annotations

from typing import Any

from ironfn.model.arch import Arch


def llama(arch: Arch) -> Any:
    """Return `transformers`' Llama of this shape with random weights; it attends by SDPA unless told otherwise."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=arch.vocab,
        hidden_size=arch.width,
        num_hidden_layers=arch.layers,
        num_attention_heads=arch.heads,
        num_key_value_heads=arch.kv_heads,
        intermediate_size=arch.ffn,
        max_position_embeddings=arch.context,
        tie_word_embeddings=arch.tied,
    )
    return LlamaForCausalLM(config)
