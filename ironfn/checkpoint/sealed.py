"""Write a manifest as msgpack with its own digest behind it, and read it back without trusting a word of it."""

from __future__ import annotations

import math
from typing import Any, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]
import xxhash

from ironfn.checkpoint.manifest import (
    FILE_NAME,
    FORMAT,
    ITEM_BYTES,
    MAX_BYTES,
    MAX_DIMS,
    MAX_LEAVES,
    VERSION,
    DamagedCheckpoint,
    FileRecord,
    Leaf,
    Manifest,
    Piece,
    check_path,
    entries_of,
    header,
)

_DIGEST_MARK = b"\xc4\x10"  # msgpack's head of 16 bytes of data
_MAX_ARRAY = 4096  # msgpack reserves an array's length before it has seen the elements, at every level of a nest


def seal(manifest: Manifest) -> bytes:
    """Write a manifest as bytes, its digest last. ValueError where its own reader would refuse it."""
    body = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "meta": manifest.meta,
        "leaves": {
            path: {
                "dtype": leaf.dtype,
                "shape": leaf.shape,
                "pieces": [[p.file, p.tensor, p.offset, p.shape, p.checksum] for p in leaf.pieces],
            }
            for path, leaf in manifest.leaves.items()
        },
        "files": {name: [record.size, record.checksum] for name, record in manifest.files.items()},
        "empty": dict.fromkeys(manifest.empty, True),
    }
    try:
        packed = cast(bytes, msgpack.packb(body))  # pyright: ignore[reportUnknownMemberType]
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"meta holds what msgpack cannot: {error}; use str, int, float, bool, list, dict") from error
    data = packed + _DIGEST_MARK + xxhash.xxh3_128_digest(packed)
    try:
        unseal(data)
    except DamagedCheckpoint as error:
        raise ValueError(f"this tree or its meta cannot be stored: {error}") from error
    return data


def unseal(data: bytes | memoryview) -> Manifest:
    """Read a manifest's bytes back. DamagedCheckpoint for any byte that is not as it was written.

    ValueError for a version that this code does not know: that is no damage.
    """
    if len(data) > MAX_BYTES:
        raise DamagedCheckpoint(f"the manifest has {len(data)} bytes, more than the {MAX_BYTES} that are allowed")
    packed, tail = memoryview(data)[:-18], bytes(data[-18:])
    if len(data) <= 18 or tail != _DIGEST_MARK + xxhash.xxh3_128_digest(packed):
        raise DamagedCheckpoint("the manifest's bytes do not match its own checksum")
    limits = {"max_map_len": MAX_LEAVES, "max_array_len": _MAX_ARRAY, "max_ext_len": 0}
    try:
        body = cast(Any, msgpack.unpackb(packed, ext_hook=_no_extension, **limits))  # pyright: ignore[reportUnknownMemberType]
    except Exception as error:  # msgpack has no common class for what it raises on bad bytes
        raise DamagedCheckpoint(f"the manifest is not readable: {error}") from error
    top = _map(body, "the whole")
    _need(top.get("format") == FORMAT, "format", "is not a checkpoint's")
    if top.get("version") != VERSION:
        raise ValueError(f"manifest version {top.get('version')!r} is not {VERSION}: read it with the ironfn it is of")
    return _manifest(top)


def _no_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code} is refused")


def _need(condition: bool, where: str, what: str) -> None:
    if not condition:
        raise DamagedCheckpoint(f"manifest: {where} {what}")


def _map(value: Any, where: str) -> dict[Any, Any]:
    _need(type(value) is dict, where, "is not a map")
    return value


def _list(value: Any, length: int | None, where: str) -> list[Any]:
    _need(type(value) is list and length in (None, len(value)), where, "is not a list of the right length")
    return value


def _natural(value: Any, where: str) -> int:
    _need(type(value) is int and 0 <= value < 2**63, where, f"is {value!r}, not a natural number")
    return value


