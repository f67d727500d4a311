"""Adapters to and from `peft`: the same logits, the same bits, for every way that families lay their modules out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from ironfn import tree
from ironfn.hf.directory import describe
from ironfn.hf.peft import CONFIG, WEIGHTS, Loaded, load_adapter, save_adapter
from ironfn.mesh.axis import SINGLE
from ironfn.model.adapters import Adapting, first_adapter, merge
from ironfn.model.arch import Arch
from ironfn.model.forward import Forward
from ironfn.model.tables import table
from ironfn.model.transformer import logits
from ironfn.spec.adapter_records import AdapterSpec
from ironfn.types import Params
from tests.hf_models import VOCAB, logits_of, model_of, quiet, taken_in

FAMILIES = ["gpt2", "llama", "llama-biased", "gemma2", "phi3", "gpt-neox", "bloom", "mpt", "olmo2", "qwen2-moe"]
TOKENS = torch.randint(0, VOCAB, (2, 10), generator=torch.Generator().manual_seed(0))
pytestmark = [
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*:UserWarning"),
]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a directory of each family's base model, whose config says nothing of an attention."""
    found = {name: tmp_path_factory.mktemp(name) for name in FAMILIES}
    with quiet():
        for name, path in found.items():
            model_of(name).save_pretrained(path)
    return found


def peft_of(name: str, **options: Any) -> Any:
    """Return a `peft` model whose adapters change it."""
    options = {"target_modules": "all-linear", "fan_in_fan_out": name == "gpt2"} | options
    config = LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **options)
    model = get_peft_model(model_of(name), config).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if weight.requires_grad and "modules_to_save" not in path:
                weight.add_(torch.randn_like(weight) * 0.1)
    return model


def near(found: Tensor, expected: Tensor) -> None:
    """Hold logits to 1e-5 of their size."""
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def ours(base: Params, loaded: Loaded) -> Tensor:
    how = Forward(adapt=Adapting(loaded.spec))
    whole = tree.unflatten(tree.flatten(base) | loaded.replaced)
    return logits(tree.merge(whole, loaded.params), {"tokens": TOKENS}, loaded.arch, SINGLE, how)


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_peft_saves_is_read_and_written_bit_for_bit(
    name: str, kind: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    theirs = peft_of(name, use_rslora=kind == "rslora", use_dora=kind == "dora")
    theirs.save_pretrained(tmp_path / "theirs")
    base, arch = taken_in(bases[name])
    family = describe(bases[name]).family
    loaded = load_adapter(tmp_path / "theirs", arch, family)
    assert loaded.spec.scale == {"lora": 1.5, "rslora": 3.0, "dora": 1.5}[kind]
    expected = logits_of(theirs, TOKENS)
    near(ours(base, loaded), expected)
    assert (expected - logits_of(model_of(name), TOKENS)).abs().max() > 1e-2
    whole, without = merge(loaded.spec, loaded.arch, base, loaded.params)
    near(logits(whole, {"tokens": TOKENS}, without, SINGLE), expected)
    near(logits_of(theirs.merge_and_unload(), TOKENS), expected)
    save_adapter(tmp_path / "ours", loaded.spec, arch, loaded.params, family)
    same_files(tmp_path / "ours", tmp_path / "theirs")


def same_files(mine: Path, theirs: Path) -> None:
    found, expected = load_file(mine / WEIGHTS), load_file(theirs / WEIGHTS)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
    a, b = (json.loads((path / CONFIG).read_text()) for path in (mine, theirs))
    for key in ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "fan_in_fan_out", "rank_pattern", "bias"):
        assert a[key] == b[key], key


