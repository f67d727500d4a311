"""Save a tree of tensors: written aside, brought to the disk, renamed last, so that a death loses nothing."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import xxhash
from attrs import frozen
from torch import Tensor

from ironfn.checkpoint.files import DISK, Files, make_directories, write_whole
from ironfn.checkpoint.keep import ASIDE, OUTGOING, remove, tidy
from ironfn.checkpoint.manifest import (
    MAX_DIMS,
    MAX_LEAVES,
    NAME,
    Entry,
    FileRecord,
    Leaf,
    Manifest,
    Piece,
    check_path,
    file_name,
    header,
    place,
)
from ironfn.checkpoint.sealed import seal
from ironfn.checkpoint.shards import CHUNK, step_name
from ironfn.types import Params

DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""The dtypes that a checkpoint can hold, and what safetensors calls them."""


def save(
    directory: Path,
    step: int,
    tree: Params,
    meta: Mapping[str, object],
    *,
    file_bytes: int = 2 << 30,
    files: Files = DISK,
) -> Path:
    """Write the checkpoint ``directory/step-…`` of a tree and return its path; it is there whole or not at all.

    meta: what else a run needs (its spec, its seed), of str, int, float, bool, None, list and dict with str keys; a
    tuple comes back as a list. file_bytes: a file holds at most this much, unless a single leaf is larger. Leaves that
    are the same tensor are stored once. Only one process may save into a directory at a time.

    ValueError for a tree or meta that cannot be stored. OSError where the disk is full or fails; then what was there
    before is untouched. A checkpoint of the same step is replaced.
    """
    stored = _Stored.of(tree)
    meta = {"step": step, **meta}
    if meta["step"] != step:
        raise ValueError(f"meta says step {meta['step']!r}, but this is the checkpoint of step {step}")
    seal(Manifest(step, meta, {}, {}))  # refuses what cannot be stored before gigabytes are written
    groups = _group(stored.tensors, file_bytes)
    make_directories(directory, files)
    tidy(directory, files)
    _check_space(directory, groups, files)
    final, aside = directory / step_name(step), directory / (ASIDE + step_name(step))
    try:
        files.mkdir(aside)
        records: dict[str, FileRecord] = {}
        pieces: dict[str, Piece] = {}
        for index, group in enumerate(groups):
            name = file_name(index, len(groups))
            records[name], written = _write_file(aside / name, group, files)
            pieces |= written
        leaves = {
            path: Leaf(DTYPES[stored.tensors[owner].dtype], tuple(stored.tensors[owner].shape), (pieces[owner],))
            for path, owner in stored.owners.items()
        }
        write_whole(aside / NAME, seal(Manifest(step, meta, leaves, records, stored.empty)), files)
        files.sync_directory(aside)
        _publish(aside, final, files)
    except BaseException:
        with suppress(OSError):  # all is put back as it was if that is possible; the first error is the one to tell
            tidy(directory, files)
        raise
    return final


@frozen
class _Stored:
    """Hold what is written: the distinct tensors by path, the path under which each leaf is stored, empty branches."""

    tensors: dict[str, Tensor]
    owners: dict[str, str]
    empty: tuple[str, ...]

    @staticmethod
    def of(tree: Params) -> _Stored:
        tensors: dict[str, Tensor] = {}
        owners: dict[str, str] = {}
        empty: list[str] = []
        seen: dict[Any, str] = {}
        for path, node in _nodes(tree, ""):
            check_path(path)
            if isinstance(node, dict):
                empty.append(path)
                continue
            _check_leaf(path, node)
            # equal address, shape and strides: the same numbers. Other views of one storage are stored on their own.
            same = (node.device, node.data_ptr(), node.dtype, node.shape, node.stride(), node.is_neg())
            owners[path] = seen.setdefault(same, path) if node.numel() else path
            if owners[path] == path:
                tensors[path] = node.detach()
        if len(owners) > MAX_LEAVES:
            raise ValueError(f"a tree of {len(owners)} leaves cannot be stored: the limit is {MAX_LEAVES}")
        return _Stored(tensors, owners, tuple(empty))


