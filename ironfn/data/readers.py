"""Read documents from files, one at a time, and say of everything that is no document what and where it is."""

from __future__ import annotations

import gzip
import importlib
import itertools
import json
import re
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

from attrs import frozen

from ironfn.data.sources import Source

_BOM = b"\xef\xbb\xbf"
_BLOCK = 1 << 20
MAX_LINE = 1 << 26
"""The bytes that a line of JSON Lines may have: a compressed file of few bytes could hold one without end."""
_NAMES = 10
DEPTH = 200
"""How deep lists and objects of a row may lie in each other; Python gives up somewhere above."""


@frozen
class Document:
    """Hold one text, its UTF-8 bytes, and the place it came from, ``file:line``."""

    text: str
    utf8: bytes
    place: str


@frozen
class Bad:
    """Say what is wrong at a place, ``file:line``."""

    place: str
    what: str


@frozen
class Blank:
    """Stand for a line, or a stretch between two separators, that holds white space only."""

    place: str


@frozen
class Row:
    """Hold what a line of JSON Lines says, whatever that is, and its place, ``file:line``."""

    value: Any
    place: str


Item: TypeAlias = Document | Bad | Blank


def read(source: Source, text: str, split_on: str | None) -> Iterator[Item]:
    """Yield everything that a file holds, in its order, holding no more than one document (text files) in memory.

    text: the field that holds the text in jsonl and parquet. split_on: what parts the documents of a text file; None
    makes the file one document. A byte order mark at the start is dropped; line ends are kept as they are.
    ValueError where the file as a whole cannot be read, as no count could then say what was lost.
    """
    with _to_its_end(source.path):
        if source.kind == "jsonl":
            yield from _jsonl(source.path, text)
        elif source.kind == "parquet":
            yield from _parquet(source.path, text)
        elif source.kind == "topics":
            topics = cast("dict[str, str]", importlib.import_module("pydoc_data.topics").topics)
            yield from (_document(topic, f"{source.path}:{name}") for name, topic in sorted(topics.items()))
        elif split_on is None:
            with _open(source.path) as file:
                yield _decode(file.read().removeprefix(_BOM), str(source.path), 1)
        else:
            yield from _parts(source.path, split_on.encode())


@contextmanager
def _to_its_end(path: Path) -> Generator[None]:
    try:
        yield
    except (EOFError, zlib.error, OSError) as error:
        raise ValueError(f"{path}: cannot be read to its end: {error}; restore the file") from error


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.name.lower().endswith(".gz") else path.open("rb")


def _document(text: str, place: str) -> Item:
    try:
        return Document(text, text.encode(), place)
    except UnicodeEncodeError as error:
        return Bad(place, f"lone surrogate U+{ord(text[error.start]):04X} at character {error.start}")


def _decode(data: bytes, path: str, line: int) -> Item:
    """Turn the bytes of a text file, which start on ``line``, into a document."""
    at = data.find(0)
    if at >= 0:
        return Bad(f"{path}:{line + data.count(10, 0, at)}", "NUL byte: this is no text file")
    try:
        return Document(data.decode(), data, f"{path}:{line}")
    except UnicodeDecodeError as error:
        place = f"{path}:{line + data.count(10, 0, error.start)}"
        return Bad(place, f"invalid UTF-8: byte 0x{data[error.start]:02X}")


def _parts(path: Path, separator: bytes) -> Iterator[Item]:
    """Cut a text file at a separator. Line ends that touch the separator belong to it."""
    line, rest, first = 1, b"", True
    with _open(path) as file:
        while block := file.read(_BLOCK):
            data = rest + block
            if first:
                data, first = data.removeprefix(_BOM), False
            *parts, rest = data.split(separator)
            for part in parts:
                yield _part(part, path, line)
                line += part.count(10) + separator.count(10)
    if rest.strip():  # a separator at the end of the file closes its last document and opens none
        yield _part(rest, path, line)


def _part(part: bytes, path: Path, line: int) -> Item:
    start = line + len(part[: len(part) - len(part.lstrip(b"\r\n"))].splitlines())
    body = part.strip(b"\r\n")
    return _decode(body, str(path), start) if body.strip() else Blank(f"{path}:{line}")


def _jsonl(path: Path, text: str) -> Iterator[Item]:
    for row in _lines(path):
        yield _field(row.value, text, row.place) if isinstance(row, Row) else row


def rows(path: Path) -> Iterator[Row | Bad | Blank]:
    """Yield the rows of a file in its order: parquet, a JSON list (.json), else JSON Lines, these two plain or .gz.

    ValueError where the file as a whole cannot be read.
    """
    name = path.name.lower().removesuffix(".gz")
    with _to_its_end(path):
        if name.endswith(".parquet"):
            yield from _table(path)
        elif name.endswith(".json"):
            yield from _list(path)
        else:
            yield from _lines(path)