def drawn(spec: AdapterSpec, arch: Arch, base: Params) -> Params:
    torch.manual_seed(2)
    first = first_adapter(spec, arch, base, 0, table(False))
    return tree.map(lambda x: x + torch.randn_like(x) * 0.1, first)


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("llama", AdapterSpec("lora", 3, 5.0, rslora=True, targets=["all-linear", "embed/tokens", "head/w"])),
        ("llama-biased", AdapterSpec("lora", 3, 5.0, targets=["all-linear", "embed/tokens"])),
        ("llama", AdapterSpec("lora", 3, 5.0, dora=True, targets=["^blocks/1/attn/w[qv]", "head/w"])),
        ("gpt2", AdapterSpec("lora", 3, 5.0, targets=["all-linear"])),
        ("gpt2", AdapterSpec("lora", 3, 5.0, targets=["^blocks/0/attn/w[qv]", "^blocks/1/mlp/w_up"])),
        ("phi3", AdapterSpec("lora", 3, 5.0, dora=True, targets=["all-linear"])),
        ("gpt-neox", AdapterSpec("lora", 3, 5.0, rslora=True, targets=["all-linear"])),
        ("bloom", AdapterSpec("lora", 3, 5.0, targets=["attn/wk", "mlp/w_down"])),
        ("qwen2-moe", AdapterSpec("lora", 3, 5.0, targets=["all-linear"])),
    ],
    ids=["tables", "tied", "some, DoRA", "fused", "a part of fused", "fused, DoRA", "interleaved", "part", "experts"],
)
def test_peft_reads_what_is_written(name: str, spec: AdapterSpec, bases: dict[str, Path], tmp_path: Path) -> None:
    base, arch = taken_in(bases[name])
    family, adapter = describe(bases[name]).family, drawn(spec, arch, base)
    save_adapter(tmp_path / "a", spec, arch, adapter, family, str(bases[name]))
    theirs = PeftModel.from_pretrained(model_of(name), str(tmp_path / "a")).eval()
    found = ours(base, Loaded(spec, adapter, {}, arch))
    near(found, logits_of(theirs, TOKENS))
    near(ours(base, load_adapter(tmp_path / "a", arch, family)), found)
    theirs.save_pretrained(tmp_path / "b")
    kept = load_file(tmp_path / "b" / WEIGHTS)
    for path, tensor in load_file(tmp_path / "a" / WEIGHTS).items():
        assert torch.equal(tensor, kept[path]), path


def test_a_padded_table_goes_out_without_its_padding(bases: dict[str, Path], tmp_path: Path) -> None:
    spec = AdapterSpec("lora", 3, 5.0, targets=["embed/tokens", "head/w"])
    base, arch = taken_in(bases["llama"], pad=128)
    family, adapter = describe(bases["llama"]).family, drawn(spec, arch, base)
    save_adapter(tmp_path / "a", spec, arch, adapter, family)
    again = load_adapter(tmp_path / "a", arch, family)
    assert arch.rows == 128 > arch.vocab
    near(ours(base, again), ours(base, Loaded(spec, adapter, {}, arch)))


@pytest.mark.parametrize("name", ["llama", "llama-biased"], ids=["untied", "tied"])
def test_what_an_adapter_brings_along_whole_is_taken(name: str, bases: dict[str, Path], tmp_path: Path) -> None:
    theirs = peft_of(name, target_modules=["q_proj"], modules_to_save=["lm_head"])
    with torch.no_grad():
        for path, weight in theirs.named_parameters():
            if "modules_to_save" in path:
                weight.add_(torch.randn_like(weight) * 0.1)
    theirs.save_pretrained(tmp_path / "a")
    base, arch = taken_in(bases[name])
    loaded = load_adapter(tmp_path / "a", arch, describe(bases[name]).family)
    assert set(loaded.replaced) == {"head/w"}
    assert not loaded.arch.tied
    near(ours(base, loaded), logits_of(theirs, TOKENS))


