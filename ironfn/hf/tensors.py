"""Read and write safetensors files, believing nothing of what is read: not the header, not a shape, not an offset."""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from ironfn.hf.untrusted import open_inside, parse_json, read_json

MAX_HEADER = 32 << 20
MAX_TENSORS = 100_000
MAX_DIMS = 8
SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)
"""What a model's numbers may be."""
_BYTES: Mapping[str, int] = MappingProxyType(
    {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}
    | {"I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 8}
)
_NAMES: Mapping[torch.dtype, str] = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})


@frozen
class Entry:
    """Locate one tensor: its file, what it is made of, and its bytes in the file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def find(directory: Path) -> dict[str, Entry]:
    """Return every tensor of a model's safetensors files, by name; only their headers are read.

    With ``model.safetensors.index.json`` the files are those that it names, and each has to hold the tensors that it
    says; else it is ``model.safetensors``. ValueError for anything that does not fit.
    """
    names = set(os.listdir(directory))
    if INDEX in names:
        return _indexed(directory)
    if SINGLE_FILE in names:
        return read_header(directory, SINGLE_FILE)
    others = sorted(n for n in names if re.search(r"\.(bin|pt|pth|ckpt|pkl|h5|msgpack|onnx)$", n))
    why = f"; {', '.join(others[:3])} may hold code, and is never read" if others else ""
    raise ValueError(
        f"{directory} has neither {SINGLE_FILE} nor {INDEX}{why}; save the model as safetensors (in transformers "
        "with `save_pretrained`)"
    )


def _indexed(directory: Path) -> dict[str, Entry]:
    weight_map = read_json(directory, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or len(weight_map) > MAX_TENSORS:
        raise ValueError(f"{directory / INDEX} has no weight_map from 1 to {MAX_TENSORS:,} tensors")
    found: dict[str, Entry] = {}
    files = dict.fromkeys(weight_map.values())
    for file in files:
        if not isinstance(file, str) or not file.endswith(".safetensors"):
            raise ValueError(f"{directory / INDEX} names {file!r}, which is no safetensors file")
        for name, entry in read_header(directory, file).items():
            if weight_map.get(name) != file:
                raise ValueError(f"{directory / file} holds {name!r}, which {INDEX} places {_where(weight_map, name)}")
            found[name] = entry
    if missing := [name for name in weight_map if name not in found]:
        raise ValueError(f"{INDEX} names tensors that its files do not hold: {listed(missing)}")
    return found


def _where(weight_map: Mapping[str, Any], name: str) -> str:
    return f"in {weight_map[name]}" if name in weight_map else "nowhere"


def listed(names: Sequence[str], limit: int = 20) -> str:
    """Write names out, the first of many."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def read_header(directory: Path, file: str) -> dict[str, Entry]:
    """Return the tensors of one file. ValueError unless they fill the file exactly, none over another."""
    what = str(directory / file)
    with open_inside(directory, file) as opened:
        size = os.fstat(opened.fileno()).st_size
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > min(MAX_HEADER, size - 8):
            raise ValueError(f"{what} is no safetensors file: of its {size:,} bytes {length:,} would be the header")
        header = opened.read(length)
    if header.count(b"data_offsets") > MAX_TENSORS:
        raise ValueError(f"{what} has more than {MAX_TENSORS:,} tensors, the most that are read of one file")
    described = parse_json(header, f"the header of {what}")
    described.pop("__metadata__", None)
    entries = {name: _entry(what, file, name, told, 8 + length) for name, told in described.items()}
    at = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            raise ValueError(f"{what}: {name!r} begins at byte {entry.begin}, where {at} was the next free one")
        at = entry.end
    if at != size:
        raise ValueError(f"{what} has {size:,} bytes, its tensors need {at:,}: it is cut off, or has something added")
    return entries