class _Twice(ValueError):
    """Tell of a name that an object has twice: one of its values would be lost."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for number, name in enumerate(names) if name in names[:number])
        raise _Twice(f"an object has the name {twice[:40]!r} twice; keep one of them")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def parsed(text: str) -> Any:
    """Return a JSON value. ValueError for what is none, has a name twice, or lies deeper in itself than `DEPTH`."""
    try:
        value = _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError(_deep()) from error
    except ValueError as error:
        if isinstance(error, _Twice | json.JSONDecodeError):
            raise
        raise ValueError("a number has too many digits") from error  # the only other one that Python has here
    if text.count("[") + text.count("{") > DEPTH and _lies_deep(value):
        raise ValueError(_deep())
    return value


def _deep() -> str:
    return f"lists and objects lie more than {DEPTH} deep in each other"


def _lies_deep(value: Any) -> bool:
    layer: list[Any] = [value]
    for _ in range(DEPTH):
        nested = [each.values() if isinstance(each, dict) else each for each in layer if isinstance(each, dict | list)]
        layer = [each for inner in nested for each in cast("Iterable[Any]", inner)]
    return any(isinstance(each, dict | list) for each in layer)


def _list(path: Path) -> Iterator[Row | Bad | Blank]:
    """Read a list of rows, each with the line that it begins on; a .json that begins with no list is a row, or holds
    one a line.

    After what is no JSON nothing more of the list can be told, so that is a ValueError.
    """
    with _open(path) as file:
        data = file.read().removeprefix(_BOM)
    line = 1 + data[: len(data) - len(data.lstrip())].count(10)
    if not data.lstrip().startswith(b"["):
        try:
            yield Row(parsed(data.decode().strip()), f"{path}:{line}")
        except ValueError:
            yield from _lines(path)
        return
    gap, at = re.compile(r"\s*,?\s*"), 1
    try:
        text = data.decode().strip()
        while (start := gap.match(text, at).end()) < len(text) - 1:  # pyright: ignore[reportOptionalMemberAccess]
            line += text.count("\n", at, start)
            found, at = _row(text, start, f"{path}:{line}")
            yield found
            line += text.count("\n", start, at)
        json.loads("[" + text[start:])
    except UnicodeDecodeError as error:
        place = f"{path}:{1 + data.count(10, 0, error.start)}"
        raise ValueError(f"{place}: invalid UTF-8: byte 0x{data[error.start]:02X}; restore the file") from error
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{path}:{line}: the list ends here in what is no JSON: {error}; restore the file") from error


def _row(text: str, start: int, place: str) -> tuple[Row | Bad, int]:
    """Return a row of a list, and where it ends."""
    try:
        value, end = _DECODER.raw_decode(text, start)
    except _Twice as error:
        return Bad(place, str(error)), json.JSONDecoder().raw_decode(text, start)[1]
    return (Bad(place, _deep()) if _lies_deep(value) else Row(value, place)), end


def _lines(path: Path) -> Iterator[Row | Bad | Blank]:
    with _open(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), 1):
            data = line.removeprefix(_BOM)  # also within a file: where files are joined, each brings its own
            place = f"{path}:{number}"
            if len(line) > MAX_LINE:
                raise ValueError(f"{place}: more than {MAX_LINE:,} bytes in a line; cut the document, or the file")
            if not data.strip():
                yield Blank(place)
                continue
            try:
                yield Row(parsed(data.decode()), place)
            except UnicodeDecodeError as error:
                yield Bad(place, f"invalid UTF-8: byte 0x{data[error.start]:02X} at byte {error.start} of the line")
            except json.JSONDecodeError as error:
                yield Bad(place, _no_json(error))
            except ValueError as error:
                yield Bad(place, f"not JSON that can be read: {error}")


def _no_json(error: json.JSONDecodeError) -> str:
    what = "more follows behind a whole value" if error.msg == "Extra data" else error.msg.removesuffix(" at")
    zero = error.doc.find("\0")
    return f"not JSON: {what} at column {error.colno}" + (f" (column {zero + 1} is a NUL byte)" if zero >= 0 else "")


def _field(row: Any, text: str, place: str) -> Item:
    if not isinstance(row, dict):
        return Bad(place, f"a JSON object with the field {text!r} belongs here, not {type(row).__name__}")
    fields = cast("dict[str, Any]", row)
    if text not in fields:
        return Bad(place, f"no field {text!r}; the fields are {listed_names(fields)}")
    value = fields[text]
    if not isinstance(value, str):
        return Bad(place, f"the field {text!r} holds {type(value).__name__}, not a string")
    return _document(value, place)


def listed_names(values: Mapping[str, Any]) -> str:
    """Return the names of fields, as many and as much of them as a person reads."""
    names = [repr(name[:40]) for name in itertools.islice(values, _NAMES)]
    return ", ".join([*names, *(["…"] if len(values) > _NAMES else [])]) or "none"


def _parquet(path: Path, text: str) -> Iterator[Item]:
    for row in _table(path, text):
        yield _field(row.value, text, row.place)


def _table(path: Path, column: str | None = None) -> Iterator[Row]:
    """Yield the rows of a parquet file, or one column of them."""
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
        arrow: Any = importlib.import_module("pyarrow")
    except ImportError as error:
        raise ValueError(f"{path}: to read parquet, pip install 'ironfn[parquet]'") from error
    try:
        with parquet.ParquetFile(path) as file:
            names: list[str] = file.schema_arrow.names
            if column is not None and column not in names:
                raise ValueError(
                    f"{path}: no column {column!r}; the columns are {', '.join(names)}; set the set's `text`"
                )
            number = 0
            for batch in file.iter_batches(batch_size=256, columns=None if column is None else [column]):
                for value in batch.to_pylist():
                    number += 1
                    yield Row(value, f"{path}:row {number}")
    except arrow.ArrowException as error:
        raise ValueError(f"{path}: not a whole parquet file: {error}") from error
