"""Build a small random `transformers` model of every family, and lay its weights or gradients out as our tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers as t
from attrs import frozen
from torch import Tensor, nn

from ironfn import tree
from ironfn.model.arch import Arch, complete
from ironfn.model.families import model_spec
from ironfn.types import Params

Named = dict[str, Tensor]
Rows = Iterator[tuple[str, Tensor]]


@frozen
class Peer:
    """Pair a preset and fields of ours with a config class of theirs. rows: (their tensors, arch) -> our leaves."""

    preset: str
    config: type
    model: type
    rows: Callable[[Named, Arch], Rows]
    ours: dict[str, Any]
    theirs: dict[str, Any]

    def arch(self, **changes: Any) -> Arch:
        small: dict[str, Any] = {"width": 32, "layers": 3, "heads": 4, "kv_heads": 2, "ffn": 40, "context": 64}
        return complete(model_spec(self.preset, **(small | self.ours | changes)), 101)

    def build(self, arch: Arch, seed: int = 0, **config: Any) -> nn.Module:
        """Return a random model in which no bias is 0, no scale is 1, and every part has weight."""
        torch.manual_seed(seed)
        fields = {"attn_implementation": "eager", "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
        model = self.model(self.config(**(sizes(arch) | fields | self.theirs | config))).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() == 1:
                    weight.add_(torch.randn_like(weight) * 0.2)
                else:
                    weight.copy_(torch.randn_like(weight) * (0.5 if "embed" in name or "wte" in name else 0.15))
        return model

    def tree(self, model: nn.Module, arch: Arch, of: str = "data") -> Params:
        """Return the weights (``of="grad"``: the gradients) as our tree, every one of theirs used once."""
        named = {name: getattr(p, of).detach().clone() for name, p in model.named_parameters()}
        return tree.unflatten(dict(self.rows(named, arch)))


def sizes(arch: Arch) -> dict[str, Any]:
    """Return what nearly all configs call alike; classes keep what they do not know without a word."""
    return {
        "vocab_size": arch.vocab, "hidden_size": arch.width, "num_hidden_layers": arch.layers,
        "num_attention_heads": arch.heads, "num_key_value_heads": arch.kv_heads, "head_dim": arch.head_dim,
        "intermediate_size": arch.ffn, "max_position_embeddings": arch.context, "rms_norm_eps": arch.norm_eps,
        "layer_norm_eps": arch.norm_eps, "tie_word_embeddings": arch.tied, "use_cache": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": arch.rope_theta},
    }  # fmt: skip


def transposed(theirs: Named, ours: str, name: str, bias: str | None = None) -> Rows:
    """Yield a matrix [out, in] as [in, out], and its bias, where they have them."""
    if f"{name}.weight" in theirs:
        yield ours, theirs[f"{name}.weight"].t().contiguous()
    if bias is not None and f"{name}.bias" in theirs:
        yield bias, theirs[f"{name}.bias"]


def norm(theirs: Named, ours: str, name: str) -> Rows:
    for mine, there in (("scale", "weight"), ("bias", "bias")):
        if f"{name}.{there}" in theirs:
            yield f"{ours}/{mine}", theirs[f"{name}.{there}"]


def llama_like(theirs: Named, arch: Arch) -> Rows:
    """Yield the leaves of all that have grown from Llama's code."""
    yield "embed/tokens", theirs["model.embed_tokens.weight"]
    yield from norm(theirs, "norm", "model.norm")
    yield from norm(theirs, "norm", "model.final_layernorm")
    if not arch.tied:
        yield "head/w", theirs["lm_head.weight"]
    if "lm_head.bias" in theirs:
        yield "head/b", theirs["lm_head.bias"]
    for layer in range(arch.layers):
        here, there = f"blocks/{layer}", f"model.layers.{layer}"
        second = "pre_feedforward" if arch.post_norms else "post_attention"
        yield from norm(theirs, f"{here}/norm1", f"{there}.input_layernorm")
        yield from norm(theirs, f"{here}/norm2", f"{there}.{second}_layernorm")
        if arch.post_norms:
            yield from norm(theirs, f"{here}/post_norm1", f"{there}.post_attention_layernorm")
            yield from norm(theirs, f"{here}/post_norm2", f"{there}.post_feedforward_layernorm")
        yield from _attention(theirs, arch, f"{here}/attn", f"{there}.self_attn")
        yield from _feed_forward(theirs, f"{here}/mlp", f"{there}.mlp")


