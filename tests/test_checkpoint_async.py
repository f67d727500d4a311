"""Save while the steps go on: the same promises, whatever the thread meets and whenever the run dies."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from ironfn import tree
from ironfn.checkpoint import DISK, Files, Saver, load, load_newest, prune, steps, verify
from ironfn.layout.table import Placement, cut, shard
from ironfn.mesh import fake
from ironfn.mesh.axis import Mesh
from tests.faults import failing, watched
from tests.gloo import world

LAYOUT = {"w": cut("dp", 0), "b": Placement(), "own": Placement(owner=1)}


def whole(step: int) -> dict:
    return {"w": torch.full((8, 600), float(step)), "b": torch.full((5,), step), "own": torch.full((4,), step)}


def is_intact(path: Path) -> bool:
    right = whole(int(path.name[5:]))
    return verify(path) == [] and all(torch.equal(x, right[p]) for p, x in tree.flatten(load(path)[0]).items())


def saver(directory: Path, mesh: Mesh, files: Files = DISK, keep: int | None = None) -> Saver:
    after = (lambda path: None) if keep is None else (lambda path: prune(directory, keep, files=files))
    return Saver(directory, LAYOUT, mesh, after=after, files=files)


def on_two(function: Callable[[Mesh], Any]) -> list[Any]:
    return fake.run(function, dp=2, timeout=20)


@attrs.frozen
class Gate:
    """Hold the writing of files back until it is opened."""

    open: threading.Event = attrs.field(factory=threading.Event)

    @property
    def files(self) -> Files:
        def before(name: str, arguments: tuple) -> None:
            in_background = threading.current_thread().name.startswith("save of step")
            assert not (name == "write" and in_background) or self.open.wait(20)

        return watched(before)


def test_what_is_saved_is_the_step_and_not_what_the_next_ones_write_into_its_buffers(tmp_path: Path) -> None:
    gate = Gate()
    state = {"w": torch.ones(1000), "turned": torch.arange(6.0).reshape(2, 3).t(), "tied": torch.ones(3)}
    state["too"] = state["tied"]
    before = tree.clone(state)
    saving = Saver(tmp_path, files=gate.files)
    saving.start(1, state, {})
    for leaf in tree.leaves(state):
        leaf.mul_(0).sub_(7)
    assert saving.poll() is None
    assert list(steps(tmp_path)) == []
    gate.open.set()
    path = saving.finish()
    assert path is not None
    loaded = load(path)[0]
    assert all(torch.equal(loaded[p], before[p]) for p in before)  # type: ignore[arg-type]
    assert loaded["too"] is loaded["tied"]
    assert saving.poll() is None
    assert saving.finish() is None


@pytest.mark.parametrize("slow", [0, 1])
def test_a_checkpoint_appears_on_all_ranks_at_one_edge_once_the_slowest_has_written(tmp_path: Path, slow: int) -> None:
    gate = Gate()

    def run(mesh: Mesh) -> list[bool]:
        mine = saver(tmp_path, mesh, gate.files if mesh.dp.index == slow else DISK)
        mine.start(1, shard(whole(1), LAYOUT, mesh), {})
        early = [mine.poll() is not None for _ in range(3)]
        if mesh.dp.index == slow:
            assert list(steps(tmp_path)) == []
            gate.open.set()
        late = 0
        while (path := mine.poll()) is None:
            late += 1
            time.sleep(0.005)
        assert is_intact(path)
        return [*early, *[False] * late]

    first, second = on_two(run)
    assert first == second
    assert not any(first)


def test_a_new_save_waits_for_the_one_before(tmp_path: Path) -> None:
    def run(mesh: Mesh) -> None:
        mine = saver(tmp_path, mesh, keep=2)
        for step in range(1, 6):
            mine.start(step, shard(whole(step), LAYOUT, mesh), {})
            if mesh.dp.index == 0 and step > 1:
                assert list(steps(tmp_path))[-1] == step - 1
        mine.save(6, shard(whole(6), LAYOUT, mesh), {})
        assert mine.finish() is None

    on_two(run)
    assert list(steps(tmp_path)) == [5, 6]
    assert all(is_intact(path) for path in tmp_path.iterdir())


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_at_any_operation_is_loud_on_all_ranks_at_the_next_edge(tmp_path: Path, rank: int) -> None:
    for place in range(1000):
        directory = tmp_path / str(place)

        def attempt(mesh: Mesh, to: Path = directory, place: int = place) -> Any:
            saver(to, mesh).save(1, shard(whole(1), LAYOUT, mesh), {})
            error = OSError(errno.EIO, "injected")
            mine = saver(to, mesh, failing(place, error) if mesh.world.index == rank else DISK, keep=1)
            try:
                mine.start(2, shard(whole(2), LAYOUT, mesh), {})
                return mine.finish()
            except OSError as caught:
                assert mine.finish() is None
                return caught

        found = on_two(attempt)
        if not any(isinstance(each, OSError) for each in found):
            break
        for each in found:
            assert f"rank {rank}: injected" in str(each)
        best = load_newest(directory, pytest.fail)
        assert best is not None
        assert is_intact(best.path)
        on_two(lambda mesh, to=directory: saver(to, mesh).save(3, shard(whole(3), LAYOUT, mesh), {}))
        assert all(is_intact(path) for path in directory.iterdir())
    assert place > (15 if rank == 0 else 5)


def test_a_run_that_ends_without_waiting_leaves_nothing_visible(tmp_path: Path) -> None:
    mine = Saver(tmp_path)
    mine.save(1, {"w": torch.ones(3)}, {})
    gate = Gate()
    Saver(tmp_path, files=gate.files).start(2, {"w": torch.ones(3)}, {})
    assert list(steps(tmp_path)) == [1]
    gate.open.set()
    for thread in [each for each in threading.enumerate() if each.name == "save of step 2"]:
        thread.join()
    mine.save(3, {"w": torch.ones(3)}, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def killed_at(place: int) -> Files:
    """Kill this process before its operation with this number; a write has then done half of its work."""
    left = iter(range(place, -1, -1))

    def before(name: str, arguments: tuple) -> None:
        if next(left, -1) == 0:
            if name == "write":
                DISK.write(arguments[0], memoryview(arguments[1])[: len(arguments[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    return watched(before)


@pytest.mark.parametrize("background", [False, True], ids=["waiting", "background"])
def test_a_killed_rank_loses_no_checkpoint_and_shows_no_half_one(tmp_path: Path, background: bool) -> None:
    """SIGKILL a rank of a real mesh before a file operation; the other notices, and the next run goes on."""
    draw = random.Random(background)
    places = [(0, draw.randrange(60)), (0, draw.randrange(60)), (1, draw.randrange(20)), (1, draw.randrange(20))]
    died = 0
    for rank, place in places:

        def run(mesh: Mesh, rank: int = rank, place: int = place) -> None:
            mine = saver(tmp_path, mesh, killed_at(place) if mesh.dp.index == rank else DISK, keep=2)
            last = max(steps(tmp_path), default=0)
            for step in range(last + 1, last + 5):
                (mine.start if background else mine.save)(step, shard(whole(step), LAYOUT, mesh), {})
                mine.poll()
            mine.finish()

        ends = world(2, run, timeout=30, mesh_timeout=6, errors=True)
        died += "signal 9" in str(ends[rank])
        assert all(is_intact(path) for path in steps(tmp_path).values())
        assert len(steps(tmp_path)) <= 3

    def last(mesh: Mesh) -> None:
        saver(tmp_path, mesh, keep=1).save(1000, shard(whole(1000), LAYOUT, mesh), {})

    world(2, last, timeout=30)
    assert died == 4
    assert [p.name for p in tmp_path.iterdir()] == ["step-00001000"]
