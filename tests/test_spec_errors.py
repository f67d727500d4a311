"""Hold the errors of a spec to the words a user reads: where, which field, what, and what to write instead."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from ironfn.model.families import PRESETS
from ironfn.spec.errors import SpecError
from ironfn.spec.hints import SYNONYMS
from ironfn.spec.load import load_spec
from ironfn.spec.records import RunSpec
from ironfn.spec.structure import fields_of

KEYS = ", ".join(field.name for field in attrs.fields(RunSpec))


def faults(tmp_path: Path, text: str | bytes, *overrides: str, ranks: int | None = None) -> list[str]:
    """Return the lines of the error that a spec of this text gives, without the directory of the file."""
    file = tmp_path / "run.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SpecError) as caught:
        load_spec([file], overrides, PRESETS, ranks)
    return str(caught.value).replace(f"{tmp_path}/", "").split("\n")


def test_all_faults_of_a_file_are_told_at_once_in_its_order(tmp_path: Path) -> None:
    text = """\
learning_rate: 1e-4
model:
  wdith: 3
  heads: 3.7
  layers: True
train:
  steps: "10"
  compile: no
  batch: 1e2
  batch: 2
optim: {schedule: {warmup: -1, kind: cosin}}
num-epochs: 3
data:
  sets:
    a: {fim: {rate: 1.5}, source: x}
    b: {sources: x}
