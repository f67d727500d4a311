"""Read the files of a checkpoint, believing nothing: not their sizes, not their headers, not their bytes."""

from __future__ import annotations

import errno
import re
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import xxhash
from attrs import define, frozen

from ironfn.checkpoint.files import DISK, Files
from ironfn.checkpoint.manifest import (
    MAX_BYTES,
    NAME,
    DamagedCheckpoint,
    Entry,
    FileRecord,
    Manifest,
    entries_of,
    header,
)
from ironfn.checkpoint.sealed import unseal

CHUNK = 4 << 20
"""Bytes that are hashed and written, or read and hashed, at a time."""

_NOT_DAMAGE = frozenset({errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM})


@frozen
class Problem:
    """Say what is wrong with a file of a checkpoint, and with which leaf where that is known."""

    file: str
    leaf: str | None
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}" if self.leaf is None else f"{self.file}: leaf {self.leaf!r}: {self.what}"


class _Damage(DamagedCheckpoint):
    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


@contextmanager
def _damage(file: str, leaf: str | None = None) -> Generator[None]:
    """Turn what a broken file does to its reader into damage; a refused permission is no damage."""
    try:
        yield
    except OSError as error:
        if error.errno in _NOT_DAMAGE:
            raise
        raise _Damage(Problem(file, leaf, error.strerror or str(error))) from error


def read_manifest(path: Path, files: Files = DISK) -> Manifest:
    """Read the manifest of the checkpoint at ``path``. DamagedCheckpoint where it is not whole.

    ValueError for a manifest of a version that is not known: that is no damage.
    """
    try:
        with _damage(NAME):
            manifest = unseal(_read_bounded(path / NAME, files))
    except _Damage:
        raise
    except DamagedCheckpoint as error:
        raise _Damage(Problem(NAME, None, str(error))) from error
    step = step_of(path.name)
    if step is not None and step != manifest.step:
        raise _Damage(Problem(NAME, None, f"is of step {manifest.step}, but the directory is {path.name}"))
    return manifest


def _read_bounded(path: Path, files: Files) -> memoryview:
    try:
        size = files.size(path)
    except FileNotFoundError as error:
        raise DamagedCheckpoint("missing, so there is no whole checkpoint here") from error
    if size > MAX_BYTES:
        raise DamagedCheckpoint(f"has {size} bytes, more than the {MAX_BYTES} that are allowed")
    data = bytearray(size)
    with files.open(path) as file:
        return memoryview(data)[: files.read(file, data, 0)]


def step_name(step: int) -> str:
    """Name the directory of a step's checkpoint.

    >>> step_name(100)
    'step-00000100'
    """
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step that a directory's name states, or None for another name.

    >>> step_of("step-00000100"), step_of(".tmp-step-00000100")
    (100, None)
    """
    found = re.fullmatch(r"step-([0-9]{8,18})", name)
    return int(found[1]) if found and step_name(int(found[1])) == name else None


@define
class Shard:
    """Read the tensors of one file of a checkpoint. Every method raises DamagedCheckpoint for what differs."""

    name: str
    file: BinaryIO
    start: int
    files: Files
    hash: Any

    def read(self, entry: Entry, parts: Iterable[memoryview]) -> None:
        """Read one tensor into ``parts``, one after another, and hold its bytes to its checksum.

        What a part got is hashed before the next one is asked for: they may be the same memory.
        """
        check, place = xxhash.xxh3_128(), self.start + entry.begin
        with _damage(self.name, entry.tensor):
            for part in parts:
                if self.files.read(self.file, part, place) != len(part):
                    raise _Damage(Problem(self.name, entry.tensor, "the file ends inside it"))
                check.update(part)
                self.hash.update(part)
                place += len(part)
        assert place == self.start + entry.end
        if check.digest() != entry.checksum:
            raise _Damage(Problem(self.name, entry.tensor, "its bytes do not match its checksum"))

    def finish(self, record: FileRecord) -> None:
        """Hold the whole file to its checksum, once all tensors have been read in order."""
        if self.hash.digest() != record.checksum:
            raise _Damage(Problem(self.name, None, "its bytes do not match its checksum"))


@contextmanager
def open_shard(path: Path, name: str, entries: list[Entry], record: FileRecord, files: Files) -> Generator[Shard]:
    """Open a file of the checkpoint at ``path`` if its size and its header are those that the manifest calls for."""
    expected = header(entries)
    with _damage(name):
        try:
            size = files.size(path / name)
        except FileNotFoundError as error:
            raise _Damage(Problem(name, None, "missing")) from error
        if size != record.size:
            raise _Damage(Problem(name, None, f"has {size} bytes, the manifest says {record.size}"))
        file = files.open(path / name)
    with file:
        found = bytearray(len(expected))
        with _damage(name):
            files.read(file, found, 0)
        if bytes(found) != expected:
            raise _Damage(Problem(name, None, "its header is not the one that the manifest calls for"))
        yield Shard(name, file, len(expected), files, xxhash.xxh3_128(expected))


def verify(path: Path, files: Files = DISK) -> list[Problem]:
    """Read every byte of the checkpoint at ``path`` and return what is wrong with it: nothing if it is whole.

    ValueError for a manifest of a version that is not known; OSError where reading is not allowed.
    """
    try:
        manifest = read_manifest(path, files)
    except _Damage as error:
        return [error.problem]
    problems: list[Problem] = []
    for name, entries in entries_of(manifest).items():
        problems += _verify_file(path, name, entries, manifest.files[name], files)
    return problems


def _verify_file(path: Path, name: str, entries: list[Entry], record: FileRecord, files: Files) -> list[Problem]:
    problems: list[Problem] = []
    try:
        with open_shard(path, name, entries, record, files) as shard:
            for entry in entries:
                try:
                    shard.read(entry, _nowhere(entry.end - entry.begin))
                except _Damage as error:
                    problems.append(error.problem)
            if not problems:
                shard.finish(record)
    except _Damage as error:
        problems.append(error.problem)
    return problems


def _nowhere(size: int) -> Iterator[memoryview]:
    """Yield one small memory again and again, until ``size`` bytes have been read into it."""
    scratch = memoryview(bytearray(min(CHUNK, size)))
    for begin in range(0, size, CHUNK):
        yield scratch[: min(CHUNK, size - begin)]
