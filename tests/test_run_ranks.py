"""A run on several ranks, each a thread with its place in a fake mesh: what it tells is what one process tells."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from drivers import run as driver
from ironfn.mesh import fake
from ironfn.mesh.axis import Mesh
from ironfn.mesh.ledger import Ledger
from ironfn.report.rows import read_rows
from ironfn.spec.records import RunSpec
from tests.test_run import PACE, folder, invoke, load, place, samples

__all__ = ["folder"]

TIED = ("model.pad_vocab_to=4", "report.sample_tokens=8")
EXPERTS = (*TIED, "model.moe.experts=4", "model.moe.bias_rate=0.01", "model.moe.z_weight=0.001", "model.moe.jitter=0.1")


def ranks(spec: RunSpec) -> list[int]:
    mesh = spec.mesh
    sizes: dict[str, Any] = {"dp": mesh.dp, "tp": mesh.tp, "ep": mesh.ep, "sequence_parallel": mesh.sequence_parallel}
    return fake.run(lambda mesh: driver.run(spec, mesh=mesh), **sizes)


@pytest.fixture(scope="module")
def alone(folder: Path) -> RunSpec:
    return run_alone(folder, "alone", *TIED)


@pytest.fixture(scope="module")
def experts_alone(folder: Path) -> RunSpec:
    return run_alone(folder, "experts-alone", *EXPERTS)


def run_alone(folder: Path, name: str, *overrides: str) -> RunSpec:
    spec = load(folder, name, *overrides)
    assert driver.run(spec) == 0
    return spec


def told(spec: RunSpec) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in PACE} for row in read_rows(place(spec) / "metrics.jsonl")]


def same_story(found: RunSpec, expected: RunSpec) -> None:
    """Hold every row to the other run's: batches by checksum, numbers to what the order of float32 sums leaves."""
    for mine, theirs in zip(told(found), told(expected), strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            if isinstance(value, float):
                assert value == pytest.approx(theirs[name], rel=2e-5), (name, mine["step"])
            elif name != "devices":
                assert value == theirs[name], (name, mine["step"])


def hold_to(alone: RunSpec, folder: Path, mesh: str, *overrides: str) -> RunSpec:
    """Train on a mesh and hold what is told to what one process told; return the spec."""
    spec = load(folder, re.sub(r"\W+", "-", f"{alone.name} {mesh}"), *overrides, *mesh.split())
    size = spec.mesh.dp * spec.mesh.tp * spec.mesh.ep
    assert ranks(spec) == [0] * size
    same_story(spec, alone)
    assert samples(spec) == samples(alone)
    again = f"torchrun --nproc-per-node {size} -m ironfn pretrain {place(spec) / 'spec.yaml'}"
    assert again in (place(spec) / "report.html").read_text()
    assert [row["devices"] for row in told(spec) if row["kind"] == "run"] == [size]
    return spec


# A checkpoint of any mesh is the run's, whoever goes on with it.


def leg(folder: Path, mesh: str, steps: int) -> RunSpec:
    """Go on to a step on a mesh."""
    overrides = ("optim.name=muon", "optim.schedule.kind=constant", "checkpoint.every=100")
    spec = load(folder, "moved", *TIED, *overrides, f"train.steps={steps}", *mesh.split())
    assert set(ranks(spec)) == {0}
    return spec


def test_a_run_that_moves_from_mesh_to_mesh_is_the_run_that_never_did(folder: Path) -> None:
    """2 ranks, 1, 4, and again 2 in another form, the last 5 steps each: losses of float32 to 1e-5, batches exactly."""
    meshes = ["mesh.dp=2 mesh.zero1=true", "mesh.dp=1", "mesh.dp=2 mesh.tp=2", "mesh.dp=2 mesh.fsdp=true"]
    spec = [leg(folder, mesh, 5 * (n + 1)) for n, mesh in enumerate(meshes)][-1]
    rows = [row for row in told(spec) if row["kind"] == "train"]
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert [row["devices"] for row in told(spec) if row["kind"] == "run"] == [2, 1, 4, 2]
    whole = run_alone(folder, "stayed", *TIED, "optim.name=muon", "optim.schedule.kind=constant", "train.steps=20")
    for mine, theirs in zip(rows, (row for row in told(whole) if row["kind"] == "train"), strict=True):
        assert mine["batch"] == theirs["batch"]
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5), mine["step"]


