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


def ranks(spec: RunSpec) -> list[int]:
    mesh = spec.mesh
    sizes: dict[str, Any] = {"dp": mesh.dp, "tp": mesh.tp, "ep": mesh.ep, "sequence_parallel": mesh.sequence_parallel}
    return fake.run(lambda mesh: driver.run(spec, mesh=mesh), **sizes)


@pytest.fixture(scope="module")
def alone(folder: Path) -> RunSpec:
    spec = load(folder, "alone", *TIED)
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


MESHES = [
    "mesh.dp=2",
    "mesh.dp=4",
    "mesh.dp=2 train.micro_batch=1",
    "mesh.ep=2",
]


@pytest.mark.parametrize("mesh", MESHES)
def test_a_run_on_ranks_tells_what_one_process_tells(folder: Path, alone: RunSpec, mesh: str) -> None:
    spec = load(folder, re.sub(r"\W+", "-", mesh), *TIED, *mesh.split())
    assert ranks(spec) == [0] * (spec.mesh.dp * spec.mesh.tp * spec.mesh.ep)
    same_story(spec, alone)
    assert samples(spec) == samples(alone)
    assert next(row["devices"] for row in told(spec)) == spec.mesh.dp * spec.mesh.tp * spec.mesh.ep
