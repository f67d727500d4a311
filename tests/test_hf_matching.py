"""What a directory of the right kind can still have wrong, and the forms that the same model comes in."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ironfn import tree
from ironfn.hf.directory import describe, export_model, stored, with_rows
from ironfn.hf.export import exportable
from ironfn.mesh.axis import SINGLE
from ironfn.model.arch import complete
from ironfn.model.families import PRESETS
from ironfn.model.init import init
from ironfn.model.tables import table
from ironfn.model.transformer import logits
from ironfn.spec.records import ModelSpec, MoeSpec, RopeSpec

from .hf_models import VOCAB, edited, equal, logits_of, model_of, quiet, taken_in

TOKENS = torch.randint(0, VOCAB, (1, 12), generator=torch.Generator().manual_seed(1))
Tensors = dict[str, Tensor]


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    with quiet():
        yield


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Save a random model of a family, its tensors changed."""

    def saved(name: str, change: Callable[[Tensors], Any] = lambda tensors: None) -> Path:
        path = tmp_path / name
        model_of(name).save_pretrained(path)
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        return path

    return saved


NORM, HEAD, TABLE = "model.layers.1.input_layernorm.weight", "lm_head.weight", "model.embed_tokens.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"

WRONG: dict[str, tuple[str, Callable[[Tensors], Any], str]] = {
    "a norm is missing": ("llama", lambda t: t.pop(NORM), f"missing: {NORM}"),
    "an untied head is missing": ("llama", lambda t: t.pop(HEAD), f"missing: {HEAD}"),
    "an expert is missing": (
        "mixtral",
        lambda t: t.pop("model.layers.1.block_sparse_moe.experts.2.w3.weight"),
        "missing: model.layers.1.block_sparse_moe.experts.2.w3.weight",
    ),
    "a bias that the config does not tell of": (
        "llama",
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}),
        "not of this model: model.layers.0.self_attn.q_proj.bias",
    ),
    "a layer more": (
        "llama",
        lambda t: t.update({NORM.replace("1", "2"): torch.zeros(32)}),
        "not of this model: model.layers.2.input_layernorm.weight",
    ),
    "another shape": (
        "llama",
        lambda t: t.update({NORM: torch.zeros(31)}),
        f"{NORM} is [31], the config calls for [32]",
    ),
    "a table that is too long": (
        "llama",
        lambda t: t.update({TABLE: torch.zeros(VOCAB + 4, 32)}),
        f"{TABLE} is [{VOCAB + 4}, 32], the config calls for [{VOCAB}, 32]",
    ),
    "a tied head that is another": (
        "llama-biased",
        lambda t: t.update({HEAD: t[TABLE] + 1}),
        "a head that differs from it",
    ),
    "numbers that are no floats": ("llama", lambda t: t.update({NORM: torch.zeros(32, dtype=torch.int8)}), "is I8"),
    "weights packed by GPTQ": (
        "llama",
        lambda t: t.update({QUERY.replace(".weight", ".qweight"): t.pop(QUERY).int()}),
        "quantized weights are not read; dequantize them first",
    ),
    "weights packed by bitsandbytes": (
        "llama",
        lambda t: t.update({QUERY: t[QUERY].to(torch.uint8), f"{QUERY}.quant_state.bitsandbytes__nf4": torch.zeros(1)}),
        "quantized weights are not read; dequantize them first",
    ),
    "weights of eight bits": (
        "llama",
        lambda t: t.update({QUERY: t[QUERY].to(torch.float8_e4m3fn)}),
        f"{QUERY} is F8_E4M3: quantized weights are not read",
    ),
    "experts both stacked and not": (
        "mixtral",
        lambda t: t.update({"model.layers.0.mlp.experts.down_proj": torch.zeros(4, 32, 32)}),
        "both stacked and expert by expert",
    ),
    "a router under both names": (
        "mixtral",
        lambda t: t.update({"model.layers.0.mlp.gate.weight": torch.zeros(4, 32)}),
        "both give blocks/0/mlp/router/w",
    ),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_every_tensor_is_used_once_or_all_are_refused(case: str, save: Callable[..., Path]) -> None:
    name, change, why = WRONG[case]
    with pytest.raises(ValueError, match=re.escape(why)):
        taken_in(save(name, change))


