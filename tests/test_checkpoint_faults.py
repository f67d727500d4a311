"""Fail and unplug every file operation of a save: the error is loud, and a whole checkpoint is always there."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import torch

from ironfn.checkpoint import (
    DISK,
    DamagedCheckpoint,
    Files,
    load,
    load_newest,
    newest,
    prune,
    save,
    steps,
    tidy,
    verify,
)
from tests.faults import MemoryDisk, Unplugged, failing, recording


def tree(step: int) -> dict:
    return {
        "params": {"w": torch.full((40, 30), float(step)), "b": torch.arange(3)},
        "opt": {"count": torch.tensor(step)},
    }


def write(directory: Path, step: int, files: Files) -> None:
    save(directory, step, tree(step), {"seed": 1}, file_bytes=4000, files=files)


def save_and_prune(directory: Path, files: Files) -> None:
    write(directory, 3, files)
    prune(directory, keep=1, files=files)


ACTIONS = {
    "a new one": lambda directory, files: write(directory, 3, files),
    "the same step again": lambda directory, files: write(directory, 2, files),
    "save and prune": save_and_prune,
}


def quiet(message: str) -> None:
    raise AssertionError(message)


def is_intact(directory: Path, step: int, files: Files = DISK) -> bool:
    path = directory / f"step-{step:08d}"
    return verify(path, files) == [] and float(load(path, files=files)[0]["params"]["w"][0, 0]) == step  # type: ignore[index]


@pytest.mark.parametrize("name", ACTIONS)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_an_error_at_any_operation_is_loud_and_leaves_a_whole_checkpoint(tmp_path: Path, name: str, code: int) -> None:
    seen: list[str] = []
    for place in range(1000):
        directory = tmp_path / str(place)
        for step in (1, 2):
            write(directory, step, DISK)
        error, raised = OSError(code, "injected"), None
        try:
            ACTIONS[name](directory, recording(seen, failing(place, error)))
        except OSError as caught:
            raised = caught
        if raised is None:
            break
        assert raised is error
        best = newest(directory, quiet)
        assert best is not None
        assert best.name >= "step-00000002"
        assert is_intact(directory, int(best.name[5:]))
        ACTIONS[name](directory, DISK)  # and the next attempt finds nothing in its way
        assert all(is_intact(directory, step) for step in steps(directory))
        assert [p.name for p in directory.iterdir() if p.name.startswith(".")] == []
    assert place > 10  # every operation had its turn: the last round had none left to fail
    assert {"mkdir", "create", "write", "sync", "sync_directory", "rename", "free", "names"} <= set(seen)


def test_the_half_written_files_of_a_failed_save_give_their_space_back(tmp_path: Path) -> None:
    write(tmp_path, 1, DISK)
    names: list[str] = []
    write(tmp_path / "elsewhere", 2, recording(names))
    last_write = max(place for place, name in enumerate(names) if name == "write")
    with pytest.raises(OSError, match="injected"):
        write(tmp_path, 2, failing(last_write, OSError(errno.ENOSPC, "injected")))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["elsewhere", "step-00000001"]


def test_too_little_space_is_told_in_bytes_before_anything_is_written(tmp_path: Path) -> None:
    write(tmp_path, 1, DISK)
    names: list[str] = []
    files = recording(names, attrs.evolve(DISK, free=lambda path: 1000))
    with pytest.raises(OSError, match=r"needs [\d,]+ bytes and 1,000 are free") as caught:
        write(tmp_path, 2, files)
    assert caught.value.errno == errno.ENOSPC
    assert "create" not in names
    assert is_intact(tmp_path, 1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_disk_that_is_really_full(small_disk: Path) -> None:
    small = {"w": torch.zeros(100_000)}
    large = {"w": torch.zeros(200_000)}
    save(small_disk, 1, small, {})
    with pytest.raises(OSError, match="bytes and"):
        save(small_disk, 2, large, {})
    with pytest.raises(OSError, match="No space left"):  # the space that was there went to somebody else
        save(small_disk, 2, large, {}, files=attrs.evolve(DISK, free=lambda path: 1 << 40))
    assert [p.name for p in small_disk.iterdir()] == ["step-00000001"]
    assert newest(small_disk, quiet) == small_disk / "step-00000001"
    prune(small_disk, keep=1)
    save(small_disk, 3, small, {})
    assert list(steps(small_disk)) == [1, 3]


@pytest.mark.parametrize("name", ACTIONS)
def test_the_power_may_go_before_any_operation(name: str) -> None:
    directory = Path("/runs/a/checkpoints")
    found: set[int] = set()
    for place in range(1000):
        disk = MemoryDisk()
        for step in (1, 2):
            write(directory, step, disk.files)
        try:
            ACTIONS[name](directory, failing(place, Unplugged(), disk.files))
            done = True
        except Unplugged:
            done = False
        for left in disk.after_a_cut():
            tidy(directory, left.files)
            best = load_newest(directory, quiet, files=left.files)
            assert best is not None
            step = int(best.meta["step"])
            assert step >= 2 + (done and name != "the same step again")
            assert float(best.tree["params"]["w"][0, 0]) == step  # type: ignore[index]
            found.add(step)
            assert all(is_intact(directory, step, left.files) for step in steps(directory, left.files))
            ACTIONS[name](directory, left.files)
            assert all(is_intact(directory, step, left.files) for step in steps(directory, left.files))
            assert all(n.startswith("step-") for n in left.files.names(directory))
        if done:
            break
    assert done
    assert place > 10
    assert found == ({2} if name == "the same step again" else {2, 3})


def test_the_power_may_go_in_the_first_save_of_all() -> None:
    directory = Path("/runs/a/checkpoints")
    for place in range(1000):
        disk = MemoryDisk()
        try:
            write(directory, 1, failing(place, Unplugged(), disk.files))
            break
        except Unplugged:
            pass
        for left in disk.after_a_cut():
            tidy(directory, left.files)
            best = load_newest(directory, quiet, files=left.files)
            assert best is None or best.meta["step"] == 1
            write(directory, 1, left.files)
            assert is_intact(directory, 1, left.files)
    assert all(newest(directory, quiet, files=left.files) for left in disk.after_a_cut())
    assert place > 10


def test_a_death_in_a_replacement_and_then_a_power_cut_in_the_tidying_lose_nothing() -> None:
    directory = Path("/runs/a/checkpoints")

    class Death(BaseException):
        """Be SIGKILL: nothing is cleaned up, and the disk lives on."""

    def begun(place: int) -> MemoryDisk:
        disk = MemoryDisk()
        write(directory, 2, disk.files)
        with contextlib.suppress(Death):
            write(directory, 2, failing(place, Death(), disk.files))
        return disk

    names: list[str] = []
    write(directory, 2, recording(names, begun(10**6).files))
    cuts = 0
    for place in range(len(names)):
        for second in range(1000):
            disk = begun(place)
            try:
                tidy(directory, failing(second, Unplugged(), disk.files))
                break
            except Unplugged:
                cuts += 1
            for left in disk.after_a_cut():
                tidy(directory, left.files)
                assert newest(directory, quiet, files=left.files) == directory / "step-00000002"
    assert cuts > 2 * len(names)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_disk_error_while_reading_is_damage_and_the_one_before_is_taken(tmp_path: Path, code: int) -> None:
    for step in (1, 2):
        write(tmp_path, step, DISK)
    names: list[str] = []
    load_newest(tmp_path, quiet, files=recording(names))
    reads = [place for place, name in enumerate(names) if name in ("size", "open", "read")]
    assert len(reads) > 8
    for place in reads:
        told: list[str] = []
        found = load_newest(tmp_path, told.append, files=failing(place, OSError(code, "injected")))
        assert found is not None
        assert (found.meta["step"], len(told)) == (1, 1)
        assert "injected" in told[0]
        with pytest.raises(DamagedCheckpoint, match="injected"):
            load(tmp_path / "step-00000002", files=failing(place - 1, OSError(code, "injected")))


@pytest.mark.parametrize("code", [errno.EACCES, errno.EMFILE])
def test_what_is_forbidden_is_an_error_and_no_damage(tmp_path: Path, code: int) -> None:
    for step in (1, 2):
        write(tmp_path, step, DISK)
    error = OSError(code, os.strerror(code))

    def refuse(path: Path) -> None:
        raise error

    files = attrs.evolve(DISK, open=refuse)  # type: ignore[arg-type]
    for call in (newest, load_newest):
        with pytest.raises(OSError, match=os.strerror(code)):
            call(tmp_path, quiet, files=files)
    with pytest.raises(OSError, match=os.strerror(code)):
        verify(tmp_path / "step-00000002", files)


def test_a_full_disk_is_told_with_the_file() -> None:
    with open("/dev/full", "wb", buffering=0) as file, pytest.raises(OSError, match="No space left") as caught:
        DISK.write(file, b"x")
    assert caught.value.filename == "/dev/full"
