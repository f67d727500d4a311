"""Ranks that die while they write, are graded, or learn: the run goes on as if none had; no process is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import drivers.rollouts
from tests.ranks import Ranks, before_step, send
from tests.test_grpo import _here, final, folder, rows, spec_file, texts
from tests.test_rewards import gone
from tests.tuning import same

__all__ = ["_here", "folder"]

ROOT = Path(__file__).parents[1]
GRADER = "grpo.rewards={slow: {kind: function, path: 'tests.own_rewards:waits_once', seconds: 60}}"
SETS = ("mesh.dp=2", "mesh.timeout=60", "checkpoint.every=2", "checkpoint.asynchronous=false", "grpo.tries=0", GRADER)


def words(name: str) -> list[str]:
    return ["grpo", str(spec_file(name)), *(word for each in SETS for word in ("-s", each))]


def ranks(name: str, first: Callable[[int], None] = lambda rank: None) -> Ranks:
    return Ranks(2, words(name), Path(f"ranks-{name}").absolute(), first)


@pytest.fixture(scope="module", autouse=True)
def whole(folder: Path) -> None:
    """Take the run's steps with nobody in the way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("RWD_MARK", str(folder))  # which is there: nothing waits
        with ranks("whole") as run:
            assert run.wait(120) == [0, 0], [rank.errors for rank in run.all]


def is_whole(name: str) -> None:
    assert same(final(name), final("whole"))
    assert rows(name) == rows("whole")
    assert texts(name) == texts("whole")


def writes(rank: int, rollout: int) -> Callable[[int], None]:
    """Return what ends a rank in the middle of what it writes."""

    def first(this: int) -> None:
        if this == rank:
            write, calls = drivers.rollouts.roll_out, [0]

            def counted(*arguments: object) -> object:
                calls[0] += 1
                if calls[0] == rollout:
                    os.kill(os.getpid(), signal.SIGKILL)
                return write(*arguments)  # type: ignore[arg-type]

            drivers.rollouts.roll_out = counted  # type: ignore[assignment]

    return first


@pytest.mark.parametrize(
    ("name", "rank", "first"),
    [("replaying", 0, before_step(0, 7, send(signal.SIGKILL))), ("writing", 1, writes(1, 3))],
    ids=["replaying", "writing"],
)
def test_a_dead_rank_loses_no_step(
    name: str, rank: int, first: Callable[[int], None], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RWD_MARK", str(folder))
    with ranks(name, first) as run:
        assert run.wait(60, [rank]) == [-signal.SIGKILL]
        assert run.wait(20, [1 - rank]) == [1]
        assert "Traceback" not in run.all[1 - rank].errors
    with ranks(name) as run:
        assert run.wait(120) == [0, 0], [rank.errors for rank in run.all]
    assert "resuming at step" in run.all[0].said
    is_whole(name)


@pytest.mark.timeout(360)
def test_the_launcher_starts_a_run_again_whose_rank_died_while_texts_were_graded(folder: Path) -> None:
    mark, log = folder / "graded", folder / "graded.log"
    after = folder / "runs/graded/checkpoints/step-00000004"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RWD_MARK": str(mark), "RWD_AFTER": str(after)}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    with log.open("wb") as out:
        launcher = subprocess.Popen(
            [*launch, "-m", "ironfn", *words("graded")], stdout=out, stderr=out, cwd=folder, env=environment
        )
    try:
        end = time.monotonic() + 150
        while not (mark.exists() and mark.read_text()):
            assert time.monotonic() < end, log.read_text()
            assert launcher.poll() is None, log.read_text()
            time.sleep(0.05)
        grader = psutil.Process(int(mark.read_text()))
        dead = next(each for each in psutil.Process(launcher.pid).children() if each != grader.parent())
        dead.kill()
        mark.write_text("go on")
        assert launcher.wait(150) == 0, log.read_text()
    finally:
        launcher.kill()
        launcher.wait()
    gone(grader.pid)
    assert "resuming at step 4" in log.read_text()
    is_whole("graded")
