"""Write files whole or not at all, one preparation at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path


def aside(path: Path) -> Path:
    """Return where a file is written before it is whole. One that a killed process left is written over."""
    return path.with_name(f"{path.name}.part")


def sync_folder(folder: Path) -> None:
    """Force a folder's entries to the disk, so that a rename outlives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file aside, force it to the disk, and move it to its place."""
    with aside(path).open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    aside(path).replace(path)
    sync_folder(path.parent)


@contextmanager
def alone(folder: Path, say: Callable[[str], None]) -> Generator[None]:
    """Hold a folder against other processes that would write it; wait while another one does.

    The lock is the operating system's: it ends with the process, however that ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{folder}: another process is preparing it; waiting for that")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
