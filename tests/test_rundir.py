"""Hold a run's directory to one process and one spec, and signals to one save."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import attrs
import pytest
import torch

from drivers.rundir import RunDir, differences
from drivers.signals import EXIT_INTERRUPTED, EXIT_STOPPED, stop_requested
from ironfn.checkpoint import save
from ironfn.spec.load import dump_spec
from ironfn.spec.records import ModelSpec, RunSpec, TrainSpec

HOLD = """
import sys, time
from pathlib import Path
from drivers.rundir import RunDir
with RunDir(Path(sys.argv[1])).held():
    print("held", flush=True)
    time.sleep(60)
"""

LOOP = """
import sys, time
from drivers.signals import EXIT_STOPPED, stop_requested
with stop_requested("ironfn pretrain my.yaml") as stopped:
    print("ready", flush=True)
    for step in range(3000):
        time.sleep(0.02)
        if stopped() and step > int(sys.argv[1]):
            print("saved after", stopped(), flush=True)
            raise SystemExit(EXIT_STOPPED)
"""


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline().strip() in ("held", "ready")
    return child


def finish(child: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = child.communicate(timeout=60)
    return child.returncode, out, err


def test_a_second_process_is_refused_with_the_pid_and_a_dead_one_locks_nothing(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "a")
    child = start(HOLD, run.path)
    with pytest.raises(ValueError, match=rf"in use by pid {child.pid} on \S+: wait"), run.held():
        pass
    child.kill()
    assert finish(child)[0] == -signal.SIGKILL
    assert f"pid {child.pid}" in (run.path / "lock").read_text()
    with run.held() as held:
        assert held is run
        with pytest.raises(ValueError, match=f"in use by pid {os.getpid()}"), run.held():  # the same process, too
            pass
    with run.held():  # and free again
        pass


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with run.held():
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    try:
        with run.held():
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_whoever_holds_it_puts_a_dead_process_checkpoints_in_order(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    path = save(run.checkpoints, 1, {"a": torch.ones(1)}, {})
    path.rename(run.checkpoints / ".old-step-00000001")  # died between the two renames of a replacement
    (run.checkpoints / ".tmp-step-00000001").mkdir()
    with run.held():
        assert [p.name for p in run.checkpoints.iterdir()] == ["step-00000001"]


def test_the_spec_is_written_and_what_binds_may_not_change(tmp_path: Path) -> None:
    run, told = RunDir(tmp_path), []
    spec = RunSpec()
    run.settle(spec, resuming=False, override=False, warn=told.append)
    assert run.spec.read_text() == dump_spec(spec)
    longer = attrs.evolve(spec, train=TrainSpec(steps=5000, threads=2))
    run.settle(longer, resuming=True, override=False, warn=told.append)
    assert run.spec.read_text() == dump_spec(longer)
    wider = attrs.evolve(longer, model=ModelSpec(width=512, kv_heads=2), train=TrainSpec(seed=7))
    with pytest.raises(ValueError, match="begun with another spec") as caught:
        run.settle(wider, resuming=True, override=False, warn=told.append)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert lines[1:4] == ["model.width: 384 -> 512", "model.kv_heads: None -> 2", "train.seed: 0 -> 7"]
    assert run.spec.read_text() == dump_spec(longer)
    assert told == []
    run.settle(wider, resuming=True, override=True, warn=told.append)
    assert len(told) == 3
    assert run.spec.read_text() == dump_spec(wider)
    run.settle(spec, resuming=False, override=False, warn=told.append)  # nothing to resume: nothing binds
    assert sorted(p.name for p in tmp_path.iterdir()) == ["spec.yaml"]


def test_fields_that_the_older_spec_did_not_have_are_at_their_defaults(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.spec.write_text("model: {width: 64}\n")
    run.settle(RunSpec(model=ModelSpec(width=64)), resuming=True, override=False, warn=pytest.fail)
    run.spec.write_text("model: {wdth: 64}\n")
    with pytest.raises(ValueError, match="cannot be compared"):
        run.settle(RunSpec(), resuming=True, override=False, warn=pytest.fail)


def test_only_what_changes_numbers_binds() -> None:
    spec = RunSpec()
    free = attrs.evolve(spec, name="b", data=attrs.evolve(spec.data, workers=4), train=TrainSpec(micro_batch=2))
    assert differences(spec, free) == []
    bound = attrs.evolve(spec, optim=attrs.evolve(spec.optim, groups={"head": "adamw"}))
    assert differences(spec, bound) == ["optim.groups: {} -> (nothing)", "optim.groups.head: (nothing) -> 'adamw'"]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_stops_at_the_next_edge_with_75_and_tells_how_to_resume(name: str) -> None:
    child = start(LOOP, 0)
    child.send_signal(signal.Signals[name])
    code, out, err = finish(child)
    assert (code, out.strip()) == (EXIT_STOPPED, f"saved after {name}")
    assert f"{name}: saving" in err
    assert "ironfn pretrain my.yaml" in err


def test_further_signals_change_nothing() -> None:
    child = start(LOOP, 20)
    for name in ("SIGTERM", "SIGTERM", "SIGUSR1", "SIGINT", "SIGINT", "SIGTERM"):
        child.send_signal(signal.Signals[name])
        time.sleep(0.01)
    code, out, err = finish(child)
    assert (code, out.strip()) == (EXIT_STOPPED, "saved after SIGTERM")
    assert err.count("saving") == 1


def test_a_second_ctrl_c_leaves_at_once() -> None:
    child = start(LOOP, 10**9)
    child.send_signal(signal.SIGINT)
    time.sleep(1.2)
    child.send_signal(signal.SIGINT)
    code, out, err = finish(child)
    assert (code, out) == (EXIT_INTERRUPTED, "")
    assert "without a save" in err


def test_the_handlers_of_before_come_back_and_threads_catch_nothing() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        with stop_requested() as stopped:
            assert stopped() is None
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stopped() == "SIGUSR1"
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
        answers: list[object] = []

        def elsewhere() -> None:
            with stop_requested() as stopped:
                os.kill(os.getpid(), signal.SIGUSR1)
                answers.append(stopped())

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert answers == [None]
        assert heard == [signal.SIGUSR1] * 2
    finally:
        signal.signal(signal.SIGUSR1, before)
