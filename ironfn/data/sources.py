"""Find the files that a set's sources name."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, TypeAlias

import xxhash
from attrs import frozen

Kind: TypeAlias = Literal["text", "jsonl", "parquet", "topics"]

_PROSE = frozenset({".txt", ".text", ".md", ".rst"})
_KINDS: tuple[tuple[str, Kind], ...] = ((".jsonl", "jsonl"), (".ndjson", "jsonl"), (".parquet", "parquet"))

# Folders of the standard library that are not its source: tests, vendored wheels, generated tables.
_NOT_SOURCE = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "lib-dynload", "pydoc_data", "_bundled"}
)


@frozen
class Source:
    """Name one file, how it is read, and whether it is program text (which must never be cleaned as prose)."""

    path: Path
    kind: Kind
    code: bool


def find(sources: Iterable[str]) -> list[Source]:
    """Return the files behind ``sources`` in a fixed order: the given order, and by path within each.

    A source is a file, a directory (all its files but hidden ones and caches), a glob, or ``stdlib:``,
    ``stdlib:code``, ``stdlib:prose``: the Python standard library's own source and its help topics.
    ValueError where a source names no file.
    """
    found: list[Source] = []
    for source in sources:
        files = _standard_library(source) if source.startswith("stdlib:") else _files(source)
        if not files and Path(source).is_fifo():
            raise ValueError(f"source {source!r} is a pipe, which ends when it is read once; write it to a file")
        if not files:
            raise ValueError(
                f"source {source!r} names no file (looked from {Path.cwd()}); correct the path or the pattern"
            )
        found += files
    return found


def fingerprint(sources: Iterable[Source]) -> int:
    """Hash the names' order and the bytes of all the files; file dates and folders do not enter."""
    digest = xxhash.xxh3_64()
    for source in sources:
        inner = xxhash.xxh3_128(f"{source.kind}\x1f{source.path.name}\x1f".encode())
        with source.path.open("rb") as file:
            while block := file.read(1 << 20):
                inner.update(block)
        digest.update(inner.digest())
    return digest.intdigest()


def _standard_library(source: str) -> list[Source]:
    root = Path(sysconfig.get_paths()["stdlib"])
    parts = {"stdlib:": ("code", "prose"), "stdlib:code": ("code",), "stdlib:prose": ("prose",)}.get(source)
    if parts is None:
        raise ValueError(f"source {source!r} is unknown; there are stdlib:, stdlib:code and stdlib:prose")
    found: list[Source] = []
    if "code" in parts:
        paths = _walk(root, _NOT_SOURCE)
        found += [
            Source(p, "text", True) for p in paths if p.suffix == ".py" and not p.name.startswith("_sysconfigdata")
        ]
    if "prose" in parts:
        topics = root / "pydoc_data" / "topics.py"
        if not topics.is_file():
            raise ValueError(f"source {source!r}: this Python has no {topics}; use stdlib:code")
        found.append(Source(topics, "topics", False))
    return found


def _files(source: str) -> list[Source]:
    path = Path(source).expanduser()
    if path.is_dir():
        paths = list(_walk(path, frozenset()))
    elif path.is_file():
        paths = [path]
    else:
        paths = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file())
    return [_classify(p) for p in paths]


def _walk(root: Path, without: frozenset[str]) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f != "__pycache__" and f not in without)
        yield from (path for f in sorted(files) if not f.startswith(".") and (path := Path(folder, f)).is_file())


def _classify(path: Path) -> Source:
    name = path.name.lower().removesuffix(".gz")
    for suffix, kind in _KINDS:
        if name.endswith(suffix):
            return Source(path, kind, False)
    return Source(path, "text", Path(name).suffix not in _PROSE)
