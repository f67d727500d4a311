"""The models that a preset names have the published numbers of parameters, and every preset is a spec."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

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
