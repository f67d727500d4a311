"""Read a GGUF file: its metadata, and its tensors as plain numbers. Nothing that it says of itself is believed.

The format is that of ggml's docs/gguf.md, versions 2 and 3. Blocks of quantized numbers are turned into numbers by the
`gguf` package; its reader is not used, because it makes arrays of what a file says before it looks whether that can be.
"""

from __future__ import annotations

import importlib
import math
import mmap
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from attrs import define, frozen
from torch import Tensor

MAX_HEADER = 64 << 20
MAX_TENSORS = 100_000
MAX_KEYS = 10_000
MAX_ITEMS = 2_000_000  # of all arrays together; the largest vocabulary known has 262,144 tokens and 514,906 merges
MAX_DIMS = 4
BLOCK = 1 << 20
"""How many numbers are made of their blocks at one time."""

TYPES: Mapping[str, tuple[int, int, int]] = MappingProxyType(
    {
        "F32": (0, 1, 4),
        "F16": (1, 1, 2),
        "Q4_0": (2, 32, 18),
        "Q4_1": (3, 32, 20),
        "Q5_0": (6, 32, 22),
        "Q5_1": (7, 32, 24),
        "Q8_0": (8, 32, 34),
        "Q4_K": (12, 256, 144),
        "Q5_K": (13, 256, 176),
        "Q6_K": (14, 256, 210),
        "BF16": (30, 1, 2),
    }
)
"""What numbers may be stored as: ggml's number of the type, the numbers of a block and its bytes."""

_BY_NUMBER: Mapping[int, str] = MappingProxyType({number: name for name, (number, _, _) in TYPES.items()})
_SCALARS: Mapping[int, str] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
)
_STRING, _ARRAY = 8, 9


def package() -> Any:
    """Return the `gguf` package. ValueError that names the extra where it is not installed."""
    try:
        return importlib.import_module("gguf")
    except ModuleNotFoundError as error:
        raise ValueError("GGUF files need the package gguf: pip install 'ironfn[gguf]'") from error


@frozen
class Stored:
    """Locate one tensor: what its numbers are stored as, its shape with the rows first, and its bytes in the file."""

    type: str
    shape: tuple[int, ...]
    begin: int
    end: int


@frozen
class GgufFile:
    """Hold what a GGUF file says of itself, checked. Its bytes are mapped, and read when a tensor is asked for."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Stored]
    mapped: mmap.mmap

    def rows(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Yield a tensor, [rows, ...] in float32, a few rows at a time, each time with the number of the first."""
        stored = self.tensors[name]
        _, block, size = TYPES[stored.type]
        width = stored.shape[-1]
        count = math.prod(stored.shape[:-1])
        row = width // block * size
        dequantize, kinds = package().quants.dequantize, package().GGMLQuantizationType
        step = max(1, BLOCK // width)
        for first in range(0, count, step):
            rows = min(step, count - first)
            data = np.frombuffer(self.mapped, np.uint8, rows * row, stored.begin + first * row).reshape(rows, row)
            yield first, torch.from_numpy(np.array(dequantize(data, kinds[stored.type]), np.float32, copy=True))
        self._forget(stored)

    def tensor(self, name: str) -> Tensor:
        """Return a whole tensor in float32."""
        stored = self.tensors[name]
        out = torch.empty(math.prod(stored.shape[:-1]), stored.shape[-1])
        for first, rows in self.rows(name):
            out[first : first + len(rows)] = rows
        return out.view(stored.shape)

    def _forget(self, stored: Stored) -> None:
        """Let go of the pages that were read: the system may have them back."""
        first = -(-stored.begin // mmap.PAGESIZE) * mmap.PAGESIZE
        if stored.end > first:
            self.mapped.madvise(mmap.MADV_DONTNEED, first, stored.end - first)


def read(path: Path) -> GgufFile:
    """Read what a GGUF file says of itself. ValueError for anything that cannot be, before memory is taken for it."""
    path = Path(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size < 24:
            raise ValueError(f"{path} is no GGUF file: it is {found.st_size} bytes, or not a file at all")
        mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)
    cursor = _Cursor(path, mapped)
    if cursor.take(4) != b"GGUF":
        raise ValueError(f"{path} is no GGUF file: it does not begin with GGUF")
    version = cursor.number("I")
    if version not in (2, 3):
        big = " (its bytes are in big-endian order)" if version & 0xFFFF == 0 else ""
        raise ValueError(f"{path} is of GGUF version {version}{big}; versions 2 and 3 are read: convert it anew")
    tensors, keys = cursor.number("Q"), cursor.number("Q")
    if tensors > MAX_TENSORS or keys > MAX_KEYS:
        raise ValueError(f"{path} claims {tensors:,} tensors and {keys:,} keys; at most {MAX_TENSORS:,} are read")
    metadata = _metadata(cursor, keys)
    return GgufFile(path, MappingProxyType(metadata), MappingProxyType(_tensors(cursor, tensors, metadata)), mapped)


@define
class _Cursor:
    """Take one thing after another from the header of a file."""

    path: Path
    data: mmap.mmap
    at: int = 0
    items: int = 0

    def take(self, size: int) -> bytes:
        end = self.at + size
        if end > min(len(self.data), MAX_HEADER):
            raise ValueError(
                f"{self.path}: at byte {self.at:,} {size:,} bytes should follow, but the file has {len(self.data):,}, "
                f"of which at most {MAX_HEADER:,} may be the header: it is damaged, or cut off"
            )
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        raw = self.take(self.number("Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: at byte {self.at - len(raw):,} is text that is not UTF-8") from error

    def array(self) -> list[Any]:
        kind, count = self.number("I"), self.number("Q")
        self.items += count
        if self.items > MAX_ITEMS:
            raise ValueError(f"{self.path}: its arrays have more than {MAX_ITEMS:,} items, at byte {self.at:,}")
        if kind == _STRING:
            return [self.text() for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"{self.path}: at byte {self.at:,} is an array of the unknown type {kind}")
        code = _SCALARS[kind]
        return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize("<" + code))))

    def value(self) -> Any:
        kind = self.number("I")
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise ValueError(f"{self.path}: at byte {self.at:,} is a value of the unknown type {kind}")
        value = self.number(_SCALARS[kind])
        # 1e-05 as float32 is 9.999999747378752e-06: the decimal number that was meant is the shortest one
        return float(str(np.float32(value))) if _SCALARS[kind] == "f" else value