def test_every_fault_is_told_at_once(save: Callable[..., Path]) -> None:
    def change(tensors: Tensors) -> None:
        del tensors[NORM], tensors[HEAD]
        tensors["more"] = torch.zeros(1)

    with pytest.raises(ValueError, match=rf"(?s)missing: {HEAD}, {NORM}.*not of this model: more"):
        taken_in(save("llama", change))


def test_a_tied_head_that_is_stored_all_the_same_is_one_tensor(save: Callable[..., Path]) -> None:
    params, _ = taken_in(save("llama-biased", lambda t: t.update({HEAD: t[TABLE].clone()})))
    assert "head" not in params


def test_leaves_that_share_memory_go_out_whole_and_a_tied_head_once(save: Callable[..., Path], tmp_path: Path) -> None:
    """Views of one buffer are no reason to drop either, nor to refuse; only what is tied is one tensor."""
    params, arch = taken_in(save("llama"))
    leaves = tree.flatten(params)
    buffer = torch.randn(VOCAB + 1, 32)
    leaves |= {"embed/tokens": buffer[1:], "head/w": buffer[:-1], "blocks/1/mlp/w_down": leaves["blocks/0/mlp/w_down"]}
    export_model(tmp_path / "shared", arch, leaves, carried={}, tokenizer=None)
    equal(taken_in(tmp_path / "shared")[0], tree.unflatten(leaves))
    tied, arch = taken_in(save("llama-biased"))
    export_model(tmp_path / "tied", arch, tree.flatten(tied), carried={}, tokenizer=None)
    assert arch.tied
    assert json.loads((tmp_path / "tied/config.json").read_text())["tie_word_embeddings"] is True
    assert HEAD not in load_file(tmp_path / "tied/model.safetensors")