"""
    assert faults(tmp_path, text, "optim.lrr=3", "optim.lr=x") == [
        "run.yaml:1:1 learning_rate: unknown key; did you mean optim.lr?",
        "run.yaml:3:3 model.wdith: unknown key; did you mean width?",
        "run.yaml:4:10 model.heads: 3.7 is not an integer",
        "run.yaml:5:11 model.layers: true is not an integer",
        "run.yaml:7:10 train.steps: '10' is not an integer",
        "run.yaml:8:12 train.compile: 'no' is neither true nor false; write false",
        "run.yaml:9:10 train.batch: 100.0 is not an integer; write 100",
        "run.yaml:10:3 train.batch: is there twice; the first stands at line 9",
        "run.yaml:11:28 optim.schedule.warmup: -1 cannot be negative",
        "run.yaml:11:38 optim.schedule.kind: 'cosin' is not one of "
        "'constant', 'linear', 'cosine', 'polynomial', 'wsd'; did you mean 'cosine'?",
        "run.yaml:12:1 num-epochs: unknown key; did you mean train.steps?",
        "run.yaml:15:5 data.sets.a.sources: is missing",
        "run.yaml:15:21 data.sets.a.fim.rate: 1.5 has to lie between 0 and 1",
        "run.yaml:15:27 data.sets.a.source: unknown key; did you mean sources?",
        "run.yaml:16:18 data.sets.b.sources: 'x' is not a list; write [x]",
        "-s optim.lrr=3 optim.lrr: unknown key; did you mean lr?",
        "-s optim.lr=x optim.lr: 'x' is not a number",
    ]


def test_all_faults_of_all_files_are_told_even_where_a_later_file_overrides(tmp_path: Path) -> None:
    base, top, missing = tmp_path / "base.yaml", tmp_path / "top.yaml", tmp_path / "missing.yaml"
    base.write_text("train: {steps: many}\n")
    top.write_text("train: {steps: 20, stpes: 3}\n")
    with pytest.raises(SpecError) as caught:
        load_spec([base, top, missing, tmp_path], ["nonsense"], PRESETS)
    assert str(caught.value).replace(f"{tmp_path}/", "").replace(str(tmp_path), ".").split("\n") == [
        "base.yaml:1:16 train.steps: 'many' is not an integer",
        "top.yaml:1:20 train.stpes: unknown key; did you mean steps?",
        "missing.yaml: cannot be read: no such file or directory",
        ".: cannot be read: is a directory",
        "-s nonsense: is not KEY=VALUE; write for example optim.lr=1e-4",
    ]


def test_what_an_unreadable_file_may_have_said_is_not_held_against_the_others(tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("model: {context: 4096")
    (tmp_path / "top.yaml").write_text("data: {length: 2048}\ntrain: {batch: 0}\n")
    with pytest.raises(SpecError) as caught:
        load_spec([tmp_path / "broken.yaml", tmp_path / "top.yaml"], [], PRESETS)
    assert [fault.path for fault in caught.value.faults] == ["", "train.batch"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("train: {steps: 3.7}", "1:16 train.steps: 3.7 is not an integer"),
        ("train: {steps: 3.0}", "1:16 train.steps: 3.0 is not an integer; write 3"),
        ("train: {steps: true}", "1:16 train.steps: true is not an integer"),
        ("train: {steps: }", "1:15 train.steps: nothing is not an integer"),
        ("train: {steps: [1]}", "1:16 train.steps: a list is not an integer"),
        ("train: {seed: 9223372036854775808}", "1:15 train.seed: 9223372036854775808 does not fit 64 bits"),
        ("train: {compile: 1}", "1:18 train.compile: 1 is neither true nor false; write true"),
        ("train: {compile: off}", "1:18 train.compile: 'off' is neither true nor false; write false"),
        ("train: {compile: [x]}", "1:18 train.compile: a list is neither true nor false"),
        ("train: {compile: {x: 1}}", "1:18 train.compile: a mapping is neither true nor false"),
        ("optim: {lr: '1e-4'}", "1:13 optim.lr: '1e-4' is not a number; write 1e-4 without quotes"),
        ("optim: {lr: fast}", "1:13 optim.lr: 'fast' is not a number"),
        ("optim: {lr: yes}", "1:13 optim.lr: 'yes' is not a number"),
        ("optim: {lr: true}", "1:13 optim.lr: true is not a number"),
        ("optim: {lr: .nan}", "1:13 optim.lr: nan is not a finite number"),
        ("optim: {clip: .inf}", "1:15 optim.clip: inf is not a finite number"),
        ("optim: {lr: 1e999}", "1:13 optim.lr: inf is not a finite number"),
        ("name: 3", "1:7 name: 3 is not text; quote it: '3'"),
        ("name: true", "1:7 name: true is not text; quote it: 'true'"),
        ("report: {prompts: hello}", "1:19 report.prompts: 'hello' is not a list; write [hello]"),
        ("report: {prompts: [a, 2]}", "1:23 report.prompts.1: 2 is not text; quote it: '2'"),
        (
            "report: {trackers: [wandbb]}",
            "1:21 report.trackers.0: 'wandbb' is not one of 'tensorboard', 'wandb', "
            "'mlflow', 'swanlab', 'trackio'; did you mean 'wandb'?",
        ),
        ("optim: 3", "1:8 optim: 3 is not a section; write its fields below it"),
        ("optim: [lr, 3]", "1:8 optim: a list is not a section; write its fields below it"),
        ("data: {sets: [a]}", "1:14 data.sets: a list is not a section; write `name: value` lines below it"),
        (
            "model: {preset: lama}",
            "1:17 model.preset: 'lama' is no family or model; did you mean llama or llama3 or llama2?",
        ),
        ("model: {preset: 3}", "1:17 model.preset: 3 is not text; quote it: '3'"),
        (
            "optim: {groups: {wq: sgd}}",
            "1:22 optim.groups.wq: 'sgd' is not one of 'muon', 'muon_no_decay', 'adamw', 'adamw_no_decay'",
        ),
        (
            "distill: {rank: 8}",
            f"1:1 distill: unknown key; the keys here are {KEYS}",
        ),
        ("train: {lr: 1}", "1:9 train.lr: unknown key; did you mean optim.lr?"),
        ("model: {num_attention_heads: 4}", "1:9 model.num_attention_heads: unknown key; did you mean model.heads?"),
        (
            "optim: {weight_decay: 0}",
            "1:9 optim.weight_decay: unknown key; did you mean optim.adamw.weight_decay or optim.muon.weight_decay?",
        ),
        ("data: {fim: {rate: 1}}", "1:8 data.fim: unknown key; did you mean data.sets.*.fim?"),
        (
            "'': 1",
            f"1:1 '': unknown key; the keys here are {KEYS}",
        ),
        ("train: {steps: 1, steps: 2}", "1:19 train.steps: is there twice; the first stands at line 1"),
    ],
)
def test_types(tmp_path: Path, text: str, line: str) -> None:
    assert faults(tmp_path, text) == [f"run.yaml:{line}"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("train: {steps: 0}", "1:16 train.steps: 0 has to be at least 1"),
        ("train: {seed: -1}", "1:15 train.seed: -1 cannot be negative"),
        ("model: {dropout: 1.0}", "1:18 model.dropout: 1.0 has to be at least 0 and below 1"),
        ("optim: {lr: 0}", "1:13 optim.lr: 0.0 has to be above 0"),
        ("optim: {schedule: {final: 2}}", "1:27 optim.schedule.final: 2.0 has to lie between 0 and 1"),
        ("name: ../up", "1:7 name: '../up' has to be the name of one directory: up to 100 letters, digits, . _ + -"),
        ("name: ''", "1:7 name: '' has to be the name of one directory: up to 100 letters, digits, . _ + -"),
        ("data: {dir: ' '}", "1:13 data.dir: ' ' cannot be empty"),
        (
            "train: {batch: 8, micro_batch: 3}",
            "1:32 train.micro_batch: 3 rows at a time do not divide the batch's 8 rows a rank; write 2",
        ),
        (
            "train: {micro_batch: 16}",
            "1:22 train.micro_batch: 16 rows at a time do not divide the batch's 8 rows a rank; write 8",
        ),
        ("mesh: {dp: 3}", "1:12 train.batch: 3 ranks (dp x ep) cannot share 8 rows evenly"),
        ("mesh: {dp: 0}", "1:12 mesh.dp: 0 has to be at least 1"),
        ("mesh: {tp: 4}", "1:12 mesh.tp: 4 ranks cannot share 6 heads evenly (model.heads)"),
        (
            "mesh: {tp: 2}\nmodel: {vocab_size: 5001}",
            "1:12 mesh.tp: 2 ranks cannot share 5001 rows of the vocabulary evenly; set model.pad_vocab_to to 2",
        ),
        ("mesh: {timeout: 1e30}", "1:17 mesh.timeout: 1e+30 has to lie between 1 and 1000000"),
        ("mesh: {timeout: 1e-9}", "1:17 mesh.timeout: 1e-09 has to lie between 1 and 1000000"),
        (
            "optim: {schedule: {warmup: 1001}}",
            "1:28 optim.schedule.warmup: 1001 steps of warm-up are more than the 1000 of train.steps",
        ),
        (
            "train: {steps: 10}\noptim: {schedule: {kind: wsd, warmup: 5, decay_steps: 6}}",
            "2:55 optim.schedule.decay_steps: 6 steps of decay after 5 of warm-up pass the 10 of train.steps",
        ),
        (
            "optim: {schedule: {decay_steps: 6}}",
            "1:33 optim.schedule.decay_steps: only wsd has a last phase; cosine takes the whole run",
        ),
        ("model: {heads: 6, kv_heads: 4}", "1:29 model.kv_heads: 6 heads cannot share 4 key/value heads evenly"),
        ("model: {heads: 5}", "1:16 model.heads: 5 heads do not divide the width 384; or give model.head_dim"),
        ("model: {heads: 0}", "1:16 model.heads: 0 has to be at least 1"),
        ("model: {width: 30, heads: 2}", "1:27 model.head_dim: rotary positions turn pairs, and 15 is odd"),
        ("model: {head_dim: 3}", "1:19 model.head_dim: rotary positions turn pairs, and 3 is odd"),
        (
            "model: {vocab_size: 100}",
            "1:21 model.vocab_size: 100 ids are too few for the tokenizer's 4096 (data.tokenizer.vocab_size)",
        ),
        ("data: {length: 2048}", "1:16 data.length: rows of 2048 tokens are longer than the model's context of 1024"),
        (
            "data: {sets: {}}",
            "1:14 data.sets: names no set; give at least one, such as `stdlib: {sources: ['stdlib:']}`",
        ),
        (
            "data: {sets: {a: {sources: []}}}",
            "1:28 data.sets.a.sources: names no source; give files, directories, globs or 'stdlib:'",
        ),
        ("data: {sets: {a: {sources: ['']}}}", "1:29 data.sets.a.sources.0: '' cannot be empty"),
        (
            "data: {sets: {a/b: {sources: [x]}}}",
            "1:20 data.sets.a/b: 'a/b' has to be the name of one directory: up to 100 letters, digits, . _ + -",
        ),
        ("data: {sets: {a: {sources: [x], weight: 0}}}", "1:41 data.sets.a.weight: every set has weight 0"),
        (
            "data: {split: {validation: 0.5, test: 0.5}}",
            "1:28 data.split.validation: validation 0.5 and test 0.5 leave nothing to train on",
        ),
        (
            "data: {tokenizer: {vocab_size: 100}}",
            "1:32 data.tokenizer.vocab_size: 100 ids are too few for a byte-level "
            "BPE: 256 bytes and the special tokens",
        ),
        (
            "optim: {groups: {'(': muon}}",
            "1:23 optim.groups.(: '(' is not a regular expression: missing ), unterminated subpattern at position 0",
        ),
        (
            "mesh: {tp: 2, sequence_parallel: true}\ndata: {length: 255}",
            "1:34 mesh.sequence_parallel: 2 ranks cannot share the positions of rows of 255 tokens evenly",
        ),
        (
            "mesh: {dp: 2, fsdp: true}\ntrain: {compile: true}",
            "2:18 train.compile: a compiled model cannot exchange anything between ranks; take mesh.fsdp out, or this",
        ),
        (
            "mesh: {tp: 2}\ntrain: {noise_scale_every: 5}",
            "2:28 train.noise_scale_every: the gradient of single rows cannot be had with mesh.tp; "
            "leave one of them out",
        ),
        (
            "checkpoint: {every: 100, keep_every: 250}",
            "1:38 checkpoint.keep_every: 250 is no multiple of checkpoint.every, 100: no checkpoint would fall on it",
        ),
    ],
)
def test_values(tmp_path: Path, text: str, line: str) -> None:
    assert faults(tmp_path, text) == [f"run.yaml:{line}"]


def test_the_mesh_has_to_fill_the_processes(tmp_path: Path) -> None:
    lines = faults(tmp_path, "mesh: {dp: 2, tp: 2}", ranks=2)
    assert lines == [
        "run.yaml:1:7 mesh: dp 2 x tp 2 x ep 1 needs 4 processes and 2 run here; "
        "start them with `torchrun --nproc-per-node 4 -m ironfn …`, or set mesh.dp to 1"
    ]


def test_a_learning_rate_in_yaml_1_2_is_a_number(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    for text, rate in (("1e-5", 1e-5), ("5e-4", 5e-4), ("1e+0", 1.0), ("3.e-4", 3e-4), ("1", 1.0), (".5", 0.5)):
        file.write_text(f"optim: {{lr: {text}}}\n")
        assert load_spec([file], [], PRESETS).optim.lr == rate
        assert load_spec([], [f"optim.lr={text}"], PRESETS).optim.lr == rate


def test_every_synonym_leads_to_a_field() -> None:
    known = {".".join(map(str, path)) for path in fields_of(RunSpec)}
    assert set(SYNONYMS.values()) <= known
    assert not set(SYNONYMS) & {name.rpartition(".")[2] for name in known}, "a field of ours is no synonym"