def _metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.text()
        if key in found:
            raise ValueError(f"{cursor.path}: the key {key[:80]!r} is there twice")
        found[key] = cursor.value()
    return found


def _tensors(cursor: _Cursor, count: int, metadata: Mapping[str, Any]) -> dict[str, Stored]:
    """Read where the tensors lie. They have to follow each other, as in the header, to the end of the file."""
    align = metadata.get("general.alignment", 32)
    if type(align) is not int or not 8 <= align <= 1 << 20 or align & (align - 1):
        raise ValueError(f"{cursor.path}: general.alignment {align!r} is no power of two from 8")
    described = [_described(cursor) for _ in range(count)]
    start = -(-cursor.at // align) * align
    found: dict[str, Stored] = {}
    end = start
    for name, kind, shape, offset in sorted(described, key=lambda each: each[3]):
        if name in found:
            raise ValueError(f"{cursor.path}: the tensor {name[:80]!r} is there twice")
        expected = -(-end // align) * align
        if start + offset != expected:
            raise ValueError(f"{cursor.path}: {name[:80]!r} begins at byte {start + offset}, not behind the one before")
        _, block, size = TYPES[kind]
        end = expected + math.prod(shape) // block * size
        found[name] = Stored(kind, shape, expected, end)
    size = len(cursor.data)
    if not end <= size <= -(-end // align) * align:
        raise ValueError(f"{cursor.path} has {size:,} bytes, its tensors need {end:,}: cut off, or something was added")
    return {name: found[name] for name, _, _, _ in described}


def _described(cursor: _Cursor) -> tuple[str, str, tuple[int, ...], int]:
    name, dims = cursor.text(), cursor.number("I")
    if not 1 <= dims <= MAX_DIMS:
        raise ValueError(f"{cursor.path}: {name[:80]!r} has {dims} dimensions; from 1 to {MAX_DIMS} are read")
    sizes = tuple(cursor.number("Q") for _ in range(dims))
    number, offset = cursor.number("I"), cursor.number("Q")
    if number not in _BY_NUMBER:
        raise ValueError(
            f"{cursor.path}: {name[:80]!r} is stored as ggml type {number}; known are {', '.join(TYPES)}: convert it "
            "to one of these"
        )
    kind = _BY_NUMBER[number]
    if math.prod(sizes) > 1 << 40 or min(sizes) < 1 or sizes[0] % TYPES[kind][1]:
        raise ValueError(f"{cursor.path}: {name[:80]!r} of type {kind} has the impossible shape {sizes}")
    return name, kind, sizes[::-1], offset