def _attention(theirs: Named, arch: Arch, here: str, there: str) -> Rows:
    for letter in "qkv":
        yield from transposed(theirs, f"{here}/w{letter}", f"{there}.{letter}_proj", f"{here}/b{letter}")
        yield from norm(theirs, f"{here}/{letter}_norm", f"{there}.{letter}_norm")
    for name in ("o_proj", "dense"):
        yield from transposed(theirs, f"{here}/wo", f"{there}.{name}", f"{here}/bo")
    if f"{there}.qkv_proj.weight" in theirs:  # Phi-3
        keys = arch.kv_heads * arch.head_dim
        parts = theirs[f"{there}.qkv_proj.weight"].split([arch.heads * arch.head_dim, keys, keys])
        yield from ((f"{here}/w{letter}", part.t().contiguous()) for letter, part in zip("qkv", parts, strict=True))


def _feed_forward(theirs: Named, here: str, there: str) -> Rows:
    for ours, name in (("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj"), ("up", "fc1"), ("down", "fc2")):
        yield from transposed(theirs, f"{here}/w_{ours}", f"{there}.{name}", f"{here}/b_{ours}")
        yield from transposed(theirs, f"{here}/shared/w_{ours}", f"{there}.shared_expert.{name}")
    if f"{there}.gate_up_proj.weight" in theirs:  # Phi-3
        gate, up = theirs[f"{there}.gate_up_proj.weight"].chunk(2)
        yield from ((f"{here}/w_{n}", w.t().contiguous()) for n, w in (("gate", gate), ("up", up)))
    yield from transposed(theirs, f"{here}/router/w", f"{there}.gate")
    yield from transposed(theirs, f"{here}/shared_gate/w", f"{there}.shared_expert_gate")
    if f"{there}.experts.down_proj" in theirs:
        gate, up = theirs[f"{there}.experts.gate_up_proj"].mT.chunk(2, 2)
        down = theirs[f"{there}.experts.down_proj"].mT
        yield from ((f"{here}/experts/w_{n}", w.contiguous()) for n, w in (("gate", gate), ("up", up), ("down", down)))


def bloom(theirs: Named, arch: Arch) -> Rows:
    """Yield the leaves of a BLOOM, whose q, k and v lie side by side head by head."""
    yield "embed/tokens", theirs["transformer.word_embeddings.weight"]
    yield from norm(theirs, "embed/norm", "transformer.word_embeddings_layernorm")
    yield from norm(theirs, "norm", "transformer.ln_f")
    for layer in range(arch.layers):
        here, there = f"blocks/{layer}", f"transformer.h.{layer}"
        yield from norm(theirs, f"{here}/norm1", f"{there}.input_layernorm")
        yield from norm(theirs, f"{here}/norm2", f"{there}.post_attention_layernorm")
        fused = f"{there}.self_attention.query_key_value"
        weight = theirs[f"{fused}.weight"].view(arch.heads, 3, arch.head_dim, arch.width)
        bias = theirs[f"{fused}.bias"].view(arch.heads, 3, arch.head_dim)
        for i, letter in enumerate("qkv"):
            yield f"{here}/attn/w{letter}", weight[:, i].flatten(0, 1).t().contiguous()
            yield f"{here}/attn/b{letter}", bias[:, i].flatten()
        yield from transposed(theirs, f"{here}/attn/wo", f"{there}.self_attention.dense", f"{here}/attn/bo")
        yield from transposed(theirs, f"{here}/mlp/w_up", f"{there}.mlp.dense_h_to_4h", f"{here}/mlp/b_up")
        yield from transposed(theirs, f"{here}/mlp/w_down", f"{there}.mlp.dense_4h_to_h", f"{here}/mlp/b_down")


