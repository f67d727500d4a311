"""Make a directory or a file that is there whole or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from ironfn.data.files import sync_folder


@contextmanager
def whole_directory(path: Path) -> Generator[Path]:
    """Yield a new directory beside ``path`` to fill, which becomes ``path`` when the block ends without an error.

    ValueError where ``path`` is there already, or another process is making it. What an earlier death left is removed.
    """
    with _beside(path) as aside:
        yield aside
        for folder, _, names in os.walk(aside):
            _settle(Path(folder), names)
        os.rename(aside, path)
        sync_folder(path.parent)


@contextmanager
def whole_file(path: Path) -> Generator[Path]:
    """Yield the name of a file to write, which becomes ``path`` when the block ends without an error.

    ValueError as of `whole_directory`.
    """
    with _beside(path) as aside:
        yield aside / path.name
        _settle(aside, [path.name])
        os.rename(aside / path.name, path)
        sync_folder(path.parent)


@contextmanager
def _beside(path: Path) -> Generator[Path]:
    """Hold an empty directory beside ``path`` until the block ends; then it is gone, if it is still there.

    The lock on it is the operating system's, and ends with the process, however that ends.
    """
    if path.exists() or path.is_symlink():
        raise ValueError(f"{path} is there already; give a new name, or remove it")
    aside = path.with_name(f".tmp-{path.name}")
    aside.mkdir(parents=True, exist_ok=True)
    handle = os.open(aside, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _lock(handle, aside, path)
        _empty(aside)
        try:
            yield aside
        except OSError as error:
            if error.filename is not None:
                raise
            raise ValueError(
                f"{path} could not be made, and nothing is left of it: {error.strerror or error}"
            ) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    finally:
        os.close(handle)


def _lock(handle: int, aside: Path, path: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = os.path.samestat(os.fstat(handle), os.stat(aside))  # who had it may just have renamed or removed it
    except (BlockingIOError, FileNotFoundError):
        held = False
    if not held or path.exists():
        raise ValueError(f"another process is making {path}; wait for it, or give a new name")


def _empty(folder: Path) -> None:
    for entry in list(os.scandir(folder)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def _settle(folder: Path, names: list[str]) -> None:
    """Force files and their folder to the disk, so that a rename never outlives what it names."""
    for name in names:
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)
