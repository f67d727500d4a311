"""The models that a preset names have the published numbers of parameters, and every preset is a spec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import transformers as t

from ironfn.model.arch import complete
from ironfn.model.counting import parameters
from ironfn.model.families import NAMED, PRESETS, model_spec
from ironfn.model.sizes import SIZES
from ironfn.spec.load import load_spec

PUBLISHED = {
    "gpt2-small": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616, "llama-13b": 13_015_864_320, "llama-30b": 32_528_943_616, "llama-65b": 65_285_660_672,
    "llama2-7b": 6_738_415_616, "llama2-13b": 13_015_864_320, "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248, "llama3.1-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400, "llama3.2-3b": 3_212_749_824,
    "smollm2-135m": 134_515_008, "smollm2-360m": 361_821_120, "smollm2-1.7b": 1_711_376_384,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512, "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264,
    "gemma-2b": 2_506_172_416, "gemma-7b": 8_537_680_896,
    "gemma2-2b": 2_614_341_888, "gemma2-9b": 9_241_705_984, "gemma2-27b": 27_227_128_320,
    "gemma3-1b": 999_885_952, "gemma3-4b": 3_880_263_168, "gemma3-12b": 11_766_034_176,
    "phi-1": 1_418_270_720, "phi-1.5": 1_418_270_720, "phi-2": 2_779_683_840, "phi3-mini": 3_821_079_552,
    "pythia-70m": 70_426_624, "pythia-160m": 162_322_944, "pythia-410m": 405_334_016, "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808, "pythia-2.8b": 2_775_208_960, "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320, "gpt-neox-20b": 20_554_567_680,
    "stablelm-3b": 2_795_443_200,
    "olmo2-1b": 1_484_916_736, "olmo2-7b": 7_298_617_344, "olmo2-13b": 13_716_198_400,
    "mpt-7b": 6_649_286_656, "mpt-30b": 29_957_200_896,
    "bloom-560m": 559_214_592, "bloom-1b7": 1_722_408_960, "bloom-7b1": 7_069_016_064, "bloom-176b": 176_247_271_424,
    "mixtral-8x7b": 46_702_792_704, "mixtral-8x22b": 140_630_071_296,
    "qwen1.5-moe-a2.7b": 14_315_784_192, "qwen3-30b-a3b": 30_532_122_624, "olmoe-1b-7b": 6_919_161_856,
}  # fmt: skip
"""What the models' files hold; of Gemma 3 from 4b on without the part that sees pictures."""

ROUNDED = {
    "gpt3-small": 125e6, "gpt3-medium": 356e6, "gpt3-large": 760e6, "gpt3-xl": 1320e6, "gpt3-2.7b": 2650e6,
    "gpt3-6.7b": 6660e6, "gpt3-13b": 12850e6, "gpt3-175b": 174600e6,
}  # fmt: skip
"""Brown et al. 2020, arXiv 2005.14165, appendix D."""


@pytest.mark.parametrize("name", SIZES)
def test_a_model_has_the_published_number_of_parameters(name: str) -> None:
    found = parameters(complete(model_spec(name), 0))
    if name in ROUNDED:
        assert found == pytest.approx(ROUNDED[name], rel=4e-3)
    else:
        assert found == PUBLISHED[name]


def _config(width: int, layers: int, heads: int, ffn: int, vocab: int, kv: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": ffn,
        "vocab_size": vocab, "num_key_value_heads": kv, **more,
    }  # fmt: skip