def _nodes(tree: Params, prefix: str) -> Iterator[tuple[str, Any]]:
    """Walk the leaves and the branches that have none, refusing names that would not find the same place again."""
    for name, node in tree.items():
        if not isinstance(name, str) or "/" in name:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"name {name!r} under {prefix!r} cannot be stored: names are text without '/'")
        if isinstance(node, dict) and node:
            yield from _nodes(node, f"{prefix}{name}/")
        else:
            yield prefix + name, node


def _check_leaf(path: str, leaf: Any) -> None:
    if not isinstance(leaf, Tensor):
        raise ValueError(f"leaf {path!r} is {leaf!r}, not a tensor: numbers and text belong in meta")
    if leaf.dtype not in DTYPES or leaf.layout != torch.strided or leaf.device.type == "meta" or leaf.dim() > MAX_DIMS:
        raise ValueError(
            f"leaf {path!r} ({leaf.dtype}, {leaf.layout}, {leaf.device}, {leaf.dim()} dims) cannot be stored: "
            f"a checkpoint holds dense real tensors of at most {MAX_DIMS} dims"
        )


def _group(tensors: dict[str, Tensor], file_bytes: int) -> list[dict[str, Tensor]]:
    """Deal the tensors out to files of at most ``file_bytes``, in the tree's order."""
    groups: list[dict[str, Tensor]] = [{}]
    filled = 0
    for path, tensor in tensors.items():
        if groups[-1] and filled + tensor.nbytes > file_bytes:
            groups.append({})
            filled = 0
        groups[-1][path] = tensor
        filled += tensor.nbytes
    return groups


def _entries(group: dict[str, Tensor]) -> list[Entry]:
    return place({path: (DTYPES[t.dtype], tuple(t.shape), b"") for path, t in group.items()})


def _check_space(directory: Path, groups: list[dict[str, Tensor]], files: Files) -> None:
    needed = 1 << 16
    for group in groups:  # the manifest tells of each tensor about as much as the header, and checksums
        needed += sum(t.nbytes for t in group.values()) + 2 * len(header(_entries(group))) + 100 * len(group)
    free = files.free(directory)
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"the checkpoint needs {needed:,} bytes and {free:,} are free: free some, or set checkpoint.keep lower",
            str(directory),
        )


def _write_file(path: Path, group: dict[str, Tensor], files: Files) -> tuple[FileRecord, dict[str, Piece]]:
    """Stream tensors into one safetensors file and bring it to the disk; no second copy of them is made."""
    entries = _entries(group)
    pieces: dict[str, Piece] = {}
    head = header(entries)
    whole, size = xxhash.xxh3_128(head), len(head)
    with files.create(path) as file:
        files.write(file, head)
        for entry in entries:
            part = xxhash.xxh3_128()
            for data in chunks(group[entry.tensor]):
                part.update(data)
                whole.update(data)
                files.write(file, data)
                size += len(data)
            zeros = (0,) * len(entry.shape)
            pieces[entry.tensor] = Piece(path.name, entry.tensor, zeros, entry.shape, part.digest())
        files.sync(file)
    return FileRecord(size, whole.digest()), pieces


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


def bytes_of(tensor: Tensor) -> memoryview:
    """View the memory of a contiguous CPU tensor."""
    # not reshape(-1): of a single element torch calls any stride contiguous, and keeps it
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def _publish(aside: Path, final: Path, files: Files) -> None:
    outgoing = final.with_name(OUTGOING + final.name)
    replaces = final.name in files.names(final.parent)
    if replaces:
        files.rename(final, outgoing)
    files.rename(aside, final)
    files.sync_directory(final.parent)
    if replaces:
        remove(outgoing, files)
