"""Signals, deaths and errors of single ranks, in real processes over gloo: one decision on all, and a run goes on."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import drivers.build
import drivers.objectives
import drivers.pretrain
import drivers.watch
from drivers.signals import EXIT_STOPPED
from ironfn import checkpoint
from ironfn.mesh.axis import Mesh
from ironfn.report.rows import read_rows
from ironfn.spec.records import RunSpec
from ironfn.types import Batch, Loss, LossSum, Params
from tests.ranks import Ranks, before_step, send
from tests.test_run import folder, load, place, same_run, spec_file

__all__ = ["folder"]

TWO = ("mesh.dp=2", "mesh.timeout=20")
START = 60
"""Seconds that two ranks may take from fork to end on a machine that others use as well."""


def words(folder: Path, name: str, *overrides: str) -> list[object]:
    return ["pretrain", spec_file(folder, name), *(w for o in (*TWO, *overrides) for w in ("-s", o))]


def ranks(folder: Path, name: str, *overrides: str, first: Any = lambda rank: None, n: int = 2) -> Ranks:
    return Ranks(n, words(folder, name, *overrides), folder / f"{name}.logs", first)


def errors(run: Ranks) -> str:
    return "".join(rank.errors for rank in run.all)


def goes_on(folder: Path, name: str, whole: RunSpec, *overrides: str) -> None:
    """Hold a run that was ended to the one that never was, to the bit."""
    with ranks(folder, name, *overrides) as run:
        assert run.wait(START) == [0, 0], errors(run)
    assert "resuming at step" in run.all[0].said
    same_run(load(folder, name, *TWO, *overrides), whole)


def saved(folder: Path, name: str) -> list[int]:
    return list(checkpoint.steps(place(load(folder, name)) / "checkpoints"))


@pytest.fixture(scope="module")
def whole(folder: Path) -> RunSpec:
    with ranks(folder, "whole-2") as run:
        assert run.wait(START) == [0, 0], errors(run)
    said = run.all[0].said
    assert len(re.findall(r"^step=12/12 ", said, re.M)) == 1
    assert (run.all[1].said, errors(run)) == ("", ""), "only rank 0 speaks"
    return load(folder, "whole-2", *TWO)


@pytest.mark.parametrize(
    ("name", "rank", "step"), [("SIGTERM", 1, 3), ("SIGUSR1", 0, 5), ("SIGINT", 1, 4)], ids=["TERM", "USR1", "INT"]
)
def test_a_signal_to_one_rank_saves_on_all_at_the_same_step(
    folder: Path, whole: RunSpec, name: str, rank: int, step: int
) -> None:
    first = before_step(rank, step, send(getattr(signal, name)))
    with ranks(folder, name, first=first) as run:
        assert run.wait(START) == [EXIT_STOPPED, EXIT_STOPPED], errors(run)
    assert saved(folder, name)[-1] == step
    again = f"torchrun --nproc-per-node 2 -m ironfn pretrain {place(whole).parent / name / 'spec.yaml'}"
    assert f"saved at step {step} of 12; to go on: {again}" in run.all[0].said
    assert errors(run).count("saving at the end of this step") == (1 if rank == 0 else 0), "only rank 0 speaks"
    goes_on(folder, name, whole)


def test_a_signal_after_the_last_save_does_not_change_the_code(folder: Path) -> None:
    """A scheduler sends it again, or to a group of processes, while the ranks part; the code tells it to start anew."""

    def first(rank: int) -> None:
        before_step(1, 3, send(signal.SIGTERM))(rank)
        joined = drivers.pretrain.launched

        @contextmanager
        def launched(spec: RunSpec) -> Generator[tuple[Mesh, torch.device]]:
            with joined(spec) as place:
                yield place
                for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
                    os.kill(os.getpid(), number)

        drivers.pretrain.launched = launched

    with ranks(folder, "again", first=first) as run:
        assert run.wait(START) == [EXIT_STOPPED, EXIT_STOPPED], errors(run)
    assert saved(folder, "again") == [3]


def test_a_signal_in_an_evaluation_is_heard_by_all_at_the_edge_of_the_step(folder: Path, whole: RunSpec) -> None:
    def first(rank: int) -> None:
        if rank == 1:
            score, calls = drivers.watch.evaluate, [0]

            def evaluate(*arguments: Any) -> Any:
                calls[0] += 1
                if calls[0] == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
                return score(*arguments)

            drivers.watch.evaluate = evaluate

    with ranks(folder, "evaluating", first=first) as run:
        assert run.wait(START) == [EXIT_STOPPED, EXIT_STOPPED], errors(run)
    assert saved(folder, "evaluating")[-1] == 5
    goes_on(folder, "evaluating", whole)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_others_at_once_and_the_run_goes_on(folder: Path, whole: RunSpec, rank: int) -> None:
    name = f"killed-{rank}"
    with ranks(folder, name, first=before_step(rank, 6, send(signal.SIGKILL))) as run:
        assert run.wait(START, [rank]) == [-signal.SIGKILL]
        assert run.wait(5, [1 - rank]) == [1], "within five seconds"
    assert f"rank {rank}" in run.all[1 - rank].errors
    assert "Traceback" not in errors(run)
    assert saved(folder, name) == [4]
    goes_on(folder, name, whole)


def test_a_rank_that_is_killed_while_all_save_loses_no_step_of_the_run(folder: Path, whole: RunSpec) -> None:
    first = before_step(1, 9, send(signal.SIGKILL))  # the save of step 8 has begun, and may be whole or not
    with ranks(folder, "saving", "checkpoint.asynchronous=true", first=first) as run:
        assert run.wait(START, [1]) == [-signal.SIGKILL]
        assert run.wait(5, [0]) == [1], "within five seconds"
    assert saved(folder, "saving")[0] == 4
    goes_on(folder, "saving", whole, "checkpoint.asynchronous=true")


def test_a_stopped_rank_is_given_up_after_the_timeout(folder: Path) -> None:
    begin = time.monotonic()
    with ranks(folder, "stopped", "mesh.timeout=3", first=before_step(1, 2, send(signal.SIGSTOP))) as run:
        assert run.wait(START, [0]) == [1], "the timeout, and what it takes to start"
        assert time.monotonic() - begin < 3 + START / 2
        assert run.wait(0, [1]) == [None], "a stopped process cannot end itself; its launcher kills it"
    assert "rank 1" in run.all[0].errors


def poisoned(rank: int) -> None:
    """Make the loss of rank 1 not a number in step 2, the third: its rows are 10 and 11."""
    if rank == 1:
        make = drivers.objectives.lm_loss

        def lm_loss(*arguments: Any, **named: Any) -> Loss:
            right = make(*arguments, **named)

            def loss(params: Params, batch: Batch, mesh: Mesh) -> LossSum:
                out = right(params, batch, mesh)
                return attrs.evolve(out, total=out.total * float("nan")) if 10 in batch["row"] else out

            return loss

        drivers.objectives.lm_loss = lm_loss


def test_a_loss_that_is_no_number_on_one_rank_stops_all_with_one_message(folder: Path) -> None:
    with ranks(folder, "nan", first=poisoned) as run:
        assert run.wait(START) == [1, 1], errors(run)
    assert errors(run).count("step 2: loss nan") == 1
    assert "lower optim.lr" in run.all[0].errors
    assert run.all[1].errors == ""
    assert saved(folder, "nan") == []


def test_a_loss_that_is_no_number_on_one_rank_is_skipped_by_all(folder: Path) -> None:
    with ranks(folder, "skipping", "optim.nonfinite=skip", first=poisoned) as run:
        assert run.wait(START) == [0, 0], errors(run)
    rows = [row for row in read_rows(place(load(folder, "skipping")) / "metrics.jsonl") if row["kind"] == "train"]
    assert [row["skipped"] for row in rows] == [0, 0, *[1] * 10]


def test_data_that_one_machine_lacks_end_all_and_rank_0_says_which(folder: Path) -> None:
    def first(rank: int) -> None:
        if rank == 1:

            def absent(*arguments: object) -> None:
                raise FileNotFoundError(2, "No such file or directory", "data/tokens")

            drivers.build.open_dataset = absent  # type: ignore[assignment]

    with ranks(folder, "absent", first=first) as run:
        assert run.wait(START) == [1, 1]
    assert run.all[0].errors == "Error: rank 1: data/tokens: No such file or directory\n"
    assert run.all[1].errors == ""


def test_a_rank_without_memory_says_so_and_the_others_end_at_once(folder: Path) -> None:
    def full() -> None:
        torch.empty(1 << 60)

    with ranks(folder, "full", first=before_step(1, 2, full)) as run:
        assert run.wait(START, [1]) == [1]
        assert run.wait(5, [0]) == [1], "within five seconds"
    assert run.all[1].errors.startswith("Error: rank 1: not enough memory")
    assert "rank 1" in run.all[0].errors


def test_two_runs_in_one_directory_are_refused(folder: Path) -> None:
    metrics = place(load(folder, "twice")) / "metrics.jsonl"
    with ranks(folder, "twice", first=before_step(1, 3, lambda: time.sleep(60))) as run:
        run.until(lambda: metrics.exists() and len(metrics.read_bytes().splitlines()) > 2)
        second = Ranks(2, words(folder, "twice"), folder / "second.logs")
        with second:
            assert second.wait(START) == [1, 1]
        assert f"is in use by pid {run.all[0].pid}" in second.all[0].errors
        assert second.all[1].errors == ""
        assert run.wait(0) == [None, None]


def test_ranks_that_were_given_other_specs_do_not_start(folder: Path) -> None:
    run = ranks(folder, "unlike")
    run.more = {1: ["-s", "optim.lr=1e-3"]}
    with run:
        assert run.wait(START) == [1, 1]
    assert "the spec of rank 1" in run.all[0].errors
    assert run.all[1].errors == ""
    assert not (place(load(folder, "unlike")) / "metrics.jsonl").exists()