_TIED: dict[str, Any] = {"tie_word_embeddings": True}
CONFIGS: dict[str, tuple[type[t.PretrainedConfig], dict[str, Any]]] = {
    "gpt2-small": (t.GPT2Config, {"n_embd": 768, "n_layer": 12, "n_head": 12}),
    "gpt2-medium": (t.GPT2Config, {"n_embd": 1024, "n_layer": 24, "n_head": 16}),
    "gpt2-large": (t.GPT2Config, {"n_embd": 1280, "n_layer": 36, "n_head": 20}),
    "gpt2-xl": (t.GPT2Config, {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "llama-7b": (t.LlamaConfig, _config(4096, 32, 32, 11008, 32000, 32)),
    "llama-13b": (t.LlamaConfig, _config(5120, 40, 40, 13824, 32000, 40)),
    "llama2-70b": (t.LlamaConfig, _config(8192, 80, 64, 28672, 32000, 8)),
    "llama3-8b": (t.LlamaConfig, _config(4096, 32, 32, 14336, 128256, 8)),
    "llama3.2-1b": (t.LlamaConfig, _config(2048, 16, 32, 8192, 128256, 8, head_dim=64, **_TIED)),
    "mistral-7b": (t.MistralConfig, _config(4096, 32, 32, 14336, 32000, 8)),
    "gemma-2b": (t.GemmaConfig, _config(2048, 18, 8, 16384, 256000, 1, head_dim=256)),
    "gemma-7b": (t.GemmaConfig, _config(3072, 28, 16, 24576, 256000, 16, head_dim=256)),
    "gemma2-2b": (t.Gemma2Config, _config(2304, 26, 8, 9216, 256000, 4, head_dim=256)),
    "gemma3-1b": (t.Gemma3TextConfig, _config(1152, 26, 4, 6912, 262144, 1, head_dim=256)),
    "qwen2.5-0.5b": (t.Qwen2Config, _config(896, 24, 14, 4864, 151936, 2, **_TIED)),
    "qwen2.5-7b": (t.Qwen2Config, _config(3584, 28, 28, 18944, 152064, 4)),
    "qwen3-0.6b": (t.Qwen3Config, _config(1024, 28, 16, 3072, 151936, 8, head_dim=128, **_TIED)),
    "phi-2": (t.PhiConfig, _config(2560, 32, 32, 10240, 51200, 32, partial_rotary_factor=0.4)),
    "phi3-mini": (t.Phi3Config, _config(3072, 32, 32, 8192, 32064, 32, pad_token_id=None)),
    "mpt-7b": (t.MptConfig, {"d_model": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": 50432}),
    "bloom-560m": (t.BloomConfig, {"hidden_size": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 250880}),
    "mixtral-8x7b": (t.MixtralConfig, _config(4096, 32, 32, 14336, 32000, 8, num_local_experts=8)),
    "qwen1.5-moe-a2.7b": (
        t.Qwen2MoeConfig,
        _config(2048, 24, 16, 5632, 151936, 16)
        | {"num_experts": 60, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    ),
    "qwen3-30b-a3b": (
        t.Qwen3MoeConfig,
        _config(2048, 48, 32, 6144, 151936, 4, head_dim=128, num_experts=128, moe_intermediate_size=768),
    ),
    "olmoe-1b-7b": (t.OlmoeConfig, _config(2048, 16, 16, 1024, 50304, 16, num_experts=64)),
}
"""What the models' own config files say, in their words."""


@pytest.mark.parametrize("name", list(CONFIGS))
def test_transformers_counts_as_many_for_the_published_config(name: str) -> None:
    """By its own modules, without memory; with one layer and with two, as all are alike."""
    kind, fields = CONFIGS[name]
    key = next(key for key in ("num_hidden_layers", "n_layer", "n_layers") if key in fields)

    def count(layers: int) -> int:
        with torch.device("meta"):
            return t.AutoModelForCausalLM.from_config(kind(**fields | {key: layers})).num_parameters()

    one, two = count(1), count(2)
    assert parameters(complete(model_spec(name), 0)) == one + (fields[key] - 1) * (two - one)


@pytest.mark.parametrize("name", NAMED)
def test_a_preset_in_a_file_is_the_preset_in_python(name: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {{preset: {name}, layers: 4}}\ndata: {{length: 64}}\n")
    assert load_spec([file], [], NAMED).model == model_spec(name, layers=4)


def test_a_file_lays_its_values_over_those_of_a_preset(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {preset: olmoe-1b-7b, moe: {experts: 16}, rope: {kind: linear, factor: 2}}\n")
    model = load_spec([file], ["model.moe.top_k=4"], NAMED).model
    assert (model.moe.experts, model.moe.top_k, model.moe.renormalize) == (16, 4, False)
    assert model == model_spec("olmoe-1b-7b", moe={"experts": 16, "top_k": 4}, rope={"kind": "linear", "factor": 2.0})
    bare = tmp_path / "bare.yaml"
    bare.write_text("model:\n  preset: llama3.1\n  moe:\n  rope:\n")
    assert load_spec([bare], [], NAMED).model.rope.factor == 8.0


def test_the_names_of_the_page_are_those_that_exist() -> None:
    """docs/families.md writes each group of names with its first part once."""
    page = (Path(__file__).parents[1] / "docs/families.md").read_text(encoding="utf-8")
    assert all(f"`{family}`" in page for family in PRESETS)
    groups = page.split("test_sizes.py`:")[1].split("`dynamic`")[0].replace("\n", " ").rstrip(" .").split(";")
    names: list[str] = []
    for group in groups:
        first, *others = (name.strip() for name in group.split(","))
        names += [first, *(first.split("-")[0] + other if other.startswith("-") else other for other in others)]
    assert names == list(SIZES)


def test_a_named_model_keeps_what_its_family_says() -> None:
    for name, (family, fields) in SIZES.items():
        spec = model_spec(name)
        for field, value in PRESETS[family].items():
            if field not in fields:
                found = getattr(spec, field)
                given = {n: getattr(found, n) for n in value} if attrs.has(type(found)) else found  # type: ignore[attr-defined]
                assert given == value, (name, field)