def test_modules_with_a_scale_of_their_own_keep_it(bases: dict[str, Path], tmp_path: Path) -> None:
    patterns = {"rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 7}, "alpha_pattern": {"q_proj": 9}}
    theirs = peft_of("llama", **patterns)
    theirs.save_pretrained(tmp_path / "a")
    base, arch = taken_in(bases["llama"])
    near(ours(base, load_adapter(tmp_path / "a", arch, describe(bases["llama"]).family)), logits_of(theirs, TOKENS))


def test_first_values_come_from_pefts_ranges(bases: dict[str, Path]) -> None:
    targets = ["q_proj", "down_proj", "lm_head", "embed_tokens"]
    config = LoraConfig(r=64, task_type="CAUSAL_LM", target_modules=targets)
    theirs = dict(get_peft_model(model_of("llama"), config).named_parameters())
    base, arch = taken_in(bases["llama"])
    spec = AdapterSpec("lora", 64, targets=["attn/wq", "w_down", "head/w", "embed/tokens"])
    mine = tree.flatten(first_adapter(spec, arch, base, 0, table(False)))
    layer, end = "base_model.model.model.layers.0.", ".default.weight"
    pairs = {
        "blocks/0/attn/wq_lora/a": f"{layer}self_attn.q_proj.lora_A{end}",
        "blocks/0/attn/wq_lora/b": f"{layer}self_attn.q_proj.lora_B{end}",
        "blocks/0/mlp/w_down_lora/a": f"{layer}mlp.down_proj.lora_A{end}",
        "head/w_lora/b": f"base_model.model.lm_head.lora_A{end}",
        "head/w_lora/a": f"base_model.model.lm_head.lora_B{end}",
        "embed/tokens_lora/a": "base_model.model.model.embed_tokens.lora_embedding_A.default",
        "embed/tokens_lora/b": "base_model.model.model.embed_tokens.lora_embedding_B.default",
    }
    for path, name in pairs.items():
        ours_, other = mine[path], theirs[name].detach()
        assert ours_.numel() == other.numel()
        assert float(ours_.std()) == pytest.approx(float(other.std()), rel=0.05), path
        if "embed" not in path:
            assert float(ours_.abs().max()) == pytest.approx(float(other.abs().max()), rel=0.02), path


def saved(path: Path, bases: dict[str, Path]) -> tuple[Arch, Any]:
    base, arch = taken_in(bases["llama"])
    family, spec = describe(bases["llama"]).family, AdapterSpec("lora", 3, 5.0, targets=["attn/wq"])
    save_adapter(path, spec, arch, drawn(spec, arch, base), family)
    return arch, family


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "IA3"}, "'IA3' is not read"),
        ({"peft_type": "PROMPT_TUNING"}, "num_virtual_tokens None"),
        ({"bias": "all"}, "trained biases"),
        ({"r": 0}, "r 0 is no rank"),
        ({"r": "8"}, "r '8' is no rank"),
        ({"lora_alpha": None}, "lora_alpha None"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters cannot be read"),
        ({"alpha_pattern": {"q_proj": "x"}}, "has the alpha 'x'"),
        ({"use_dora": True}, "has no base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"),
    ],
    ids=["kind", "prompt", "bias", "no rank", "a word", "no alpha", "experts", "alpha", "no lengths"],
)
def test_a_config_that_is_not_ours_is_refused(
    changes: dict[str, Any], said: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    arch, family = saved(tmp_path / "a", bases)
    file = tmp_path / "a" / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=said):
        load_adapter(tmp_path / "a", arch, family)


def test_tensors_that_do_not_fit_are_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    arch, family = saved(tmp_path / "a", bases)
    file = tmp_path / "a" / WEIGHTS
    tensors = load_file(file)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    damaged = [
        ({k: v for k, v in tensors.items() if k != name}, f"has no {name}"),
        (tensors | {name: torch.zeros(31, 3)}, r"is \[31, 3\], this model calls for \[32, 3\]"),
        (tensors | {"base_model.model.model.layers.9.self_attn.q_proj.lora_B.weight": torch.zeros(1)}, "no place for"),
        (tensors | {name: torch.zeros(32, 3, dtype=torch.int64)}, "not numbers that are trained"),
        ({}, "holds no adapter"),
    ]
    for content, said in damaged:
        save_file(content, file)
        with pytest.raises(ValueError, match=said):
            load_adapter(tmp_path / "a", arch, family)
    file.rename(tmp_path / "a" / "adapter_model.bin")
    with pytest.raises(ValueError, match="save the adapter with peft's"):
        load_adapter(tmp_path / "a", arch, family)


def test_what_peft_cannot_say_is_refused_and_leaves_nothing(bases: dict[str, Path], tmp_path: Path) -> None:
    base, arch = taken_in(bases["qwen2-moe"])
    spec = AdapterSpec("lora", 3, targets=["experts"])
    with pytest.raises(ValueError, match="experts are not written"):
        save_adapter(tmp_path / "a", spec, arch, drawn(spec, arch, base), describe(bases["qwen2-moe"]).family)
    base, arch = taken_in(bases["gpt2"])
    spec = AdapterSpec("lora", 3, dora=True, targets=["attn/wq"])
    with pytest.raises(ValueError, match="DoRA has to take all of"):
        save_adapter(tmp_path / "a", spec, arch, drawn(spec, arch, base), describe(bases["gpt2"]).family)
    assert list(tmp_path.iterdir()) == []


def test_the_scale_of_a_fused_module_stays(bases: dict[str, Path], tmp_path: Path) -> None:
    base, arch = taken_in(bases["gpt2"])
    family, spec = describe(bases["gpt2"]).family, AdapterSpec("lora", 3, 5.0, rslora=True, targets=["attn/w"])
    save_adapter(tmp_path / "a", spec, arch, drawn(spec, arch, base), family)
    config = json.loads((tmp_path / "a" / CONFIG).read_text())
    assert set(config["rank_pattern"].values()) == {9}
    for alpha in config["alpha_pattern"].values():
        assert alpha / math.sqrt(9) == pytest.approx(5 / math.sqrt(3), rel=1e-15)