def _entry(what: str, file: str, name: str, told: Any, start: int) -> Entry:
    if not isinstance(told, dict) or set(told) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{what}: {name[:80]!r} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = told["dtype"], told["shape"], told["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BYTES:
        raise ValueError(f"{what}: {name[:80]!r} is of the unknown dtype {str(dtype)[:40]!r}")
    if not _naturals(shape) or len(shape) > MAX_DIMS or not _naturals(offsets) or len(offsets) != 2:
        raise ValueError(f"{what}: {name[:80]!r} has an impossible shape or place")
    begin, end = offsets
    if end - begin != math.prod(shape) * _BYTES[dtype]:
        raise ValueError(f"{what}: {name[:80]!r} is {dtype} {shape}, but has {end - begin} bytes")
    return Entry(file, dtype, tuple(shape), start + begin, start + end)


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 62 for value in values)


class Source:
    """Hand out the tensors of a directory's files as views of the mapped files: only what is looked at is read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._maps: dict[str, mmap.mmap] = {}
        self._lock = threading.Lock()

    @contextmanager
    def tensor(self, entry: Entry) -> Generator[Tensor]:
        """Yield a tensor; afterwards its pages no longer count as this process's memory. It may not be kept."""
        with self._lock:
            if entry.file not in self._maps:
                with open_inside(self._directory, entry.file) as file:
                    # a private map may be written to, which torch wants of memory that it looks at
                    self._maps[entry.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        mapped, dtype = self._maps[entry.file], DTYPES[entry.dtype]
        if len(mapped) < entry.end:
            raise ValueError(f"{self._directory / entry.file} became shorter while it was read")
        count = math.prod(entry.shape)
        yield (
            torch.frombuffer(mapped, dtype=dtype, count=count, offset=entry.begin).view(entry.shape)
            if count
            else torch.empty(entry.shape, dtype=dtype)
        )
        first = -(-entry.begin // mmap.PAGESIZE) * mmap.PAGESIZE  # a page that it shares with another stays
        if entry.end > first:
            mapped.madvise(mmap.MADV_DONTNEED, first, entry.end - first)


def header(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> bytes:
    """Write the start of a safetensors file of these tensors, in this order; what follows is 8-byte aligned."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, (dtype, shape) in tensors.items():
        end = begin + math.prod(shape) * dtype.itemsize
        described[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": (begin, end)}
        begin = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@frozen
class Planned:
    """Say what a tensor to be written will be, and how to make it: not before its turn comes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """The bytes that it will take."""
        return math.prod(self.shape) * self.dtype.itemsize


def write(directory: Path, tensors: Mapping[str, Planned], file_bytes: int) -> list[str]:
    """Write tensors into files of at most ``file_bytes`` (unless one alone is larger) and return the files' names.

    One tensor at a time is in memory. Several files get an index.
    """
    groups: list[list[str]] = [[]]
    filled = 0
    for name, planned in tensors.items():
        if groups[-1] and filled + planned.nbytes > file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += planned.nbytes
    count = len(groups)
    files = [SINGLE_FILE] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    for file, group in zip(files, groups, strict=True):
        write_file(directory / file, {name: tensors[name] for name in group})
    if count > 1:
        weight_map = {name: file for file, group in zip(files, groups, strict=True) for name in group}
        index = {"metadata": {"total_size": sum(p.nbytes for p in tensors.values())}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return files


def write_file(path: Path, tensors: Mapping[str, Planned]) -> None:
    """Write tensors into one new file. One tensor at a time is in memory."""
    with open(path, "xb") as opened:
        opened.write(header({name: (planned.dtype, planned.shape) for name, planned in tensors.items()}))
        for planned in tensors.values():
            tensor = planned.make().contiguous()
            assert (tensor.dtype, tuple(tensor.shape)) == (planned.dtype, planned.shape)
            for part in _blocks(tensor.view(-1)):
                opened.write(part.view(torch.uint8).numpy().data)
        opened.flush()
        os.fsync(opened.fileno())


def _blocks(flat: Tensor, count: int = 1 << 22) -> Iterator[Tensor]:
    for begin in range(0, len(flat), count):
        yield flat[begin : begin + count].cpu()
