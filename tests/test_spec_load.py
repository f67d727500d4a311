"""Load specs: files over files, overrides over files, presets beneath them, and back to YAML."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from attrs import evolve

from ironfn.model.families import PRESETS
from ironfn.spec.load import dump_spec, load_spec
from ironfn.spec.records import ModelSpec, RunSpec

SHIPPED = sorted((Path(__file__).parents[1] / "specs").rglob("*.yaml"))


def load(tmp_path: Path, *texts: str, overrides: tuple[str, ...] = ()) -> RunSpec:
    files = [tmp_path / f"{number}.yaml" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text, encoding="utf-8")
    return load_spec(files, overrides, PRESETS)


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_shipped_spec_loads_and_says_what_it_is(file: Path) -> None:
    spec = load_spec([file], [], PRESETS)
    assert spec.name == file.stem
    assert file.read_text().startswith("# ")


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_the_dump_of_a_spec_loads_as_the_same_spec(file: Path, tmp_path: Path) -> None:
    hard = r"""report.prompts=['no', '1e-5', "a\n b: #\t", "\x85", "é\u2028\0"]"""
    spec = load_spec([file], [hard, "optim.groups.wq$=adamw"], PRESETS)
    assert spec.report.prompts[2:] == ["a\n b: #\t", "\x85", "é\u2028\0"]
    assert load(tmp_path, dump_spec(spec)) == spec


def test_later_files_and_then_overrides_win(tmp_path: Path) -> None:
    base = "name: base\noptim: {lr: 1e-3, adamw: {beta1: 0.8, eps: 1e-6}}\nreport: {prompts: [a, b]}\n"
    top = "optim: {lr: 1e-4, adamw: {beta1: 0.7}}\nreport: {prompts: [c]}\ntrain:\n"
    spec = load(tmp_path, base, top, overrides=("optim.adamw.beta1=0.6", "optim.adamw={beta2: 0.5}"))
    assert (spec.name, spec.optim.lr, spec.report.prompts) == ("base", 1e-4, ["c"])
    assert (spec.optim.adamw.beta1, spec.optim.adamw.beta2, spec.optim.adamw.eps) == (0.6, 0.5, 1e-6)


def test_sets_join_by_name_and_replace_the_default(tmp_path: Path) -> None:
    base = "data: {sets: {a: {sources: [x]}, b: {sources: [y]}}}\n"
    spec = load(tmp_path, base, "data: {sets: {b: {weight: 2}}}\n", overrides=("data.sets.a.fim.rate=0.5",))
    assert list(spec.data.sets) == ["a", "b"]
    assert (spec.data.sets["b"].sources, spec.data.sets["b"].weight) == (["y"], 2.0)
    assert spec.data.sets["a"].fim.rate == 0.5


def test_a_group_is_overridden_by_its_whole_regex(tmp_path: Path) -> None:
    spec = load(tmp_path, "{name: x}", overrides=("optim.groups.blocks/.*/attn.w[qk]$=adamw_no_decay",))
    assert spec.optim.groups == {"blocks/.*/attn.w[qk]$": "adamw_no_decay"}


def test_the_value_of_an_override_is_yaml(tmp_path: Path) -> None:
    spec = load(
        tmp_path,
        "name: x",
        overrides=("report.prompts=[a, 'b=c']", "optim.clip=null", "train.remat=true", "name='3'", "data.dir=a=b"),
    )
    assert (spec.report.prompts, spec.optim.clip, spec.train.remat) == (["a", "b=c"], None, True)
    assert (spec.name, spec.data.dir) == ("3", "a=b")


def test_a_preset_lies_beneath_the_file(tmp_path: Path) -> None:
    spec = load(tmp_path, "model: {preset: gpt2, attention_bias: false}")
    assert (spec.model.norm, spec.model.positions, spec.model.mlp) == ("layer", "learned", "gelu_tanh")
    assert spec.model.attention_bias is False
    assert spec.model.mlp_bias is True
    assert load(tmp_path, "name: x").model == evolve(ModelSpec(), **PRESETS["llama"])
    chosen_late = load(tmp_path, "model: {width: 128, heads: 4}", overrides=("model.preset=gpt2",))
    assert (chosen_late.model.norm, chosen_late.model.width) == ("layer", 128)


def test_anchors_and_aliases_stand_for_what_they_name(tmp_path: Path) -> None:
    spec = load(tmp_path, "data:\n  sets:\n    a: &a {sources: &s [x], weight: 2}\n    b: *a\n    c: {sources: *s}\n")
    assert spec.data.sets["a"] == spec.data.sets["b"]
    assert spec.data.sets["c"].sources == ["x"]


def test_an_empty_section_is_its_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, "name: x\noptim:\ndata:\n  tokenizer:\n  # kind: bpe\n").optim == RunSpec().optim


def test_a_byte_order_mark_windows_ends_and_a_pipe_are_read(tmp_path: Path) -> None:
    assert load(tmp_path, "\ufefftrain:\r\n  steps: 7\r\n").train.steps == 7
    code = (
        "from pathlib import Path; from ironfn.spec.load import load_spec;"
        "print(load_spec([Path('/dev/stdin')], [], {}).train.steps)"
    )
    done = subprocess.run([sys.executable, "-c", code], input="train: {steps: 7}", capture_output=True, text=True)
    assert done.stdout == "7\n", done.stderr


def test_a_spec_loads_without_torch() -> None:
    code = "import ironfn.spec.load, sys; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
