"""Make small random `transformers` models of every family, and directories of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
import transformers
from torch import Tensor

from ironfn import tree
from ironfn.hf.directory import describe, load_model
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.model.arch import Arch, complete
from ironfn.model.tables import table
from ironfn.types import Params

VOCAB = 96
# square on purpose (width = heads x head_dim = ffn): no shape gives a forgotten transposition away
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
_COMMON = {"vocab_size": VOCAB, "max_position_embeddings": 64, **_SIZES}
_IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
_GROUPED = {"num_key_value_heads": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}

CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_inner=32, n_positions=64, layer_norm_epsilon=1e-3, **_IDS
    ),
    "llama": lambda: transformers.LlamaConfig(**_COMMON, **_GROUPED, **_IDS, rms_norm_eps=1e-3),
    "llama-biased": lambda: transformers.LlamaConfig(
        **_COMMON, **_IDS, head_dim=16, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "mistral": lambda: transformers.MistralConfig(**_COMMON, **_GROUPED, **_IDS, sliding_window=6),
    "qwen2": lambda: transformers.Qwen2Config(
        **_COMMON, **_GROUPED, **_IDS, use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**_COMMON, **_GROUPED, **_IDS, head_dim=8),
    "gemma": lambda: transformers.GemmaConfig(**_COMMON, **_GROUPED, **_IDS, head_dim=8),
    "gemma2": lambda: transformers.Gemma2Config(
        **_COMMON, **_GROUPED, **_IDS, head_dim=8, sliding_window=6, query_pre_attn_scalar=12,
        attn_logit_softcapping=5.0, final_logit_softcapping=3.0,
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_COMMON | {"num_hidden_layers": 3}, **_GROUPED, **_IDS, head_dim=8, sliding_window=6,
        sliding_window_pattern=2, rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
    "phi": lambda: transformers.PhiConfig(**_COMMON, **_IDS),
    "phi3": lambda: transformers.Phi3Config(
        **_COMMON, **_GROUPED, **_IDS, original_max_position_embeddings=16, sliding_window=20,
        rope_parameters={
            "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0],
        },
    ),
    "mpt": lambda: transformers.MptConfig(
        vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4, max_seq_len=64
    ),
    "mpt-clipped": lambda: transformers.MptConfig(
        vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4, max_seq_len=64, attn_config={"clip_qkv": 0.4},
    ),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**_COMMON, **_IDS, layer_norm_eps=1e-3),
    "gpt-neox-in-line": lambda: transformers.GPTNeoXConfig(
        **_COMMON, **_IDS, use_parallel_residual=False, attention_bias=False, hidden_act="gelu_new",
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
    ),
    "stablelm": lambda: transformers.StableLmConfig(**_COMMON, **_GROUPED, **_IDS, use_qkv_bias=True),
    "stablelm-parallel": lambda: transformers.StableLmConfig(
        **_COMMON, **_GROUPED, **_IDS, use_parallel_residual=True
    ),
    "olmo2": lambda: transformers.Olmo2Config(**_COMMON, **_GROUPED, **_IDS, rms_norm_eps=1e-3),
    "bloom": lambda: transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, **_IDS),
    "mixtral": lambda: transformers.MixtralConfig(**_COMMON, **_GROUPED, **_IDS, num_local_experts=4),
    "qwen2-moe": lambda: transformers.Qwen2MoeConfig(
        **_COMMON | {"num_hidden_layers": 3}, **_GROUPED, **_IDS, **_EXPERTS, moe_intermediate_size=32,
        shared_expert_intermediate_size=40, mlp_only_layers=[0],
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **_COMMON, **_GROUPED, **_IDS, **_EXPERTS, head_dim=8, moe_intermediate_size=32, norm_topk_prob=True
    ),
    "glm4-moe": lambda: transformers.Glm4MoeConfig(
        **_COMMON, **_GROUPED, **_IDS, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, n_group=4,
        topk_group=2, routed_scaling_factor=1.5, use_qk_norm=True, partial_rotary_factor=0.5, attention_bias=True,
    ),
    "qwen2-moe-mixed": lambda: transformers.Qwen2MoeConfig(
        **_COMMON | {"num_hidden_layers": 6}, **_GROUPED, **_IDS, **_EXPERTS, moe_intermediate_size=32,
        shared_expert_intermediate_size=40, mlp_only_layers=[0, 3], decoder_sparse_step=2,
    ),
    "olmoe": lambda: transformers.OlmoeConfig(**_COMMON, **_GROUPED, **_IDS, **_EXPERTS),
    "olmoe-clipped": lambda: transformers.OlmoeConfig(**_COMMON, **_GROUPED, **_IDS, **_EXPERTS, clip_qkv=0.4),
}  # fmt: skip


def model_of(name: str, seed: int = 0) -> Any:
    """Return a random model in evaluation mode, whose norms and biases are not what they begin as."""
    torch.manual_seed(seed)
    config = CONFIGS[name]()
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if weight.dim() == 1 or "norm" in path:
                weight.add_(torch.randn_like(weight) * 0.1)
            elif weight.dim() > 1:
                weight.mul_(5.0)  # at 0.02 a wrong angle or a forgotten norm hardly shows
        for path, buffer in model.named_buffers():
            if path.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.3)
    return model


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens).logits


def taken_in(path: Path, mesh: Mesh = SINGLE, pad: int = 1, **options: Any) -> tuple[Params, Arch]:
    """Import a directory on a mesh."""
    described = describe(path)
    arch = complete(attrs.evolve(described.spec, pad_vocab_to=pad), 1)
    return load_model(described, arch, table(mesh.sequence_parallel), mesh, **options), arch


def edited(path: Path, **changes: Any) -> None:
    """Change keys of a config.json; ... removes one."""
    file = path / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def equal(a: Params, b: Params) -> None:
    """Hold two trees equal to the last bit."""
    theirs = tree.flatten(b)
    assert set(tree.flatten(a)) == set(theirs)
    for path, leaf in tree.flatten(a).items():
        assert torch.equal(leaf, theirs[path]), path


@contextmanager
def quiet() -> Iterator[None]:
    """Keep `transformers` from talking."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    yield
