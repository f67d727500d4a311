"""What a machine or a person gets wrong is one line with the place and the remedy, and costs nothing that was there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from drivers.main import main

SPEC = """
name: tiny
out: {folder}/runs
model: {{width: 16, layers: 1, heads: 2, ffn: 16, context: 16}}
data:
  dir: {folder}/data
  sets: {{notes: {{sources: ["{folder}/notes.txt"], split_on: "\\n"}}}}
  tokenizer: {{vocab_size: 270}}
  split: {{validation: 0}}
  length: 16
train: {{steps: 4, batch: 2, threads: 1}}
checkpoint: {{every: 2}}
report: {{sample_tokens: 2, peak_flops: 1e11}}
"""


def ironfn(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def refused(result: Result, *parts: str) -> None:
    assert result.exit_code == 1, result.output
    line = result.output.strip().split("\n")[-1]
    assert line.startswith("Error: "), result.output
    assert isinstance(result.exception, SystemExit)
    for part in parts:
        assert part in line


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    (tmp_path / "notes.txt").write_text("\n".join(f"note {n} of many, all of them short" for n in range(60)))
    path = tmp_path / "tiny.yaml"
    path.write_text(SPEC.format(folder=tmp_path))
    assert ironfn("prepare", path).exit_code == 0
    return path


def test_a_file_where_a_directory_belongs(spec: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(ironfn("pretrain", spec, "-s", f"out={tmp_path}/file"), f"{tmp_path}/file")
    refused(ironfn("prepare", spec, "-s", f"data.dir={tmp_path}/file"), f"{tmp_path}/file")


def test_lost_checkpoints_do_not_cost_the_history(spec: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "tiny"
    assert ironfn("pretrain", spec).exit_code == 0
    before = (run / "metrics.jsonl").read_bytes()
    shutil.rmtree(run / "checkpoints")
    refused(ironfn("pretrain", spec), "4 steps", "holds no checkpoint", "--restart")
    assert (run / "metrics.jsonl").read_bytes() == before
    assert ironfn("pretrain", spec, "--restart").exit_code == 0


def test_a_finished_run_is_not_cut_short(spec: Path, tmp_path: Path) -> None:
    assert ironfn("pretrain", spec).exit_code == 0
    before = (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_bytes()
    refused(ironfn("pretrain", spec, "-s", "train.steps=3"), "step-00000004 is past train.steps 3")
    assert (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("damage", [b"a: [b", b"\xff\xfe", b""])
def test_a_damaged_spec_in_the_run_is_named(spec: Path, tmp_path: Path, damage: bytes) -> None:
    assert ironfn("pretrain", spec).exit_code == 0
    (tmp_path / "runs" / "tiny" / "spec.yaml").write_bytes(damage)
    refused(ironfn("pretrain", spec), f"{tmp_path}/runs/tiny/spec.yaml is damaged", "delete it")


def test_prompts_and_temperatures_that_are_none(spec: Path, tmp_path: Path) -> None:
    assert ironfn("pretrain", spec).exit_code == 0
    run = tmp_path / "runs" / "tiny"
    refused(ironfn("generate", run, "-p", "a\udcff"), "not valid Unicode at character 1")
    refused(ironfn("generate", run, "-t", "nan"), "temperature nan")
    assert ironfn("generate", run, "-t", "1e-320", "--tokens", "2").exit_code == 0
    bad = ironfn("pretrain", spec, "-s", 'report.prompts=["\\ud800"]')
    assert bad.exit_code == 78
    assert "report.prompts" in bad.output


def test_more_than_the_machine_has(spec: Path) -> None:
    for key, value in (("model.layers", 10**18), ("train.batch", 10**11), ("train.threads", 10**6)):
        result = ironfn("pretrain", spec, "-s", f"{key}={value}")
        assert result.exit_code == 78
        assert f"{key}: {value} has to lie between 1 and" in result.output
    refused(ironfn("pretrain", spec, "-s", "model.width=1000000000"), "not enough memory", "smaller model")


def test_loops_and_pipes_among_sources_are_passed_over(spec: Path, tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / "loop").symlink_to("loop")
    (folder / "note.txt").write_text("one note\n" * 20)
    sources = f'data.sets.notes.sources=["{folder}"]'
    result = ironfn("prepare", spec, "-s", sources, "-s", "data.split.validation=0")
    assert result.exit_code == 0, result.output
    assert "1 files" in result.output
