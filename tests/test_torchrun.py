"""The real launcher: ranks that torchrun starts, restarts after a death, and passes a signal on to."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ironfn import checkpoint
from ironfn.report.rows import read_rows
from tests.ranks import Ranks
from tests.test_run import ROOT, folder, load, place, spec_file

__all__ = ["folder"]

OVERRIDES = (
    "mesh.dp=2",
    "model.pad_vocab_to=2",
    "mesh.zero1=true",
    "train.steps=100000",
    "optim.schedule.kind=constant",
)
OVERRIDES += ("checkpoint.every=5", "report.eval_every=100000", "train.threads=null")


@pytest.mark.timeout(240)
def test_torchrun_restarts_a_run_after_a_death_and_a_signal_saves_it(folder: Path) -> None:
    """Kill a rank: the launcher starts all anew and they go on. Tell the launcher to end: all save. Go on elsewhere."""
    words = ["pretrain", str(spec_file(folder, "launched")), *(w for o in OVERRIDES for w in ("-s", o))]
    run = place(load(folder, "launched"))
    log = folder / "torchrun.log"
    with log.open("wb") as out:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1",
             "-m", "ironfn", *words],
            stdout=out, stderr=out, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    try:
        wait(launcher, lambda: newest(run) >= 5)
        first = ranks_of(launcher)
        os.kill(first[0], signal.SIGKILL)
        wait(launcher, lambda: "resuming at step" in log.read_text() and newest(run) > resumed(log))
        second = ranks_of(launcher)
        assert set(second).isdisjoint(first)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(60) != 0, "torchrun's own code for a signal; the ranks' is 75"
    finally:
        launcher.kill()
        said = log.read_text()
    assert not [pid for pid in (*first, *second) if psutil.pid_exists(pid)], "no orphan"
    done = newest(run)
    assert f"saved at step {done} of 100000" in said
    steps = [row["step"] for row in read_rows(run / "metrics.jsonl") if row["kind"] == "train"]
    assert steps == list(range(1, done + 1)), "each step once, over the death and the signal"
    assert len(re.findall(r"^resuming at step", said, re.M)) == 1, "one of the ranks speaks"
    more = ("-s", f"train.steps={done + 2}", "-s", "mesh.tp=2")
    with Ranks(4, [*words, *more], folder / "launched.logs") as four:
        assert four.wait(60) == [0] * 4, [rank.errors for rank in four.all]
    assert newest(run) == done + 2


def newest(run: Path) -> int:
    return max(checkpoint.steps(run / "checkpoints"), default=0)


def resumed(log: Path) -> int:
    return int(re.findall(r"^resuming at step (\d+)", log.read_text(), re.M)[-1])


def ranks_of(launcher: subprocess.Popen[bytes]) -> list[int]:
    """Return the pids of the launcher's ranks, in their order."""
    found = [child for child in psutil.Process(launcher.pid).children() if "ironfn" in child.cmdline()]
    return [child.pid for child in sorted(found, key=lambda child: child.environ()["RANK"])]


def wait(launcher: subprocess.Popen[bytes], seen: Callable[[], bool]) -> None:
    end = time.monotonic() + 90
    while not seen():
        assert launcher.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)