def _digest(value: Any, where: str) -> bytes:
    _need(type(value) is bytes and len(value) == 16, where, "has no checksum")
    return value


def _path(value: Any) -> str:
    _need(type(value) is str, f"leaf path {value!r}", "is not text")
    try:
        check_path(value)
    except ValueError as error:
        raise DamagedCheckpoint(f"manifest: {error}") from None
    return value


def _shape(value: Any, where: str) -> tuple[int, ...]:
    sizes = _list(value, None, where)
    _need(len(sizes) <= MAX_DIMS, where, f"has more than {MAX_DIMS} dims")
    return tuple(_natural(size, where) for size in sizes)


def _manifest(top: dict[Any, Any]) -> Manifest:
    keys = {"format", "version", "step", "meta", "leaves", "files", "empty"}
    _need(set(top) == keys, "the whole", f"does not have the keys {sorted(keys)}")
    files: dict[str, FileRecord] = {}
    for name, told in _map(top["files"], "files").items():
        _need(type(name) is str and bool(FILE_NAME.fullmatch(name)), f"file name {name!r}", "is refused")
        size, checksum = _list(told, 2, name)
        files[name] = FileRecord(_natural(size, name), _digest(checksum, name))
    leaves = {_path(path): _leaf(path, told) for path, told in _map(top["leaves"], "leaves").items()}
    empty = tuple(_path(path) for path in _map(top["empty"], "empty"))
    for path in (*leaves, *empty):
        through = [path[:place] for place, char in enumerate(path) if char == "/" and path[:place] in leaves]
        _need(not through, f"leaf path {path!r}", f"runs through the leaf {''.join(through[:1])!r}")
    manifest = Manifest(_natural(top["step"], "step"), _map(top["meta"], "meta"), leaves, files, empty)
    for name, entries in entries_of(manifest).items():
        size = len(header(entries)) + (entries[-1].end if entries else 0)
        _need(size == files[name].size, name, f"should have {size} bytes, not {files[name].size}")
    return manifest


def _leaf(path: str, value: Any) -> Leaf:
    where = f"leaf {path!r}"
    told = _map(value, where)
    _need(set(told) == {"dtype", "shape", "pieces"}, where, "is not described")
    dtype, shape = told["dtype"], _shape(told["shape"], where)
    _need(type(dtype) is str and dtype in ITEM_BYTES, where, f"has the unknown dtype {dtype!r}")
    _need(math.prod(shape) * ITEM_BYTES[dtype] < 2**63, where, f"has the impossible shape {shape}")
    pieces = tuple(_piece(piece, where) for piece in _list(told["pieces"], None, where))
    _need(_is_grid(shape, pieces), where, "is not covered by its pieces exactly once")
    return Leaf(dtype, shape, pieces)


def _piece(value: Any, where: str) -> Piece:
    file, tensor, offset, shape, checksum = _list(value, 5, where)
    _need(type(file) is str, where, "has a piece in no file")
    return Piece(file, _path(tensor), _shape(offset, where), _shape(shape, where), _digest(checksum, where))


def _is_grid(shape: tuple[int, ...], pieces: tuple[Piece, ...]) -> bool:
    """Tell whether the pieces are all the cells of the grid that their offsets span: then they tile the leaf."""
    if not pieces or any(len(p.offset) != len(shape) or len(p.shape) != len(shape) for p in pieces):
        return False
    starts = [sorted({p.offset[dim] for p in pieces}) for dim in range(len(shape))]
    if len({p.offset for p in pieces}) != len(pieces) or len(pieces) != math.prod(map(len, starts)):
        return False
    for dim, size in enumerate(shape):
        lengths = {begin: end - begin for begin, end in zip(starts[dim], [*starts[dim][1:], size], strict=True)}
        if starts[dim][0] != 0 or any(p.shape[dim] != lengths[p.offset[dim]] for p in pieces):
            return False
    return True
