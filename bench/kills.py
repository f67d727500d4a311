"""Kill real training runs with -9, resume them, and hold every loss and every sample to the run that was never stopped.

Each life of a run is a child forked from a parent that has only imported: 0.1 s instead of the seconds of a fresh
start. A child is killed at a random moment, or kills itself in the place of a chosen file operation of a save. Only
the page that a run draws at its end is left out: it would take most of the time, and no state depends on it.
"""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

import drivers.run
import ironfn.data
from bench.figure import Figure
from ironfn.checkpoint import DISK
from ironfn.spec.records import (
    CheckpointSpec,
    DataSpec,
    ModelSpec,
    ReportSpec,
    RunSpec,
    SetSpec,
    SplitSpec,
    TokenizerSpec,
    TrainSpec,
)

FAILED = 70
"""The exit code of a child that raised."""


def figures() -> Iterator[Figure]:
    """Yield how many losses and samples differ after 200 kills at random moments and a death before every operation."""
    found = random_kills(200, steps=24, every=4, seed=0) + deaths(steps=4, every=2)
    note = f"{found.kills} kills at random moments, {found.deaths} deaths before a file operation, {found.runs} runs"
    yield Figure("kills_differing_losses", found.losses, "== 0", note)
    yield Figure("kills_wrong_samples", found.samples, "== 0", note)


@frozen
class Found:
    """Count what was done and what came of it: losses and samples that differ, are missing or are there twice."""

    kills: int = 0
    deaths: int = 0
    runs: int = 0
    losses: int = 0
    samples: int = 0

    def __add__(self, other: Found) -> Found:
        return Found(*(a + b for a, b in zip(attrs.astuple(self), attrs.astuple(other), strict=True)))


def random_kills(kills: int, steps: int, every: int, seed: int, lives: int = 5) -> Found:
    """Kill runs, saved at every ``every``-th step, at random moments, ``lives`` times at most, then let them end."""
    draw = random.Random(seed)
    found = Found()
    with tempfile.TemporaryDirectory() as name:
        spec = prepare(Path(name), steps, every)
        begin = time.monotonic()
        wanted = run_whole(spec("whole"))
        duration = time.monotonic() - begin
        while found.kills < kills:
            run = spec(f"killed-{found.runs}")
            times = min(lives, kills - found.kills)
            killed = sum(live(run, kill_after=draw.uniform(0, duration)) == -signal.SIGKILL for _ in range(times))
            losses, samples = finish(run, wanted)
            found += Found(kills=killed, runs=1, losses=losses, samples=samples)
    return found


def all_places(operations: list[str]) -> Sequence[int]:
    """Choose every operation."""
    return range(len(operations))


def deaths(steps: int, every: int, choose: Callable[[list[str]], Sequence[int]] = all_places) -> Found:
    """Let runs die in the place of one file operation each: of those that ``choose`` picks by their names."""
    found = Found()
    with tempfile.TemporaryDirectory() as name:
        spec = prepare(Path(name), steps, every)
        wanted = run_whole(spec("whole"))
        for place in choose(operations(spec("counted"))):
            run = spec(f"died-{place}")
            code = live(run, first=functools.partial(die_at, place))
            assert code == -signal.SIGKILL, f"operation {place} was never reached (exit code {code})"
            losses, samples = finish(run, wanted)
            found += Found(deaths=1, runs=1, losses=losses, samples=samples)
    return found


def run_whole(spec: RunSpec) -> list[dict[str, Any]]:
    """Let a run live to its end and return its rows."""
    assert live(spec) == 0
    return rows(Path(spec.out) / spec.name)


