"""A run on several ranks, each a thread with its place in a fake mesh: what it tells is what one process tells."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from drivers import run as driver
from ironfn.mesh import fake
from ironfn.report.rows import read_rows
from ironfn.spec.records import RunSpec
from tests.test_run import PACE, folder, load, place, samples

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
    assert [row["devices"] for row in told(spec) if row["kind"] == "run"] == [size]
    return spec


MESHES = ["mesh.dp=2", "mesh.dp=4", "mesh.dp=2 train.micro_batch=1"]


@pytest.mark.parametrize("mesh", MESHES)
def test_a_run_on_ranks_tells_what_one_process_tells(folder: Path, alone: RunSpec, mesh: str) -> None:
    hold_to(alone, folder, mesh, *TIED)


@pytest.mark.parametrize("mesh", ["mesh.ep=2", "mesh.dp=2 mesh.ep=2"])
def test_a_run_with_experts_tells_what_one_process_tells(
    folder: Path, alone: RunSpec, experts_alone: RunSpec, mesh: str
) -> None:
    """Loads of single experts and all; the routers' biases are carried from step to step and read by every sample."""
    spec = hold_to(experts_alone, folder, mesh, *EXPERTS)
    last, dense = (next(row for row in told(s) if row["kind"] == "train" and row["step"] == 12) for s in (spec, alone))
    assert sum(last[f"load/0/{expert}"] for expert in range(4)) == pytest.approx(4)
    assert last["cross_entropy"] < last["loss"]
    bits = last["bits_per_byte"] / last["cross_entropy"]
    assert bits == pytest.approx(dense["bits_per_byte"] / dense["loss"]), "the same text, and penalties are none of it"