@pytest.mark.parametrize("mesh", ["mesh.tp=2", "mesh.dp=2 mesh.ep=2 mesh.zero1=true"])
def test_a_checkpoint_of_many_ranks_generates_in_one_process(folder: Path, experts_alone: RunSpec, mesh: str) -> None:
    """With the routers' biases, which are no parameters."""
    spec = load(folder, re.sub(r"\W+", "-", f"writes {mesh}"), *EXPERTS, *mesh.split())
    assert set(ranks(spec)) == {0}
    written = [invoke("generate", place(s), "-p", "the", "--tokens", 12) for s in (spec, experts_alone)]
    assert [result.exit_code for result in written] == [0, 0], written[0].output
    assert written[0].stdout == written[1].stdout
    for command in (("verify",), ("ls",), ("show",)):
        result = invoke("ckpt", *command, place(spec))
        assert result.exit_code == 0, result.output


MESHES = [
    "mesh.dp=2",
    "mesh.dp=4 train.micro_batch=1",
    "mesh.tp=2",
    "mesh.dp=2 mesh.tp=2 mesh.sequence_parallel=true",
    "mesh.dp=2 mesh.zero1=true",
    "mesh.dp=2 mesh.fsdp=true train.remat=true",
    "mesh.dp=2 mesh.tp=2 mesh.fsdp=true mesh.bucket_mb=1",
]


@pytest.mark.parametrize("mesh", MESHES)
def test_a_run_on_ranks_tells_what_one_process_tells(folder: Path, alone: RunSpec, mesh: str) -> None:
    hold_to(alone, folder, mesh, *TIED)


def test_the_noise_scale_with_experts_is_that_of_one_process(folder: Path) -> None:
    """Over dp through the driver; over ep a row's gradient would need other ranks' experts, and is refused."""
    measured = ("train.noise_scale_every=5", "train.steps=6", "report.eval_every=100")
    alone = run_alone(folder, "noise-alone", *EXPERTS, *measured)
    spec = load(folder, "noise", *EXPERTS, *measured, "mesh.dp=2")
    assert ranks(spec) == [0, 0]
    same_story(spec, alone)
    assert [row["step"] for row in told(spec) if "noise_scale" in row] == [1, 6]


def test_a_step_asks_the_other_ranks_no_more_than_it_must(folder: Path) -> None:
    """One sum of losses, one of gradients, and at the step's edge one exchange of all that there is to tell."""
    spec = load(folder, "ledger", *TIED, "mesh.dp=2", "checkpoint.every=6", "checkpoint.asynchronous=true")
    found: list[Counter[str]] = []

    def rank(mesh: Mesh) -> int:
        code = driver.run(spec, mesh=(ledger := Ledger()).watch(mesh))
        found.append(Counter(f"{each.axis} {each.op} {each.place.split(':')[1]}" for each in ledger.entries))
        return code

    assert fake.run(rank, dp=2) == [0, 0]
    for calls in found:
        of_steps = {
            name: count for name, count in calls.items() if re.search("_loop|_sum_over|_total|seen|step$", name)
        }
        assert of_steps == {
            "dp all_reduce _sum_over_rows": 12,
            "dp all_reduce _total": 12,
            "world all_gather seen": 12,
            "world all_reduce _loop": 3,  # after the evaluations of steps 5, 10 and 12
        }
        assert calls["world all_reduce Saver.poll"] <= 6, "only while a save is under way"


@pytest.mark.parametrize("mesh", ["mesh.ep=2", "mesh.dp=2 mesh.ep=2 mesh.zero1=true", "mesh.ep=2 mesh.tp=2"])
def test_a_run_with_experts_tells_what_one_process_tells(
    folder: Path, alone: RunSpec, experts_alone: RunSpec, mesh: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Loads of single experts and all; the routers' biases are carried from step to step and read by every sample."""
    spec = hold_to(experts_alone, folder, mesh, *EXPERTS)
    said, page = capsys.readouterr().out, (place(spec) / "report.html").read_text()
    assert "load_max=" in said
    assert "Load max" in page
    assert "load/0" not in said + page, "a line and a chart of every expert would be too many"
    last, dense = (next(row for row in told(s) if row["kind"] == "train" and row["step"] == 12) for s in (spec, alone))
    assert sum(last[f"load/0/{expert}"] for expert in range(4)) == pytest.approx(4)
    assert last["cross_entropy"] < last["loss"]
    bits = last["bits_per_byte"] / last["cross_entropy"]
    assert bits == pytest.approx(dense["bits_per_byte"] / dense["loss"]), "the same text, and penalties are none of it"
