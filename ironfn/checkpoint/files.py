"""Name every file operation of a checkpoint, so that a test can fail, or die before, any single one of them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeAlias

from attrs import frozen

Buffer: TypeAlias = bytes | bytearray | memoryview


def _create(path: Path) -> BinaryIO:
    return open(path, "xb", buffering=0)


def _write(file: BinaryIO, data: Buffer) -> None:
    with named(file):
        view = memoryview(data).cast("B")
        while view:  # a raw write may take fewer bytes than it was given
            view = view[file.write(view) :]


def _sync(file: BinaryIO) -> None:
    with named(file):
        os.fsync(file.fileno())


@contextmanager
def named(file: BinaryIO) -> Generator[None]:
    """Say in an OSError which file it was: the system tells only of those that it could not open."""
    try:
        yield
    except OSError as error:
        error.filename = str(file.name)
        raise


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def _size(path: Path) -> int:
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):  # a pipe would block for ever, a link may point anywhere
        raise FileNotFoundError(f"{path} is not a regular file")
    return found.st_size


def _open(path: Path) -> BinaryIO:
    return open(path, "rb", buffering=0)


def _read(file: BinaryIO, data: Buffer, offset: int) -> int:
    view, done = memoryview(data).cast("B"), 0
    while done < len(view) and (got := os.preadv(file.fileno(), [view[done:]], offset + done)):
        done += got
    return done


@frozen
class Files:
    """Hold the operations on files that the checkpoints use; the defaults are the real ones.

    write: all of the bytes, or OSError. read: fills the buffer from an offset on, returns how many bytes there were.
    size: of a regular file, in bytes; FileNotFoundError for anything else. free: bytes that may still be written.
    """

    mkdir: Callable[[Path], None] = os.mkdir
    create: Callable[[Path], BinaryIO] = _create
    write: Callable[[BinaryIO, Buffer], None] = _write
    sync: Callable[[BinaryIO], None] = _sync
    sync_directory: Callable[[Path], None] = _sync_directory
    rename: Callable[[Path, Path], None] = os.rename
    unlink: Callable[[Path], None] = os.unlink
    rmdir: Callable[[Path], None] = os.rmdir
    free: Callable[[Path], int] = _free
    names: Callable[[Path], list[str]] = os.listdir
    size: Callable[[Path], int] = _size
    open: Callable[[Path], BinaryIO] = _open
    read: Callable[[BinaryIO, Buffer, int], int] = _read


DISK = Files()
"""The real disk."""


def write_whole(path: Path, data: Buffer, files: Files) -> None:
    """Write one new file and bring it to the disk."""
    with files.create(path) as file:
        files.write(file, data)
        files.sync(file)


def replace_whole(path: Path, data: Buffer, files: Files = DISK) -> None:
    """Give a small file new content: after a death at any moment it holds the old bytes or the new, never a part."""
    aside = path.with_name(f".tmp-{path.name}")
    if aside.name in files.names(path.parent):
        files.unlink(aside)
    write_whole(aside, data, files)
    files.rename(aside, path)
    files.sync_directory(path.parent)


def make_directories(path: Path, files: Files) -> None:
    """Make a directory and its missing parents, and bring their entries to the disk."""
    try:
        files.names(path)
    except FileNotFoundError:
        make_directories(path.parent, files)
        files.mkdir(path)
        files.sync_directory(path.parent)
