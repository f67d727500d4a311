"""Write a rank's parts of a tree into safetensors files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
import xxhash
from attrs import frozen
from torch import Tensor

from ironfn.checkpoint.files import Files
from ironfn.checkpoint.manifest import Entry, FileRecord, Piece, header, place
from ironfn.checkpoint.plan import Part
from ironfn.checkpoint.shards import CHUNK
from ironfn.layout.table import Box
from ironfn.types import Flat

Parts = Mapping[str, Part]
Sources = Mapping[str, Iterable[memoryview]]
"""The bytes of each part, in row-major order, a few megabytes at a time."""


@frozen
class Written:
    """Tell what one rank has brought to the disk: its files, and each leaf's dtype, whole shape and piece."""

    files: dict[str, FileRecord]
    pieces: dict[str, tuple[str, tuple[int, ...], Piece]]


def deal(parts: Parts, file_bytes: int) -> list[dict[str, Part]]:
    """Deal parts out to files of at most ``file_bytes``, in the tree's order."""
    groups: list[dict[str, Part]] = [{}]
    filled = 0
    for path, part in parts.items():
        if groups[-1] and filled + part.tensor.nbytes > file_bytes:
            groups.append({})
            filled = 0
        groups[-1][path] = part
        filled += part.tensor.nbytes
    return groups


def bytes_needed(groups: list[dict[str, Part]]) -> int:
    """Return the bytes that these files, and what the manifest says of them, may take on the disk."""
    # the manifest tells of each tensor about as much as the header, and checksums
    return sum(
        sum(part.tensor.nbytes for part in group.values()) + 2 * len(header(_entries(group))) + 100 * len(group)
        for group in groups
    )


def write_files(aside: Path, groups: Mapping[str, Parts], sources: Sources, files: Files) -> Written:
    """Write each group of parts into the file of its name."""
    written = Written({}, {})
    for name, group in groups.items():
        record, checksums = _write_file(aside / name, group, sources, files)
        written.files[name] = record
        for path, checksum in checksums.items():
            part = group[path]
            piece = Piece(name, path, part.box.offset, part.box.shape, checksum)
            written.pieces[path] = (part.dtype, part.whole, piece)
    return written


def _entries(group: Parts) -> list[Entry]:
    return place({path: (part.dtype, part.box.shape, b"") for path, part in group.items()})


def _write_file(path: Path, group: Parts, sources: Sources, files: Files) -> tuple[FileRecord, dict[str, bytes]]:
    """Stream parts into one file and bring it to the disk; no second copy of them is made."""
    entries = _entries(group)
    checksums: dict[str, bytes] = {}
    head = header(entries)
    whole, size = xxhash.xxh3_128(head), len(head)
    with files.create(path) as file:
        files.write(file, head)
        for entry in entries:
            part = xxhash.xxh3_128()
            for data in sources[entry.tensor]:
                part.update(data)
                whole.update(data)
                files.write(file, data)
                size += len(data)
            checksums[entry.tensor] = part.digest()
        files.sync(file)
    return FileRecord(size, whole.digest()), checksums


def chunks(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in row-major order, a few megabytes at a time, copying at most that much."""
    if tensor.nbytes <= CHUNK:
        if tensor.numel():
            yield bytes_of(tensor.cpu().resolve_neg().contiguous())
    elif tensor.is_contiguous() and not tensor.is_neg():
        flat, count = tensor.view(-1), CHUNK // tensor.element_size()
        for begin in range(0, len(flat), count):
            yield bytes_of(flat[begin : begin + count].cpu())
    elif len(tensor) == 1:
        yield from chunks(tensor[0])
    else:
        count = max(1, CHUNK * len(tensor) // tensor.nbytes)
        for begin in range(0, len(tensor), count):
            yield from chunks(tensor[begin : begin + count])


def copies(parts: Parts, held: Flat) -> Sources:
    """Copy parts into memory of their own, now, so that their tensors may change while the bytes are written.

    held: that memory, by path; where it holds what fits it is used again, since new pages cost more than the copy.
    What is returned needs no torch to be read: a thread that is cut off when the process ends may not be inside it.
    """
    for path in held.keys() - parts.keys():
        del held[path]
    for path, part in parts.items():
        tensor, shape = part.tensor, part.box.shape
        if path not in held or (held[path].shape, held[path].dtype) != (shape, tensor.dtype):
            held[path] = torch.empty(shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        held[path].copy_(tensor, non_blocking=tensor.is_cuda)
    if any(part.tensor.is_cuda for part in parts.values()):
        torch.cuda.synchronize()
    return {path: list(chunks(held[path])) for path in parts}


def bytes_of(tensor: Tensor) -> memoryview:
    """View the memory of a contiguous CPU tensor."""
    # not reshape(-1): of a single element torch calls any stride contiguous, and keeps it
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def blocks(box: Box, item: int) -> Iterator[Box]:
    """Cut a box whose elements have ``item`` bytes into boxes of at most a chunk, in row-major order."""
    count = item
    for size in box.shape:
        count *= size
    if count <= CHUNK:
        if count:
            yield box
        return
    dim = next(dim for dim, size in enumerate(box.shape) if size > 1)
    rows = max(1, CHUNK * box.shape[dim] // count)
    for begin in range(0, box.shape[dim], rows):
        offset, shape = list(box.offset), list(box.shape)
        offset[dim], shape[dim] = offset[dim] + begin, min(rows, box.shape[dim] - begin)
        yield from blocks(Box(tuple(offset), tuple(shape)), item)
