"""Every family through a GGUF file: read back bit for bit here, and with the same logits by `transformers`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from ironfn import tree
from ironfn.data.tokenizer import train
from ironfn.hf import gguf_save
from ironfn.hf.export import differences
from ironfn.hf.gguf_families import FAMILIES
from ironfn.hf.gguf_load import load_weights, open_gguf
from ironfn.hf.gguf_rope import llama3_factors
from ironfn.hf.gguf_save import Words, family_of, save_gguf
from ironfn.hf.gguf_tokenizer import tokenizer_of
from ironfn.layout.table import unshard
from ironfn.mesh import fake
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.model.arch import Arch, complete
from ironfn.model.tables import table
from ironfn.model.transformer import logits
from ironfn.spec.records import ModelSpec, RopeSpec, TokenizerSpec
from ironfn.types import Params

from .hf_models import CONFIGS, equal, logits_of, quiet, taken_in

VOCAB = 320
TOKENIZER = train(["import torch\n"], TokenizerSpec(vocab_size=280))
TOKENS = torch.randint(0, 280, (2, 24), generator=torch.Generator().manual_seed(1))
_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
_GQA = _SIZES | {"num_key_value_heads": 2, "rms_norm_eps": 1e-3, "rope_theta": 5000.0}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}

# Those that the GGUF loader of `transformers` knows. It takes some sizes for granted, whatever a file says: a head of
# 128 in Qwen 3 and of 256 in Gemma, experts of 768, GPT-2's 1024 positions.
MODELS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**_GQA, tie_word_embeddings=False),
    "llama-tied": lambda: transformers.LlamaConfig(**_GQA, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(**_GQA),
    "qwen3": lambda: transformers.Qwen3Config(**_GQA, head_dim=128),
    "qwen3moe": lambda: transformers.Qwen3MoeConfig(
        **_GQA, **_EXPERTS, head_dim=8, moe_intermediate_size=768, norm_topk_prob=True
    ),
    "gemma2": lambda: transformers.Gemma2Config(**_GQA, head_dim=256, sliding_window=6),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_GQA | {"num_hidden_layers": 7, "rope_theta": 1e6}, head_dim=256, sliding_window=6
    ),
    "phi3": lambda: transformers.Phi3Config(**_GQA),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_inner=128, n_positions=1024, layer_norm_epsilon=1e-3
    ),
    "bloom": lambda: transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4),
}


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    with quiet():
        yield


def drawn(config: Any) -> Any:
    """Return a random model whose norms and biases are not what they begin as."""
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.add_(torch.randn_like(weight) * 0.1) if weight.dim() == 1 or "norm" in name else weight.mul_(5.0)
    return model


def again(path: Path, mesh: Mesh = SINGLE) -> tuple[Params, Arch]:
    model = open_gguf(path)
    arch = complete(model.spec, 1)
    return load_weights(model, arch, table(mesh.sequence_parallel), mesh), arch


@pytest.mark.parametrize("name", list(MODELS))
def test_a_family_goes_out_and_in(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = drawn(MODELS[name]())
    model.save_pretrained(tmp_path)
    params, arch = taken_in(tmp_path)
    family = name.split("-")[0]
    assert family_of(arch)[0].name == ("llama" if family == "phi3" else family)  # Phi-3's mathematics are Llama's
    monkeypatch.setattr(gguf_save, "FAMILIES", [each for each in FAMILIES if each.name == family])
    path = tmp_path / "model.gguf"
    save_gguf(path, tree.flatten(params), arch, Words(TOKENIZER, 0, 0, "{{ x }}"), "F32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, attn_implementation="eager", dtype=torch.float32
    ).eval()
    torch.testing.assert_close(logits_of(theirs, TOKENS), logits_of(model, TOKENS), rtol=0, atol=1e-5)
    params_again, arch_again = again(path)
    assert not differences(arch, arch_again)
    if arch.norm_offset:  # 1 + w is what the file holds
        ours = logits(params_again, {"tokens": TOKENS}, arch, SINGLE)
        torch.testing.assert_close(ours, logits_of(model, TOKENS), rtol=0, atol=1e-5)
    else:
        equal(params_again, params)


def of_ours(family: str) -> Arch:
    """Return a small model that only this architecture holds."""
    fixed = next(each for each in FAMILIES if each.name == family).family.fixed
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "width": 32,
        "layers": 2,
        "heads": 4,
        "head_dim": 8,
        "ffn": 64,
        "tied": family == "gemma",
    }
    more: dict[str, Any] = {
        "olmoe": {"moe": {"experts": 4, "renormalize": False}},
        "qwen2moe": {"moe": {"experts": 4, "renormalize": False, "shared": 1, "shared_gate": True, "shared_ffn": 48}},
        "phi2": {"rope_fraction": 0.5},
    }
    moe = more.get(family, {}).pop("moe", None)
    spec = ModelSpec(**sizes | dict(fixed) | more.get(family, {}))
    return complete(attrs.evolve(spec, moe=attrs.evolve(spec.moe, ffn=40, **moe)) if moe else spec, 1)


def random(arch: Arch) -> Params:
    from ironfn.model.init import shapes

    g = torch.Generator().manual_seed(0)
    return tree.unflatten({path: torch.randn(shape, generator=g) for path, shape in shapes(arch).items()})


@pytest.mark.parametrize("family", ["qwen2moe", "olmoe", "gemma", "phi2"])
def test_a_family_that_the_loader_of_transformers_lacks_has_the_names_of_ggml(family: str, tmp_path: Path) -> None:
    arch = of_ours(family)
    params = random(arch)
    path = tmp_path / "model.gguf"
    assert save_gguf(path, tree.flatten(params), arch, Words(TOKENIZER, 0, 0), "F32") == family
    constants = gguf.constants
    kind = next(number for number, name in constants.MODEL_ARCH_NAMES.items() if name == family)
    known = {constants.TENSOR_NAMES[t] for t in constants.MODEL_TENSORS[kind]}
    names = {tensor.name for tensor in gguf.GGUFReader(path).tensors}
    assert {
        name.rsplit(".", 1)[0].replace("blk.0", "blk.{bid}").replace("blk.1", "blk.{bid}") for name in names
    } <= known
    params_again, arch_again = again(path)
    assert not differences(arch, arch_again)
    for leaf, other in zip(tree.leaves(params), tree.leaves(params_again), strict=True):
        torch.testing.assert_close(other, leaf, rtol=0, atol=2e-7 if arch.norm_offset else 0)


# our name of the family: one of the configs in hf_models
CONVERTED = {
    "gptneox": "gpt-neox", "stablelm": "stablelm", "olmo2": "olmo2", "mpt": "mpt-clipped", "phi3": "phi3",
}  # fmt: skip


def as_converted(name: str, tensor: np.ndarray, config: Any) -> np.ndarray:
    """Return what llama.cpp's `convert_hf_to_gguf.py` makes of a tensor: GPT-NeoX's q, k and v part by part."""
    if "query_key_value" not in name:
        return tensor
    heads = config.num_attention_heads
    return tensor.reshape(heads, 3, -1, *tensor.shape[1:]).swapaxes(0, 1).reshape(tensor.shape)


@pytest.mark.parametrize("family", list(CONVERTED))
def test_a_file_holds_the_tensors_that_llama_cpp_makes_of_the_directory(family: str, tmp_path: Path) -> None:
    """By the names of the gguf package's map, every number the same; and back bit for bit."""
    config = CONFIGS[CONVERTED[family]]()
    config.vocab_size = VOCAB
    drawn(config).save_pretrained(tmp_path)
    params, arch = taken_in(tmp_path)
    path = tmp_path / "model.gguf"
    assert save_gguf(path, tree.flatten(params), arch, Words(TOKENIZER, 0, 0), "F32") == family
    reader = gguf.GGUFReader(path)
    kind = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(kind, arch.layers)
    expected = {
        names.get_name(name, try_suffixes=(".weight", ".bias")): as_converted(name, tensor, config)
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    if family == "phi3":
        rope = config.rope_parameters
        expected |= {f"rope_factors_{n}.weight": np.array(rope[f"{n}_factor"], np.float32) for n in ("long", "short")}
        told = reader.fields["phi3.rope.scaling.attn_factor"].contents()
        assert told == pytest.approx(math.sqrt(1 + math.log(64 / 16) / math.log(16)))
    assert {tensor.name for tensor in reader.tensors} == expected.keys()
    for tensor in reader.tensors:
        assert np.array_equal(np.array(tensor.data).reshape(expected[tensor.name].shape), expected[tensor.name])
    params_again, arch_again = again(path)
    assert not differences(arch, arch_again)
    equal(params_again, params)


def llama(**more: Any) -> Arch:
    return complete(ModelSpec(vocab_size=VOCAB, width=32, layers=2, heads=4, kv_heads=2, ffn=64, **more), 1)


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_the_numbers_are_as_near_as_their_kind_allows(kind: str, tmp_path: Path) -> None:
    arch = llama()
    params = random(arch)
    path = tmp_path / "model.gguf"
    save_gguf(path, tree.flatten(params), arch, Words(TOKENIZER, 0, 0), kind)
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert types["blk.0.attn_q.weight"] == types["token_embd.weight"] == kind
    assert types["output_norm.weight"] == "F32"
    for leaf, other in zip(tree.leaves(params), tree.leaves(again(path)[0]), strict=True):
        step = leaf.abs().max() / 127 if kind == "Q8_0" else leaf.abs().max() * 2**-10
        assert (other - leaf).abs().max() <= 0.51 * step


def test_the_file_says_what_a_reader_needs(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    arch = llama(rope_theta=5000.0)
    save_gguf(path, tree.flatten(random(arch)), arch, Words(TOKENIZER, None, 0, "{{ messages }}"))
    fields = gguf.GGUFReader(path).fields
    told = {name: field.contents() for name, field in fields.items()}
    assert told["llama.rope.freq_base"] == 5000.0
    assert told["llama.vocab_size"] == len(told["tokenizer.ggml.tokens"]) == VOCAB
    assert told["tokenizer.chat_template"] == "{{ messages }}" == open_gguf(path).chat_template
    assert (
        json.loads(tokenizer_of(open_gguf(path).file.metadata))["model"]["vocab"]
        == json.loads(TOKENIZER)["model"]["vocab"]
    )
    assert not (tmp_path / "model.gguf.part").exists()


def test_llama_3_is_written_as_factors_and_found_in_them(tmp_path: Path) -> None:
    # the values of huggingface/transformers' modeling_rope_utils for head_dim 8, theta 10000, factor 8, original 64
    rope = RopeSpec("llama3", 8.0, 64)
    scaled = [10000 ** (-i / 4) / factor for i, factor in enumerate(llama3_factors(rope, 10000.0, 8))]
    assert scaled == pytest.approx([1, 0.01304226, 0.00125, 0.000125], rel=1e-6)
    path = tmp_path / "model.gguf"
    arch = llama(rope=rope, context=512)
    save_gguf(path, tree.flatten(random(arch)), arch, Words(TOKENIZER, 0, 0))
    assert open_gguf(path).spec.rope == rope


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_a_stretched_rotation_comes_back(kind: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    arch = llama(rope=RopeSpec(kind, 4.0, 64 if kind == "yarn" else None), context=256)
    save_gguf(path, tree.flatten(random(arch)), arch, Words(TOKENIZER, 0, 0))
    assert not differences(arch, again(path)[1])


def test_a_model_that_gguf_cannot_hold_is_refused_before_a_file_is_begun(tmp_path: Path) -> None:
    arch = llama(embed_scale=True)
    with pytest.raises(ValueError, match="llama, would lose: embed_scale True"):
        family_of(arch)
    with pytest.raises(ValueError, match="no architecture of GGUF"):
        save_gguf(tmp_path / "model.gguf", tree.flatten(random(arch)), arch, Words(TOKENIZER, 0, 0))
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="F32, F16, Q8_0, not Q4_0"):
        save_gguf(tmp_path / "x", {}, llama(), Words(TOKENIZER, 0, 0), "Q4_0")


def edited(path: Path, edit: Any) -> Path:
    """Write a file again by gguf's own writer, after ``edit(metadata, tensors)``."""
    reader = gguf.GGUFReader(path)
    told = {n: f.contents() for n, f in reader.fields.items() if not n.startswith("GGUF.")}
    tensors = {t.name: np.array(t.data) for t in reader.tensors}
    edit(told, tensors)
    writer = gguf.GGUFWriter(path.with_name("edited.gguf"), told.pop("general.architecture"))
    for name, value in told.items():
        writer.add_key_value(name, value, gguf_save._type_of(gguf, value))
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.with_name("edited.gguf")


def key(name: str, value: Any) -> Any:
    return lambda keys, tensors: keys.update({name: value})


def tensor(name: str, *values: float) -> Any:
    return lambda keys, tensors: tensors.update({name: np.array(values, np.float32)})


EDITS: dict[str, tuple[Any, str]] = {
    "missing": (lambda keys, tensors: tensors.pop("blk.1.ffn_norm.weight"), r"missing: blk\.1\.ffn_norm"),
    "left-over": (tensor("blk.0.odd.weight", 1, 2), r"not of this model: blk\.0\.odd"),
    "shape": (tensor("output_norm.weight", 1, 2, 3), r"is \[3\], the config calls for \[32\]"),
    "architecture": (key("general.architecture", "mamba"), "'mamba'; known are qwen2, qwen3"),
    "no-key": (lambda keys, tensors: keys.pop("llama.block_count"), r"llama\.block_count is missing"),
    "no-heads": (key("llama.attention.head_count", 0), "head_count is missing, or no natural"),
    "per-layer": (key("llama.attention.head_count_kv", [2, 1]), "head_count_kv"),
    "value-length": (key("llama.attention.value_length", 4), "different sizes"),
    "key-length": (key("llama.attention.key_length", 0), "cannot be"),
    "key-type": (key("llama.attention.key_length", "8"), "GGUF's keys of llama"),
    "rope": (key("llama.rope.scaling.type", "longrope"), "longrope"),
    "no-factor": (key("llama.rope.scaling.type", "yarn"), r"rope\.scaling\.factor is missing"),
    "factors": (tensor("rope_freqs.weight", 1, 2, 3, 9), "Llama 3's"),
    "layers": (key("llama.block_count", 1 << 31), "block_count: 2147483648 has to lie between"),
    "experts": (key("llama.expert_count", 4), "expert_used_count is missing"),
}


@pytest.mark.parametrize("name", list(EDITS))
def test_a_file_that_is_not_this_model_is_refused_by_name(name: str, tmp_path: Path) -> None:
    arch = llama()
    path = tmp_path / "model.gguf"
    save_gguf(path, tree.flatten(random(arch)), arch, Words(TOKENIZER, 0, 0), "F32")
    assert not differences(arch, again(edited(path, lambda k, t: None))[1])
    edit, what = EDITS[name]
    with pytest.raises(ValueError, match=what):
        again(edited(path, edit))


OTHER: dict[str, tuple[Any, str]] = {
    "olmo2": (key("olmo2.attention.sliding_window", 8), "sliding_window is 8"),
    "mpt": (key("mpt.attention.max_alibi_bias", 0.0), "max_alibi_bias is 0.0"),
    "gptneox": (lambda keys, tensors: keys.pop("gptneox.use_parallel_residual"), "use_parallel_residual is missing"),
    "phi3": (lambda keys, tensors: tensors.pop("rope_factors_short.weight"), "rope_factors_short is missing"),
}


@pytest.mark.parametrize("family", list(OTHER))
def test_a_file_of_other_mathematics_is_refused(family: str, tmp_path: Path) -> None:
    """OLMo 3's windows, MPT without ALiBi, and what says too little."""
    config = CONFIGS[CONVERTED[family]]()
    config.vocab_size = VOCAB
    drawn(config).save_pretrained(tmp_path)
    params, arch = taken_in(tmp_path)
    path = tmp_path / "model.gguf"
    save_gguf(path, tree.flatten(params), arch, Words(TOKENIZER, 0, 0), "F32")
    edit, what = OTHER[family]
    with pytest.raises(ValueError, match=what):
        open_gguf(edited(path, edit))


def test_the_parts_of_a_mesh_are_those_of_the_whole(tmp_path: Path) -> None:
    arch = complete(
        attrs.evolve(
            ModelSpec(vocab_size=VOCAB, width=32, layers=2, heads=4, kv_heads=2, ffn=64),
            moe=attrs.evolve(ModelSpec().moe, experts=4),
        ),
        1,
    )
    params = random(arch)
    path = tmp_path / "model.gguf"
    save_gguf(path, tree.flatten(params), arch, Words(TOKENIZER, 0, 0), "F32")
    for whole in fake.run(lambda mesh: unshard(again(path, mesh)[0], table(False), mesh), tp=2, ep=2):
        equal(whole, params)
