"""Read a directory that somebody else made: nothing outside it is opened, and no file is believed."""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

MAX_JSON = 32 << 20  # of a config or an index; the largest index known, of 90,000 tensors, has 9 MB
MAX_TEXT = 256 << 20  # of a tokenizer


def open_inside(directory: Path, name: str) -> BinaryIO:
    """Open a regular file of the directory for reading. ValueError where it is none, or lies outside.

    A symbolic link may lead to another place in the directory only.
    """
    if not name or name in (".", "..") or any(c in name for c in "/\\\0") or not name.isprintable():
        raise ValueError(f"{directory}: {name[:80]!r} is not the name of a file in this directory; it is not opened")
    path, root = directory / name, directory.resolve()
    real = path.resolve()
    if not real.is_relative_to(root):
        raise ValueError(
            f"{path} is a link out of its directory and is not followed; copy the files themselves (`cp -rL`)"
        )
    try:
        descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb", buffering=0)


def read_inside(directory: Path, name: str, limit: int = MAX_TEXT) -> bytes:
    """Return the bytes of a file of the directory. ValueError where there are more than ``limit``."""
    with open_inside(directory, name) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ValueError(f"{directory / name} has {size:,} bytes, more than the {limit:,} that are read of it")
        return file.readall()  # pyright: ignore[reportAttributeAccessIssue]: a raw file has it


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a file of the directory, strictly. ValueError says what is wrong with it."""
    return parse_json(read_inside(directory, name, MAX_JSON), str(directory / name))


def parse_json(data: bytes, what: str) -> dict[str, Any]:
    """Return a JSON object. ValueError for other text, a key that comes twice, NaN, an infinity, deep nesting."""
    try:
        found: Any = json.loads(
            data.decode("utf-8"), object_pairs_hook=_once, parse_constant=_refuse, parse_float=_finite
        )
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"{what} is not JSON that can be used: {why}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{what} is not a JSON object")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice[:80]!r} comes twice")
    return found


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is not a number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value
