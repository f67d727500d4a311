"""Describe a checkpoint: which leaves it has, in which files their pieces lie, and the checksum of every byte.

A checkpoint is a directory ``step-00000100`` of safetensors files and one ``manifest.msgpack``: a map, and behind it
the xxh3_128 digest of the map's bytes. The header of every safetensors file is a function of the manifest, so a
reader never parses a header: it computes the one that has to be there and compares.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from attrs import field, frozen

NAME = "manifest.msgpack"
FORMAT, VERSION = "ironfn-checkpoint", 1
MAX_BYTES = 128 << 20  # of a manifest
MAX_LEAVES = 200_000
MAX_PATH = 1024
MAX_DIMS = 16

ITEM_BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""The dtypes, by the names that safetensors has for them, and the bytes of one element."""

FILE_NAME = re.compile(r"shard-\d{5}-of-\d{5}\.safetensors")


class DamagedCheckpoint(ValueError):
    """Say that a checkpoint is not what was written."""


@frozen
class Piece:
    """Locate one box of a leaf: its place in the leaf, the tensor that holds it, and the checksum of its bytes."""

    file: str
    tensor: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    checksum: bytes


@frozen
class Leaf:
    """Describe a whole tensor and the pieces that form it: a grid, so that each element lies in exactly one."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of the whole tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@frozen
class FileRecord:
    """State the size and the checksum of a whole file."""

    size: int
    checksum: bytes


@frozen
class Manifest:
    """Describe a checkpoint. empty: the paths of branches without a leaf, which the tree must not lose."""

    step: int
    meta: dict[str, Any]
    leaves: dict[str, Leaf]
    files: dict[str, FileRecord]
    empty: tuple[str, ...] = ()


@frozen
class Entry:
    """Describe one tensor of a safetensors file: what its header says of it, and its bytes' place after the header."""

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    checksum: bytes = field(default=b"", eq=False)


def check_path(path: str) -> None:
    """Refuse a leaf's path that could not be a path on every reader's side."""
    if not path or len(path) > MAX_PATH or not path.isprintable() or "" in path.split("/") or path == "__metadata__":
        raise ValueError(
            f"leaf path {path[:80]!r} cannot be stored: names are printable, joined by '/', none empty, "
            f"at most {MAX_PATH} characters in all"
        )


def file_name(index: int, count: int) -> str:
    """Name the file with this index.

    >>> file_name(0, 1)
    'shard-00000-of-00001.safetensors'
    """
    return f"shard-{index:05d}-of-{count:05d}.safetensors"


Tensor: TypeAlias = tuple[str, tuple[int, ...], bytes]
"""What is known of one stored tensor: dtype, shape, checksum."""


def place(tensors: Mapping[str, Tensor]) -> list[Entry]:
    """Lay the tensors of one file out: the widest elements first, so that all are aligned."""
    entries: list[Entry] = []
    begin = 0
    for name, (dtype, shape, checksum) in sorted(tensors.items(), key=lambda item: -ITEM_BYTES[item[1][0]]):
        end = begin + math.prod(shape) * ITEM_BYTES[dtype]
        entries.append(Entry(name, dtype, shape, begin, end, checksum))
        begin = end
    return entries


def header(entries: list[Entry]) -> bytes:
    """Write the start of a safetensors file: 8 bytes of length, then JSON, padded so that the tensors are aligned."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for e in entries:
        described[e.tensor] = {"dtype": e.dtype, "shape": e.shape, "data_offsets": (e.begin, e.end)}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def entries_of(manifest: Manifest) -> dict[str, list[Entry]]:
    """Return what each file of a checkpoint holds, in the order of its bytes.

    Leaves may share their tensors, as tied weights do, if they share all of them. DamagedCheckpoint where they differ.
    """
    tensors: dict[str, dict[str, Tensor]] = {name: {} for name in manifest.files}
    owners: dict[tuple[str, str], tuple[Leaf, Piece]] = {}
    for path, leaf in manifest.leaves.items():
        for piece in leaf.pieces:
            if piece.file not in tensors:
                raise DamagedCheckpoint(f"leaf {path!r} lies in {piece.file!r}, which the manifest does not list")
            if owners.setdefault((piece.file, piece.tensor), (leaf, piece)) != (leaf, piece):
                raise DamagedCheckpoint(f"two leaves disagree about tensor {piece.tensor!r} of {piece.file}")
            tensors[piece.file][piece.tensor] = (leaf.dtype, piece.shape, piece.checksum)
    return {name: place(held) for name, held in tensors.items()}