def mpt(theirs: Named, arch: Arch) -> Rows:
    """Yield the leaves of an MPT, whose q, k and v lie side by side."""
    yield "embed/tokens", theirs["transformer.wte.weight"]
    yield from norm(theirs, "norm", "transformer.norm_f")
    for layer in range(arch.layers):
        here, there = f"blocks/{layer}", f"transformer.blocks.{layer}"
        for n in (1, 2):
            yield from norm(theirs, f"{here}/norm{n}", f"{there}.norm_{n}")
        parts = theirs[f"{there}.attn.Wqkv.weight"].chunk(3)
        yield from ((f"{here}/attn/w{n}", part.t().contiguous()) for n, part in zip("qkv", parts, strict=True))
        yield from transposed(theirs, f"{here}/attn/wo", f"{there}.attn.out_proj")
        yield from transposed(theirs, f"{here}/mlp/w_up", f"{there}.ffn.up_proj")
        yield from transposed(theirs, f"{here}/mlp/w_down", f"{there}.ffn.down_proj")


def neox(theirs: Named, arch: Arch) -> Rows:
    """Yield the leaves of a GPT-NeoX, whose q, k and v lie side by side head by head."""
    yield "embed/tokens", theirs["gpt_neox.embed_in.weight"]
    yield from norm(theirs, "norm", "gpt_neox.final_layer_norm")
    yield "head/w", theirs["lm_head.weight"]
    for layer in range(arch.layers):
        here, there = f"blocks/{layer}", f"gpt_neox.layers.{layer}"
        yield from norm(theirs, f"{here}/norm1", f"{there}.input_layernorm")
        yield from norm(theirs, f"{here}/norm2", f"{there}.post_attention_layernorm")
        fused = f"{there}.attention.query_key_value"
        weight = theirs[f"{fused}.weight"].view(arch.heads, 3, arch.head_dim, arch.width)
        bias = theirs[f"{fused}.bias"].view(arch.heads, 3, arch.head_dim)
        for i, letter in enumerate("qkv"):
            yield f"{here}/attn/w{letter}", weight[:, i].flatten(0, 1).t().contiguous()
            yield f"{here}/attn/b{letter}", bias[:, i].flatten()
        yield from transposed(theirs, f"{here}/attn/wo", f"{there}.attention.dense", f"{here}/attn/bo")
        yield from transposed(theirs, f"{here}/mlp/w_up", f"{there}.mlp.dense_h_to_4h", f"{here}/mlp/b_up")
        yield from transposed(theirs, f"{here}/mlp/w_down", f"{there}.mlp.dense_4h_to_h", f"{here}/mlp/b_down")


def _like(preset: str, name: str, ours: dict[str, Any] | None = None, config: str = "", **theirs: Any) -> Peer:
    config_class, model = getattr(t, config or f"{name}Config"), getattr(t, f"{name}ForCausalLM")
    return Peer(preset, config_class, model, llama_like, ours or {}, theirs)


_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_QUARTER = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
_NEOX = {"kv_heads": None}
_PHI3 = {"kv_heads": 2, "windows": [9]}
_WHOLE = {"kv_heads": None, "ffn": 128}