def test_known_buffers_are_passed_over(save: Callable[..., Path]) -> None:
    llama = save("llama", lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    gpt2 = save("gpt2", lambda t: t.update({"transformer.h.0.attn.bias": torch.zeros(1, 1, 64, 64)}))
    assert taken_in(llama)
    assert taken_in(gpt2)


def test_a_file_of_the_bare_decoder_is_the_same_model(save: Callable[..., Path], tmp_path: Path) -> None:
    """The names of openai-community/gpt2: without `transformer.` before them."""
    path = save("gpt2")
    whole, _ = taken_in(path)
    tensors = load_file(path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(bare, path / "model.safetensors", {"format": "pt"})
    equal(taken_in(path)[0], whole)


def test_stacked_experts_are_the_same_model(save: Callable[..., Path]) -> None:
    """The names that the modules of transformers 5 have, though it does not save by them."""
    path = save("mixtral")
    whole, _ = taken_in(path)
    tensors = load_file(path / "model.safetensors")
    for layer in range(2):
        old, new = f"model.layers.{layer}.block_sparse_moe.", f"model.layers.{layer}.mlp."
        w1, w3, w2 = (torch.stack([tensors.pop(f"{old}experts.{e}.w{n}.weight") for e in range(4)]) for n in (1, 3, 2))
        tensors[f"{new}experts.gate_up_proj"] = torch.cat([w1, w3], 1)
        tensors[f"{new}experts.down_proj"] = w2
        tensors[f"{new}gate.weight"] = tensors.pop(f"{old}gate.weight")
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    equal(taken_in(path)[0], whole)


def test_each_tensor_keeps_its_dtype_or_all_are_cast(save: Callable[..., Path], tmp_path: Path) -> None:
    def halve(tensors: Tensors) -> None:
        for name in tensors:
            tensors[name] = tensors[name].to(torch.float16 if "norm" in name else torch.bfloat16)

    path = save("llama", halve)
    kept, arch = taken_in(path)
    assert {p: x.dtype for p, x in tree.flatten(kept).items() if "wq" in p or "norm1" in p} == {
        f"blocks/{layer}/{leaf}": dtype
        for layer in (0, 1)
        for leaf, dtype in (("norm1/scale", torch.float16), ("attn/wq", torch.bfloat16))
    }
    cast, _ = taken_in(path, dtype=torch.float32)
    equal(cast, tree.map(lambda x: x.float(), kept))
    export_model(tmp_path / "out", arch, tree.flatten(kept), carried={}, tokenizer=None)
    equal(taken_in(tmp_path / "out")[0], kept)


def test_parts_of_one_leaf_in_two_dtypes_need_a_choice(save: Callable[..., Path]) -> None:
    name = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    path = save("mixtral", lambda t: t.update({name: t[name].half()}))
    with pytest.raises(ValueError, match="choose a dtype"):
        taken_in(path)
    assert taken_in(path, dtype=torch.float32)


def test_the_stored_table_decides_only_if_asked(save: Callable[..., Path]) -> None:
    path = save("llama")
    edited(path, vocab_size=VOCAB - 5)
    with pytest.raises(ValueError, match="the config calls for"):
        taken_in(path)
    assert with_rows(describe(path).spec, describe(path), stored(path)[0]).vocab_size == VOCAB


OLD_FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "theta beside": ("llama", {"rope_parameters": ..., "rope_theta": 10000.0, "rope_scaling": None}),
    "a dtype by its old name": ("llama", {"dtype": ..., "torch_dtype": "float32"}),
    "nothing of dtypes": ("llama", {"dtype": ...}),
    "the type alone": ("llama", {"architectures": ...}),
    "windows by number": ("qwen2", {"layer_types": ...}),
    "windows of two": ("gemma2", {"layer_types": ...}),
    "windows by pattern": ("gemma3", {"layer_types": ..., "sliding_window_pattern": 2}),
    "two thetas beside": (
        "gemma3",
        {
            "rope_parameters": ...,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "a fraction beside": ("phi", {"rope_parameters": ..., "rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
    "a base and a fraction by old names": (
        "gpt-neox",
        {"rope_parameters": ..., "rotary_emb_base": 10000, "rotary_pct": 0.25},
    ),
    "experts by their old name": ("qwen3-moe", {"num_local_experts": ..., "num_experts": 4}),
    "the width by its old name": ("bloom", {"hidden_size": ..., "n_embed": 32}),
    "gelu that was tanh": ("gemma", {"hidden_act": "gelu", "hidden_activation": None}),
}


@pytest.mark.parametrize("case", list(OLD_FORMS))
def test_the_forms_of_transformers_4_mean_the_same(case: str, save: Callable[..., Path]) -> None:
    name, changes = OLD_FORMS[case]
    path = save(name)
    new = describe(path).spec
    edited(path, **changes)
    assert describe(path).spec == new


SCALED: dict[str, dict[str, Any]] = {
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "linear": {"type": "linear", "factor": 4.0},
    "dynamic": {"type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
}


@pytest.mark.parametrize("kind", list(SCALED))
def test_stretched_angles_are_read_and_written_back(kind: str, save: Callable[..., Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = save("llama")
    edited(path, rope_parameters=..., rope_theta=5000.0, rope_scaling=SCALED[kind])
    tokens = torch.randint(0, VOCAB, (1, 40), generator=torch.Generator().manual_seed(2))
    expected = logits_of(AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval(), tokens)
    params, arch = taken_in(path)
    assert (arch.rope.kind, arch.rope_theta) == (kind, 5000.0)
    torch.testing.assert_close(logits(params, {"tokens": tokens}, arch, SINGLE), expected, rtol=0, atol=1e-5)
    export_model(tmp_path / "out", arch, tree.flatten(params), carried={}, tokenizer=None)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    torch.testing.assert_close(logits_of(again, tokens), expected, rtol=0, atol=1e-6)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "an architecture that is not known": (
        "llama", {"architectures": ["BertModel"]}, r"'BertModel'.*; known are GPT2LMHeadModel, LlamaForCausalLM",
    ),
    "quantized weights": ("llama", {"quantization_config": {"bits": 4}}, "quantized weights are not read"),
    "an activation": ("llama", {"hidden_act": "relu"}, "hidden_act is 'relu', and only 'silu'"),
    "angles of three parts": (
        "llama", {"rope_scaling": {"type": "default2"}}, "rope_type is 'default2', and only",
    ),
    "a key of angles": (
        "llama", {"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1]}}, "mrope_section",
    ),
    "scores by layer": (
        "gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True",
    ),
    "a size that is not there": ("llama", {"hidden_size": ...}, "hidden_size is missing"),
    "a dense layer that is not there": ("qwen2-moe", {"mlp_only_layers": [1, 3]}, "no block 3 among 3"),
    "dense layers that are no numbers": ("qwen2-moe", {"mlp_only_layers": [1, "2"]}, "dense_at"),
    "queries normed by head": ("stablelm", {"qk_layernorm": True}, "qk_layernorm is True"),
    "a factor for nothing": ("llama", {"rope_scaling": {"factor": 8.0}}, "has factor, but no rope_type"),
    "a length that is not there": (
        "phi3", {"max_position_embeddings": ...}, "max_position_embeddings None over original_max_position_embeddings",
    ),
    "angles that are a word": ("gemma3", {"rope_parameters": "yarn"}, "rope_parameters is 'yarn', not an object"),
    "attention that is a word": ("mpt", {"attn_config": "flash"}, "attn_config is 'flash', not an object"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_ironfn_does_not_compute_is_refused(case: str, save: Callable[..., Path]) -> None:
    name, changes, why = REFUSED[case]
    path = save(name)
    edited(path, **changes)
    with pytest.raises(ValueError, match=why):
        describe(path)


def arch_of(preset: str = "llama", **fields: Any) -> Any:
    small: dict[str, Any] = {"width": 32, "layers": 2, "heads": 4, "ffn": 32, "context": 64, "vocab_size": VOCAB}
    return complete(ModelSpec(preset=preset, **(dict(PRESETS[preset]) | small | fields)), 1)


FOUND: dict[str, tuple[dict[str, Any], str]] = {
    "llama": ({}, "LlamaForCausalLM"),
    "gpt2": ({"preset": "gpt2"}, "GPT2LMHeadModel"),
    "a window": ({"windows": [8]}, "MistralForCausalLM"),
    "some windows": ({"windows": [0, 8], "attention_bias": True, "attention_out_bias": False}, "Qwen2ForCausalLM"),
    "normed queries": ({"qk_norm": "head"}, "Qwen3ForCausalLM"),
    "experts": ({"moe": MoeSpec(experts=4)}, "MixtralForCausalLM"),
    "experts weighed by all": (
        {"moe": MoeSpec(experts=4, renormalize=False), "qk_norm": "head"}, "Qwen3MoeForCausalLM",
    ),
    "experts by sigmoids": (
        {"moe": MoeSpec(experts=4, score="sigmoid", bias_rate=0.01, shared=2)}, "Glm4MoeForCausalLM",
    ),
    "padded and stretched": (
        {"pad_vocab_to": 64, "rope": RopeSpec("yarn", 4.0, 16), "tied": False}, "LlamaForCausalLM",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", list(FOUND))
def test_a_model_that_was_trained_here_finds_its_architecture(case: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    fields, expected = FOUND[case]
    arch = arch_of(**({"init_std": 0.2} | fields))
    params = init(arch, 0, table(False), SINGLE)
    out = export_model(tmp_path / "out", arch, tree.flatten(params), carried={}, tokenizer=None, eos=1)
    assert out.family.architecture == expected
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    ours = logits(params, {"tokens": TOKENS}, arch, SINGLE)[..., :VOCAB]
    torch.testing.assert_close(ours, logits_of(theirs, TOKENS), rtol=0, atol=1e-5)


def test_a_model_that_no_architecture_can_say_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no architecture of transformers can say this model; .*capacity"):
        exportable(arch_of(moe=MoeSpec(experts=4, capacity=1.0)), None)
    with pytest.raises(ValueError, match=r"MistralForCausalLM can say this model; .*attention_bias True"):
        exportable(arch_of(attention_bias=True), "MistralForCausalLM")
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel can say this model; .*mlp 'swiglu'"):
        exportable(arch_of(), "GPT2LMHeadModel")
    with pytest.raises(ValueError, match="there is no architecture 'Mistral'"):
        exportable(arch_of(), "Mistral")
    with pytest.raises(ValueError, match="a bias on the routers' choice"):
        exportable(arch_of(moe=MoeSpec(experts=4)), "MixtralForCausalLM", bias=True)