def prepare(room: Path, steps: int, every: int) -> Callable[[str], RunSpec]:
    """Write a small corpus and its stores; return the spec of a tiny run, by the run's name."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(60)]
    lines = (json.dumps({"text": " ".join(draw.choices(words, k=draw.randint(5, 60)))}) for _ in range(200))
    (room / "text.jsonl").write_text("\n".join(lines) + "\n")
    data = DataSpec(
        dir=str(room / "data"),
        sets={"text": SetSpec(sources=[str(room / "text.jsonl")])},
        tokenizer=TokenizerSpec(vocab_size=300),
        split=SplitSpec(validation=0.1),
        length=32,
    )
    pid = fork(lambda: ironfn.data.prepare(data) and 0, room / "prepare.log")
    assert wait(pid) == 0, (room / "prepare.log").read_text()

    def spec(name: str) -> RunSpec:
        return RunSpec(
            name=name,
            out=str(room / "runs"),
            model=ModelSpec(width=16, layers=2, heads=2, ffn=32, context=32, dropout=0.1),
            data=data,
            train=TrainSpec(steps=steps, batch=4, threads=1, device="cpu"),
            checkpoint=CheckpointSpec(every=every, keep=1),
            report=ReportSpec(log_every=1000, eval_every=steps // 2, eval_rows=4, peak_flops=1e12),
        )

    return spec


def fork(work: Callable[[], int], log: Path) -> int:
    """Start ``work`` in a forked child whose exit code it returns, its output in ``log``; return the child's pid."""
    pid = os.fork()
    if pid:
        return pid
    code = FAILED
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        code = work()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def wait(pid: int, until: float | None = None) -> int:
    """Return the child's exit code, minus the signal for one that was killed; kill it at the time ``until``."""
    while until is not None and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() >= until:
            os.kill(pid, signal.SIGKILL)
            break
        time.sleep(0.001)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def live(spec: RunSpec, kill_after: float | None = None, first: Callable[[], None] | None = None) -> int:
    """Let a run live: to its end, or until it is killed after so many seconds; return its exit code, -9 if killed.

    first: what the child does before.
    """
    log = Path(spec.out) / f"{spec.name}.log"
    log.parent.mkdir(exist_ok=True)

    def work() -> int:
        if first is not None:
            first()
        return train(spec)

    code = wait(fork(work, log), None if kill_after is None else time.monotonic() + kill_after)
    assert code != FAILED, log.read_text()
    return code


def train(spec: RunSpec) -> int:
    """Train as the command line does, but for the page at the end; only for a child, since it bends the module."""
    drivers.run.draw = lambda run_dir, say, warn: None
    return drivers.run.run(spec)


def finish(spec: RunSpec, wanted: list[dict[str, Any]]) -> tuple[int, int]:
    """Let a run go on to its end, compare it, and remove it."""
    wrong = compare(run_whole(spec), wanted)
    shutil.rmtree(Path(spec.out) / spec.name)
    return wrong


def rows(run: Path) -> list[dict[str, Any]]:
    """Return the rows that a run wrote of its steps, in the file's order."""
    found = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in found if row["kind"] == "train"]


def compare(got: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> tuple[int, int]:
    """Count the losses, and the samples, that are not those of the run that was never stopped.

    A loss is compared by its hex digits, the samples of a step by the checksum of its tokens and targets; a step that
    is missing or there twice counts as both.
    """
    by_step: dict[int, list[dict[str, Any]]] = {row["step"]: [] for row in (*wanted, *got)}
    for row in got:
        by_step[row["step"]].append(row)
    losses = samples = 0
    right = {row["step"]: row for row in wanted}
    for step, found in by_step.items():
        once = len(found) == 1 and step in right
        losses += not (once and float(found[0]["loss"]).hex() == float(right[step]["loss"]).hex())
        samples += not (once and found[0]["batch"] == right[step]["batch"])
    return losses, samples


# What a child does to itself. The record of operations is frozen: only a process that is about to die may bend it.


def operations(spec: RunSpec) -> list[str]:
    """Return the names of the file operations of a run that is not stopped, in their order."""
    names = Path(spec.out) / "operations"

    def note() -> None:
        out = os.open(names, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        watch(lambda name, arguments: os.write(out, f"{name}\n".encode()))

    assert live(spec, first=note) == 0
    return names.read_text().split()


def die_at(place: int) -> None:
    """Kill this process in the place of the operation with this number; a write has then done half of its work."""
    left = iter(range(place, -1, -1))
    write = DISK.write

    def before(name: str, arguments: tuple[Any, ...]) -> None:
        if next(left) == 0:
            if name == "write":
                write(arguments[0], memoryview(arguments[1])[: len(arguments[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    watch(before)


def watch(before: Callable[[str, tuple[Any, ...]], object]) -> None:
    """Call ``before`` ahead of every file operation of this process from now on."""

    def wrap(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            before(name, arguments)
            return operation(*arguments)

        return call

    for each in attrs.fields(type(DISK)):
        object.__setattr__(DISK, each.name, wrap(each.name, getattr(DISK, each.name)))
