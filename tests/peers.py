"""Build small `transformers` models and copy their weights into our layout: an independent reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from ironfn import tree
from ironfn.model.arch import Arch, complete
from ironfn.model.families import model_spec
from ironfn.types import Params


def make_arch(preset: str, vocab: int, **fields: Any) -> Arch:
    """Return a small architecture of a family."""
    small: dict[str, Any] = {"width": 48, "layers": 2, "heads": 4, "ffn": 80, "context": 64}
    return complete(model_spec(preset, **(small | fields)), vocab)


def llama(arch: Arch, seed: int = 0, attention: str = "eager") -> tuple[LlamaForCausalLM, Params]:
    """Return a random Llama of this architecture and its weights as our tree."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=arch.vocab,
        hidden_size=arch.width,
        num_hidden_layers=arch.layers,
        num_attention_heads=arch.heads,
        num_key_value_heads=arch.kv_heads,
        head_dim=arch.head_dim,
        intermediate_size=arch.ffn,
        max_position_embeddings=arch.context,
        rms_norm_eps=arch.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": arch.rope_theta},
        tie_word_embeddings=arch.tied,
        attention_bias=arch.attention_bias,
        mlp_bias=arch.mlp_bias,
        attn_implementation=attention,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                weight.add_(torch.randn_like(weight) * 0.1)
    return model, llama_tree(model, arch)


LLAMA_NAMES = (
    ("norm1/scale", "input_layernorm.weight", False),
    ("norm2/scale", "post_attention_layernorm.weight", False),
    *((f"attn/w{n}", f"self_attn.{n}_proj.weight", True) for n in "qkvo"),
    *((f"attn/b{n}", f"self_attn.{n}_proj.bias", False) for n in "qkvo"),
    *((f"mlp/w_{n}", f"mlp.{n}_proj.weight", True) for n in ("gate", "up", "down")),
    *((f"mlp/b_{n}", f"mlp.{n}_proj.bias", False) for n in ("gate", "up", "down")),
)


def llama_tree(model: LlamaForCausalLM, arch: Arch, of: str = "data") -> Params:
    """Return the weights (``of="grad"``: the gradients) of a Llama as our tree."""
    theirs: dict[str, Tensor] = {n: getattr(p, of).detach().clone() for n, p in model.named_parameters()}
    flat = {"embed/tokens": theirs["model.embed_tokens.weight"], "norm/scale": theirs["model.norm.weight"]}
    for layer in range(arch.layers):
        for ours, name, transposed in LLAMA_NAMES:
            if (weight := theirs.get(f"model.layers.{layer}.{name}")) is not None:
                flat[f"blocks/{layer}/{ours}"] = weight.t().contiguous() if transposed else weight
    if not arch.tied:
        flat["head/w"] = theirs["lm_head.weight"]
    return tree.unflatten(flat)


GPT2_NAMES = (
    *((f"norm{i}/{ours}", f"ln_{i}.{name}") for i in (1, 2) for ours, name in (("scale", "weight"), ("bias", "bias"))),
    ("attn/wo", "attn.c_proj.weight"),
    ("attn/bo", "attn.c_proj.bias"),
    ("mlp/w_up", "mlp.c_fc.weight"),
    ("mlp/b_up", "mlp.c_fc.bias"),
    ("mlp/w_down", "mlp.c_proj.weight"),
    ("mlp/b_down", "mlp.c_proj.bias"),
)


def gpt2(arch: Arch, seed: int = 0, attention: str = "eager") -> tuple[GPT2LMHeadModel, Params]:
    """Return a random GPT-2 of this architecture and its weights as our tree."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=arch.vocab,
        n_embd=arch.width,
        n_layer=arch.layers,
        n_head=arch.heads,
        n_inner=arch.ffn,
        n_positions=arch.context,
        layer_norm_epsilon=arch.norm_eps,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        attn_implementation=attention,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "ln_" in name or name.endswith("bias"):
                weight.add_(torch.randn_like(weight) * 0.1)
    return model, gpt2_tree(model, arch)


def gpt2_tree(model: GPT2LMHeadModel, arch: Arch, of: str = "data") -> Params:
    """Return the weights (``of="grad"``: the gradients) of a GPT-2 as our tree; c_attn holds q, k, v side by side."""
    theirs: dict[str, Tensor] = {n: getattr(p, of).detach().clone() for n, p in model.named_parameters()}
    flat = {"embed/tokens": theirs["transformer.wte.weight"], "embed/positions": theirs["transformer.wpe.weight"]}
    for layer in range(arch.layers):
        prefix, block = f"transformer.h.{layer}.", f"blocks/{layer}/"
        for kind, name in (("w", "weight"), ("b", "bias")):
            for letter, part in zip("qkv", theirs[f"{prefix}attn.c_attn.{name}"].chunk(3, -1), strict=True):
                flat[f"{block}attn/{kind}{letter}"] = part.contiguous()
        flat |= {block + ours: theirs[prefix + name] for ours, name in GPT2_NAMES}
    flat |= {"norm/scale": theirs["transformer.ln_f.weight"], "norm/bias": theirs["transformer.ln_f.bias"]}
    return tree.unflatten(flat)