PEERS: dict[str, Peer] = {
    "llama": _like("llama", "Llama", {"attention_bias": True, "mlp_bias": True}, attention_bias=True, mlp_bias=True),
    "llama2": _like("llama2", "Llama"),
    "mistral": _like("mistral", "Mistral", {"windows": [7]}, sliding_window=7),
    "qwen2": _like("qwen2", "Qwen2", {"tied": False}),
    "qwen2 windows": _like(
        "qwen2.5", "Qwen2", {"windows": [0, 5, 5]}, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": _like("qwen3", "Qwen3", {"head_dim": 12}),
    "gemma": _like("gemma", "Gemma", {"head_dim": 12}),
    "gemma2": _like(
        "gemma2", "Gemma2", {"head_dim": 12, "windows": [6, 0], "attention_scale": 0.2, "attention_softcap": 3.0,
        "logit_softcap": 4.0}, sliding_window=6, query_pre_attn_scalar=25, attn_logit_softcapping=3.0,
        final_logit_softcapping=4.0,
    ),
    "gemma3": _like(
        "gemma3", "Gemma3", {"head_dim": 12, "windows": [6, 6, 0], "attention_scale": 0.2}, "Gemma3TextConfig",
        sliding_window=6, query_pre_attn_scalar=25, rope_parameters=_GEMMA3_ROPE,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
    "phi": _like(
        "phi", "Phi", {"kv_heads": None}, num_key_value_heads=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ),
    "phi3": _like("phi3", "Phi3", _PHI3, sliding_window=9),
    "bloom": Peer("bloom", t.BloomConfig, t.BloomForCausalLM, bloom, _WHOLE, {"n_layer": 3, "n_head": 4}),
    "bloom 6 heads": Peer(
        "bloom", t.BloomConfig, t.BloomForCausalLM, bloom, _WHOLE | {"heads": 6, "width": 48, "ffn": 192},
        {"n_layer": 3, "n_head": 6},
    ),
    "mpt": Peer(
        "mpt", t.MptConfig, t.MptForCausalLM, mpt, _WHOLE,
        {"d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 64},
    ),
    "mpt 6 heads": Peer(
        "mpt", t.MptConfig, t.MptForCausalLM, mpt, _WHOLE | {"heads": 6, "width": 48, "ffn": 192},
        {"d_model": 48, "n_layers": 3, "n_heads": 6, "max_seq_len": 64},
    ),
    "mpt clipped": Peer(
        "mpt", t.MptConfig, t.MptForCausalLM, mpt, _WHOLE | {"attention_clip": 0.5},
        {"d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 64, "attn_config": {"clip_qkv": 0.5}},
    ),
    "gpt-neox": Peer("gpt-neox", t.GPTNeoXConfig, t.GPTNeoXForCausalLM, neox, _NEOX, {"rope_parameters": _QUARTER}),
    "gpt-neox in line": Peer(
        "gpt-neox", t.GPTNeoXConfig, t.GPTNeoXForCausalLM, neox, _NEOX | {"parallel": False, "parallel_norms": False},
        {"rope_parameters": _QUARTER, "use_parallel_residual": False},
    ),
    "stablelm": _like(
        "stablelm", "StableLm", {"attention_bias": True, "attention_out_bias": False}, use_qkv_bias=True,
        rope_parameters=_QUARTER,
    ),
    "stablelm parallel": _like(
        "stablelm", "StableLm", {"parallel": True}, use_parallel_residual=True, rope_parameters=_QUARTER
    ),
    "olmo2": _like("olmo2", "Olmo2"),
    "mixtral": _like(
        "mixtral", "Mixtral", {"windows": [7], "moe": {"experts": 5}}, num_local_experts=5, sliding_window=7
    ),
    "qwen2-moe": _like(
        "qwen2-moe", "Qwen2Moe", {"moe": {"experts": 6, "ffn": 12, "shared_ffn": 20, "every": 2}}, num_experts=6,
        num_experts_per_tok=4, moe_intermediate_size=12, shared_expert_intermediate_size=20, decoder_sparse_step=2,
        norm_topk_prob=False,
    ),
    "qwen3-moe": _like(
        "qwen3-moe", "Qwen3Moe", {"moe": {"experts": 9, "ffn": 12, "dense_layers": 1}}, num_experts=9,
        num_experts_per_tok=8, moe_intermediate_size=12, mlp_only_layers=[0], norm_topk_prob=True,
    ),
    "qwen2-moe mixed": _like(
        "qwen2-moe", "Qwen2Moe", {"moe": {"experts": 6, "ffn": 12, "shared_ffn": 20, "dense_at": [1]}}, num_experts=6,
        num_experts_per_tok=4, moe_intermediate_size=12, shared_expert_intermediate_size=20, mlp_only_layers=[1],
        norm_topk_prob=False,
    ),
    "olmoe clipped": _like(
        "olmoe", "Olmoe", {"moe": {"experts": 10}, "attention_clip": 0.5}, num_experts=10, norm_topk_prob=False,
        clip_qkv=0.5,
    ),
    "olmoe": _like("olmoe", "Olmoe", {"moe": {"experts": 10}}, num_experts=10, norm_topk_prob=False),
}  # fmt: skip
