"""Keep token ids in one memory-mapped file: a header, the ids, and where each document begins.

    offset 0     header, 128 bytes, little endian (``_HEADER``), its own xxh3 last
    offset 128   ids, uint16 or uint32, each document closed by the end id; zeros up to a multiple of 8 bytes
    then         documents + 1 int64: the index of each document's first id, and the number of ids

The width of an id follows from the vocabulary, not from the ids at hand, and is read from the header.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import numpy as np
import xxhash
from attrs import frozen
from numpy.typing import NDArray

from ironfn.data.files import aside, sync_folder

MAGIC = b"ironfnTK"
VERSION = 1
_HEADER = struct.Struct("<8sII9Q32xQ")
HEADER_BYTES = _HEADER.size
_BLOCK = 1 << 24


@frozen(eq=False)
class TokenStore:
    """Hold one split of one set.

    ids: [tokens] uint16 or uint32, mapped. offsets: [documents + 1] int64, mapped. text_bytes: the UTF-8 bytes that the
    ids were made from. tokenizer, recipe: the xxh3 of the tokenizer.json, and of the preparation that wrote the store.
    checksum: the xxh3 of all that follows the header.
    """

    path: Path
    ids: NDArray[np.uint16] | NDArray[np.uint32]
    offsets: NDArray[np.int64]
    vocab_size: int
    eos: int
    text_bytes: int
    tokenizer: int
    recipe: int
    checksum: int

    @property
    def tokens(self) -> int:
        """Count the ids, end ids included."""
        return len(self.ids)

    @property
    def documents(self) -> int:
        """Count the documents."""
        return len(self.offsets) - 1

    def windows(self, length: int) -> int:
        """Count the rows after which each token has been a target once."""
        return -(-self.tokens // length)


def id_width(vocab_size: int) -> int:
    """Return the bytes of an id: 2 where every id below ``vocab_size`` fits into 16 bits, else 4.

    >>> id_width(65536), id_width(65537)
    (2, 4)
    """
    if not 0 < vocab_size <= 1 << 32:
        raise ValueError(f"a vocabulary of {vocab_size} ids fits no store; 1 to 4294967296 do")
    return 2 if vocab_size <= 1 << 16 else 4


def id_dtype(vocab_size: int) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
    """Return the little-endian dtype of ``id_width``."""
    return np.dtype("<u2") if id_width(vocab_size) == 2 else np.dtype("<u4")


def name_code(name: str) -> int:
    """Return the code of a store's name, ``set/split``, by which a file in another's place is noticed."""
    return xxhash.xxh3_64_intdigest(name.encode())


class StoreWriter:
    """Write a store beside its place; ``close`` makes it durable and moves it there, an error before that removes it.

    name: ``set/split``. The other arguments are the fields of TokenStore.
    """

    def __init__(self, path: Path, name: str, *, vocab_size: int, eos: int, tokenizer: int, recipe: int) -> None:
        self._path, self._name = path, name
        self._vocab_size, self._eos, self._tokenizer, self._recipe = vocab_size, eos, tokenizer, recipe
        self._dtype = id_dtype(vocab_size)
        self._offsets = array("q", [0])
        self._digest = xxhash.xxh3_64()
        self._text_bytes = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._aside = aside(path)
        self._file = self._aside.open("wb")
        self._file.write(bytes(HEADER_BYTES))

    def append(self, ids: array[int] | NDArray[np.integer], lengths: Iterable[int], text_bytes: int) -> None:
        """Add documents: their ids in one array, and how many belong to each. text_bytes: of all their text."""
        numbers = np.asarray(ids, np.uint32)
        if len(numbers) and numbers.max() >= self._vocab_size:
            raise ValueError(f"{self._path}: id {numbers.max()} is outside the vocabulary of {self._vocab_size}")
        end = self._offsets[-1]
        for length in lengths:
            end += length
            self._offsets.append(end)
        self._put(numbers.astype(self._dtype).tobytes())
        self._text_bytes += text_bytes

    def close(self) -> int:
        """Write offsets and header, force all to the disk, move the file to its place; return its checksum."""
        tokens = self._offsets[-1]
        self._put(bytes(-tokens * self._dtype.itemsize % 8))
        self._put(np.array(self._offsets, "<i8").tobytes())
        checksum = self._digest.intdigest()
        fields = (
            *(MAGIC, VERSION, self._dtype.itemsize, len(self._offsets) - 1, tokens, self._vocab_size, self._eos),
            *(self._text_bytes, self._tokenizer, self._recipe, name_code(self._name), checksum),
        )
        head = _HEADER.pack(*fields, 0)[:-8]
        self._file.seek(0)
        self._file.write(head + xxhash.xxh3_64_intdigest(head).to_bytes(8, "little"))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._aside.replace(self._path)
        sync_folder(self._path.parent)
        return checksum

    def _put(self, data: bytes) -> None:
        self._digest.update(data)
        self._file.write(data)

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()
        self._aside.unlink(missing_ok=True)


def open_store(path: Path, name: str) -> TokenStore:
    """Map a store. ValueError, with what is wrong, where the file is not whole or is not the store of that name.

    The header's own checksum, its values, and the size of the file are checked here; ``verify`` reads the content.
    """

    def wrong(what: str) -> ValueError:
        return ValueError(f"{path}: {what}; run `ironfn prepare` again")

    try:
        with path.open("rb") as file:
            size, head = os.fstat(file.fileno()).st_size, file.read(HEADER_BYTES)
    except OSError as error:
        raise wrong(f"cannot be opened ({error.strerror})") from error
    if len(head) < HEADER_BYTES or head[:8] != MAGIC:
        raise wrong(f"is no token store ({size} bytes, beginning {head[:8]!r})")
    _, version, width, documents, tokens, vocab_size, eos, text_bytes, tokenizer, recipe, code, checksum, own = (
        _HEADER.unpack(head)
    )
    if version != VERSION:
        raise wrong(f"has format {version}, this version reads {VERSION}")
    if xxhash.xxh3_64_intdigest(head[:-8]) != own:
        raise wrong("has a damaged header (its checksum does not match)")
    if code != name_code(name):
        raise wrong(f"is another store than {name!r}: files were swapped or renamed")
    if width != id_width(vocab_size) or eos >= vocab_size:
        raise wrong(f"has {width}-byte ids and end id {eos} for a vocabulary of {vocab_size}")
    body = tokens * width + -tokens * width % 8
    expected = HEADER_BYTES + body + 8 * (documents + 1)
    if size != expected:
        raise wrong(f"has {size} bytes where its header promises {expected}: it was cut short or written over")
    ids = _map(path, id_dtype(vocab_size), HEADER_BYTES, tokens)
    offsets = _map(path, np.dtype("<i8"), HEADER_BYTES + body, documents + 1)
    if offsets[0] != 0 or offsets[-1] != tokens:
        raise wrong(f"has offsets from {offsets[0]} to {offsets[-1]} for {tokens} tokens")
    return TokenStore(path, ids, offsets, vocab_size, eos, text_bytes, tokenizer, recipe, checksum)


def _map(path: Path, dtype: np.dtype, offset: int, count: int) -> NDArray:
    if count == 0:
        return np.empty(0, dtype)
    return np.memmap(path, dtype, "r", offset, (count,))


def verify(store: TokenStore) -> None:
    """Read a store's whole content against its checksum. ValueError where a bit differs."""
    digest = xxhash.xxh3_64()
    with store.path.open("rb") as file:
        file.seek(HEADER_BYTES)
        while block := file.read(_BLOCK):
            digest.update(block)
    if digest.intdigest() != store.checksum:
        raise ValueError(f"{store.path}: its content is damaged (checksum does not match); run `ironfn prepare` again")
