"""A run from its spec to its report: what it leaves behind, and that stopping it anywhere changes no bit."""

from __future__ import annotations

import functools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from drivers import build, watch
from drivers import run as driver
from drivers.main import EX_CONFIG, main
from drivers.signals import EXIT_STOPPED
from drivers.specs import find_spec, shipped
from ironfn import checkpoint, tree
from ironfn.data import prepare
from ironfn.model.families import PRESETS
from ironfn.report.rows import read_rows
from ironfn.spec.load import load_spec
from ironfn.spec.records import RunSpec

ROOT = Path(__file__).parents[1]

SPEC = """
name: {name}
out: {folder}/runs
model: {{preset: {preset}, width: 32, layers: 1, heads: 2, ffn: 48, context: 32}}
data:
  dir: {folder}/data
  sets:
    code: {{sources: ["{folder}/code.jsonl"], fim: {{rate: 0.5, spans: line}}}}
    prose: {{sources: ["{folder}/prose.txt"], split_on: "\\n\\n"}}
  tokenizer: {{vocab_size: 300}}
  split: {{validation: 0.2}}
  temperature: 2.0
  length: 32
optim: {{name: adamw, lr: 3e-3, schedule: {{kind: cosine, warmup: 3}}}}
train: {{steps: 12, batch: 4, threads: 1}}
checkpoint: {{every: 4}}
report: {{eval_every: 5, eval_rows: 3, prompts: ["the "], sample_tokens: 3, peak_flops: 1e11}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a little text of two kinds and prepare it: a mixture, with fill-in-the-middle in one of the sets."""
    folder = tmp_path_factory.mktemp("run")
    draw = random.Random(0)
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "one", "more", "small", "word"]

    def line() -> str:
        return " ".join(draw.choice(words) for _ in range(6))

    code = [f"def {draw.choice(words)}(x):\n    # {line()}\n    return x + {n}\n" for n in range(25)]
    (folder / "code.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in code))
    (folder / "prose.txt").write_text("\n\n".join(f"{n} {line()}, {line()}." for n in range(25)))
    prepare(load(folder, "data").data, seed=0)
    return folder


def spec_file(folder: Path, name: str, preset: str = "llama") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(SPEC.format(folder=folder, name=name, preset=preset))
    return path


def load(folder: Path, name: str, *overrides: str, preset: str = "llama") -> RunSpec:
    return load_spec([spec_file(folder, name, preset)], overrides, PRESETS)


def place(spec: RunSpec) -> Path:
    return Path(spec.out) / spec.name


PACE = ("tokens_per_s", "mfu", "memory", "seconds", "left")


def story(spec: RunSpec) -> list[dict[str, Any]]:
    """Return all that a run's metrics say but for the time it took: floats by their hex digits, batches by checksum."""
    rows = [{k: v for k, v in row.items() if k not in PACE} for row in read_rows(place(spec) / "metrics.jsonl")]
    return [{k: v.hex() if isinstance(v, float) else v for k, v in row.items()} for row in rows]


def final(spec: RunSpec) -> dict[str, bytes]:
    """Return the bytes of everything that the last checkpoint holds."""
    found, meta = checkpoint.load(place(spec) / f"checkpoints/step-{spec.train.steps:08d}")
    assert meta["step"] == spec.train.steps
    return {path: leaf.reshape(-1).view(torch.uint8).numpy().tobytes() for path, leaf in tree.flatten(found).items()}


def samples(spec: RunSpec) -> str:
    return (place(spec) / "samples.jsonl").read_text()


def invoke(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


# One run, from its first step to its report.


@pytest.fixture(scope="module")
def whole(folder: Path) -> RunSpec:
    spec = load(folder, "whole")
    assert driver.run(spec) == 0
    return spec


def test_a_run_leaves_what_the_page_says(whole: RunSpec) -> None:
    names = {path.name for path in place(whole).iterdir()}
    assert {"spec.yaml", "metrics.jsonl", "samples.jsonl", "checkpoints", "tokenizer.json", "report.html"} <= names
    assert {path.name for path in (place(whole) / "checkpoints").iterdir()} == {"step-00000008", "step-00000012"}
    assert load_spec([place(whole) / "spec.yaml"], [], PRESETS) == whole
    rows = read_rows(place(whole) / "metrics.jsonl")
    by_kind = {kind: [row["step"] for row in rows if row["kind"] == kind] for kind in ("run", "train", "validation")}
    assert by_kind == {"run": [0], "train": list(range(1, 13)), "validation": [0, 5, 10, 12]}
    first, last = (next(r for r in rows if r["kind"] == "validation" and r["step"] == step) for step in (0, 12))
    assert last["bits_per_byte"] < first["bits_per_byte"]
    assert [json.loads(line)["step"] for line in samples(whole).splitlines()] == [0, 5, 10, 12]
    page = (place(whole) / "report.html").read_text()
    assert "whole" in page


def test_the_rates_are_the_schedules_from_the_first_step_to_the_last(whole: RunSpec) -> None:
    rates = [row["lr"] for row in read_rows(place(whole) / "metrics.jsonl") if row["kind"] == "train"]
    assert rates[:4] == pytest.approx([3e-3 / 4, 3e-3 / 2, 3e-3 * 3 / 4, 3e-3])
    assert rates[-1] == pytest.approx(3e-4)


def test_a_finished_run_takes_no_step_more(whole: RunSpec) -> None:
    before = (place(whole) / "metrics.jsonl").read_bytes()
    assert driver.run(whole) == 0
    assert (place(whole) / "metrics.jsonl").read_bytes() == before
    assert len(samples(whole).splitlines()) == 4


def test_a_longer_run_goes_on_from_a_finished_one(folder: Path) -> None:
    """A constant rate, so that the first six steps do not depend on the length of the run."""
    spec = load(folder, "longer", "optim.schedule.kind=constant", "train.steps=6")
    assert driver.run(spec) == 0
    assert driver.run(load(folder, "longer", "optim.schedule.kind=constant")) == 0
    straight = load(folder, "straight", "optim.schedule.kind=constant")
    assert driver.run(straight) == 0
    longer = load(folder, "longer", "optim.schedule.kind=constant")
    assert [row for row in story(longer) if row["step"] != 6 or row["kind"] != "validation"] == story(straight)
    assert final(longer) == final(straight)


def test_generate_continues_prompts_and_says_the_same_again(whole: RunSpec) -> None:
    once = invoke("generate", place(whole), "-p", "the quick", "--tokens", 5, "--seed", 3)
    assert once.exit_code == 0, once.output
    assert "the quick" in once.output
    assert invoke("generate", place(whole), "-p", "the quick", "--tokens", 5, "--seed", 3).output == once.output
    one = place(whole) / "checkpoints/step-00000008"
    greedy = [invoke("generate", one, "-p", "the", "--tokens", 5, "-t", 0, "--seed", seed).output for seed in (1, 2)]
    assert greedy[0] == greedy[1]
    assert "step-00000008, step 8" in greedy[0]


def test_a_compiled_run_learns_as_the_eager_one(folder: Path, whole: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default backend's C++ compiler takes minutes; `aot_eager` takes the same road up to it."""
    monkeypatch.setattr(build.torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    spec = load(folder, "compiled", "train.compile=true")
    assert driver.run(spec) == 0
    losses = [[row["loss"] for row in read_rows(place(s) / "metrics.jsonl") if "loss" in row] for s in (spec, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


# Stopping. A real signal is sent to this process from inside the run, so that it comes at exactly that moment.


def interrupt(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, act: Callable[[], None]) -> None:
    """Do ``act`` at the start of the given call, counted from 1, of ``owner.name``."""
    original, calls = getattr(owner, name), [0]

    def wrapped(*arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            act()
        return original(*arguments, **named)

    monkeypatch.setattr(owner, name, wrapped)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def stopped_and_resumed(monkeypatch: pytest.MonkeyPatch, spec: RunSpec, owner: Any, name: str, call: int) -> int:
    """Run until the signal, then to the end; return the step at which it stopped."""
    with monkeypatch.context() as patch:
        interrupt(patch, owner, name, call, terminate)
        assert driver.run(spec) == EXIT_STOPPED
    stopped = max(int(path.name[5:]) for path in (place(spec) / "checkpoints").iterdir())
    assert driver.run(spec) == 0
    return stopped


def same_run(found: RunSpec, expected: RunSpec) -> None:
    assert story(found) == story(expected)
    assert final(found) == final(expected)
    assert samples(found) == samples(expected)


@pytest.mark.parametrize("step", [1, 3, 4, 5, 11])
def test_a_run_that_was_stopped_is_the_run_that_never_was(
    folder: Path, whole: RunSpec, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    spec = load(folder, f"stopped-{step}")
    assert stopped_and_resumed(monkeypatch, spec, watch.Watch, "step", step) == step
    same_run(spec, whole)


@pytest.mark.parametrize(
    ("name", "call", "step"),
    [("watch.evaluate", 1, 1), ("watch.evaluate", 2, 5), ("watch.complete", 2, 5), ("saver.save", 1, 5)],
)
def test_a_signal_during_evaluation_sampling_or_a_save_is_heard_at_the_next_edge(
    folder: Path, whole: RunSpec, monkeypatch: pytest.MonkeyPatch, name: str, call: int, step: int
) -> None:
    """The first evaluation comes before any step; a signal during a save waits for the step after it."""
    spec = load(folder, f"{name}-{call}")
    module, _, function = name.partition(".")
    stopped = stopped_and_resumed(monkeypatch, spec, {"saver": driver.Saver, "watch": watch}[module], function, call)
    assert stopped == step
    same_run(spec, whole)


VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "dropout": ("gpt2", ("model.dropout=0.5", "train.micro_batch=1")),
    "muon": ("llama", ("optim.name=muon", "data.workers=2")),
    "bfloat16": ("llama", ("train.precision.params=bfloat16", "train.precision.compute=bfloat16", "data.workers=3")),
    "asynchronous": ("llama", ("checkpoint.asynchronous=true", "checkpoint.every=2")),
    "experts": (
        "llama",
        (
            *("model.moe.experts=4", "model.moe.score=sigmoid", "model.moe.bias_rate=0.01", "model.moe.jitter=0.1"),
            *("model.moe.capacity=1.0", "train.micro_batch=2", "train.noise_scale_every=6"),
        ),
    ),
    "watched": (
        "llama",
        (
            *("train.noise_scale_every=2", "train.remat=true", "data.attend=row"),
            *(f"report.prompts=['', '{'the quick ' * 40}']", "report.sample_tokens=99"),  # longer than a row
        ),
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kind_of_run_resumes_to_the_bit(folder: Path, monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    preset, overrides = VARIANTS[variant]
    spec, straight = (load(folder, f"{variant}-{i}", *overrides, preset=preset) for i in range(2))
    assert driver.run(straight) == 0
    assert stopped_and_resumed(monkeypatch, spec, watch.Watch, "step", 6) == 6
    same_run(spec, straight)
    rows = [row for row in story(spec) if row["kind"] == "train"]
    assert len({row["batch"] for row in rows}) == 12, "no batch came twice"
    if variant == "watched":
        assert [row["step"] for row in rows if "noise_scale" in row] == [1, 3, 5, 7, 9, 11]


def test_a_run_that_died_repeats_what_its_checkpoint_had_not_seen(
    folder: Path, whole: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 5, 6 and 7 are in the metrics when it dies, and only steps up to 4 in a checkpoint."""

    def die() -> None:
        raise MemoryError("gone")

    spec = load(folder, "died")
    with monkeypatch.context() as patch:
        interrupt(patch, watch.Watch, "step", 8, die)
        with pytest.raises(MemoryError):
            driver.run(spec)
    assert [row["step"] for row in story(spec)][-1] == 7
    assert driver.run(spec) == 0
    same_run(spec, whole)


def test_a_damaged_checkpoint_is_told_and_the_one_before_is_taken(
    folder: Path, whole: RunSpec, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = load(folder, "damaged")
    with monkeypatch.context() as patch:
        interrupt(patch, watch.Watch, "step", 10, terminate)
        assert driver.run(spec) == EXIT_STOPPED
    shard = next((place(spec) / "checkpoints/step-00000010").glob("*.safetensors"))
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)
    assert driver.run(spec) == 0
    said = capsys.readouterr().out
    assert "warning: " in said
    assert "resuming at step 8" in said
    same_run(spec, whole)


def test_a_step_that_is_not_finite_stops_the_run_and_reaches_no_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rate of 1e30 makes the second loss NaN: nothing is saved after the first steps, and the remedy is told."""
    path = spec_file(folder, "burst")
    words = ("pretrain", path, "-s", "optim.lr=1e30", "-s", "optim.schedule.warmup=0", "-s", "optim.clip=null")
    words += ("-s", "report.eval_every=1000", "-s", "checkpoint.every=1", "-s", "report.prompts=[]")
    result = invoke(*words)
    assert result.exit_code == 1
    assert re.search(r"^Error: step \d+: loss .*nothing was updated: lower optim\.lr", result.output, re.M)
    newest = checkpoint.newest(place(load(folder, "burst")) / "checkpoints", lambda line: None)
    assert newest is not None
    found, _ = checkpoint.load(newest)
    assert all(leaf.isfinite().all() for leaf in tree.leaves(found) if leaf.is_floating_point())
    skipping = invoke(*words, "-s", "name=burst-skipped", "-s", "optim.nonfinite=skip")
    assert skipping.exit_code == 0, skipping.output
    rows = [row for row in read_rows(folder / "runs/burst-skipped/metrics.jsonl") if row["kind"] == "train"]
    bad = [row for row in rows if not (math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]))]
    assert rows[-1]["skipped"] == len(bad) > 0


# What is refused, each with its remedy and its code.


@pytest.mark.parametrize(
    ("overrides", "code", "what"),
    [
        (("data.dir=nowhere",), 1, "nowhere.*ironfn prepare"),
        (("data.sets.prose.clean=true",), 1, "prepared with other settings.*ironfn prepare"),
        (("mesh.dp=2",), None, "2 ranks|mesh"),
        (("model.heads=3",), None, "heads"),
        (("train.stesp=3",), EX_CONFIG, "train.stesp.*did you mean steps"),
        (("optim.lr=fast",), EX_CONFIG, "optim.lr"),
        (("train.steps=3.7",), EX_CONFIG, "train.steps"),
        (("optim.schedule.warmup=99",), None, "warm"),
        (("model.preset=gpt2", "model.context=16"), None, "context"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(
    folder: Path, overrides: tuple[str, ...], code: int | None, what: str
) -> None:
    words = [word for text in overrides for word in ("-s", text)]
    result = invoke("pretrain", spec_file(folder, "refused"), *words)
    assert result.exit_code in ((1, EX_CONFIG) if code is None else (code,))
    assert re.search(what, result.output), result.output
    assert "Traceback" not in result.output
    assert isinstance(result.exception, SystemExit)
    assert not list((folder / "runs/refused").glob("checkpoints/*"))


def test_a_spec_that_changed_where_it_may_not_is_refused(folder: Path, whole: RunSpec) -> None:
    result = invoke("pretrain", spec_file(folder, "whole"), "-s", "optim.lr=1e-3")
    assert result.exit_code == 1
    assert "optim.lr: 0.003 -> 0.001" in result.output
    assert load_spec([place(whole) / "spec.yaml"], [], PRESETS) == whole


def test_other_data_under_the_same_name_are_refused(folder: Path, tmp_path: Path) -> None:
    overrides = (f"data.dir={tmp_path}/data", "train.steps=2", "optim.schedule.warmup=1")
    spec = load(folder, "moved", *overrides)
    prepare(spec.data, seed=0)
    assert driver.run(spec) == 0
    prose = folder / "prose.txt"
    before = prose.read_text()
    try:
        prose.write_text(before + "\n\nand one more.")
        prepare(spec.data, seed=0)
    finally:
        prose.write_text(before)
    with pytest.raises(ValueError, match="was trained on other data than"):
        driver.run(load(folder, "moved", *overrides, "train.steps=4"))


# Real processes.


def test_a_real_process_keeps_others_out_stops_with_75_and_is_resumed_here(folder: Path) -> None:
    path = spec_file(folder, "process")
    words = ("-s", "train.steps=150", "-s", "checkpoint.every=1000", "-s", "report.eval_every=1000")
    child = subprocess.Popen(
        [sys.executable, "-m", "ironfn", "pretrain", str(path), *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        spec = load(folder, "process", *words[1::2])
        while len(read_rows(place(spec) / "metrics.jsonl")) < 6:
            assert child.poll() is None
            time.sleep(0.02)
        second = invoke("pretrain", path, *words)
        child.send_signal(signal.SIGTERM)
        said, _ = child.communicate(timeout=120)
    finally:
        child.kill()
    assert second.exit_code == 1
    assert f"in use by pid {child.pid}" in second.output
    assert child.returncode == EXIT_STOPPED, said
    assert f"ironfn pretrain {place(spec) / 'spec.yaml'}" in said
    resumed = invoke("pretrain", place(spec) / "spec.yaml")
    assert resumed.exit_code == 0
    assert "resuming at step" in resumed.output
    straight = load(folder, "straight-150", *words[1::2])
    assert driver.run(straight) == 0
    same_run(spec, straight)


@pytest.mark.parametrize("name", [name for name in shipped() if name.startswith("pretrain/")])
def test_every_shipped_spec_prepares_and_runs(folder: Path, name: str) -> None:
    """Shrunk: its own families, mixtures, schedules and optimizers, on the little text."""
    sets = load_spec([find_spec(name)], [], PRESETS).data.sets
    here = folder / name.replace("/", "-")
    overrides = [f"data.dir={here}/data", f"out={here}/runs", "data.tokenizer.vocab_size=300", "data.length=32"]
    overrides += ["model.width=32", "model.layers=2", "model.heads=2", "model.ffn=48", "data.split.validation=0.2"]
    overrides += [f"data.sets.{each}.sources=[{folder}/code.jsonl, {folder}/prose.txt]" for each in sets]
    overrides += [
        "train.steps=2",
        "train.batch=2",
        "train.micro_batch=1",
        "report.eval_rows=2",
        "report.sample_tokens=2",
    ]
    overrides += ["optim.schedule.warmup=1", "report.peak_flops=1e11", "report.sample_tokens=2"]
    if load_spec([find_spec(name)], [], PRESETS).optim.schedule.kind == "wsd":
        overrides += ["optim.schedule.decay_steps=1"]
    words = [word for text in overrides for word in ("-s", text)]
    prepared = invoke("prepare", name, *words)
    assert prepared.exit_code == 0, prepared.output
    result = invoke("pretrain", name, *words)
    assert result.exit_code == 0, result.output
    for written in ("report.html", "loss.png"):
        assert (here / "runs" / name.split("/")[1] / written).stat().st_size > 1000
