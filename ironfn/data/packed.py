"""Keep supervised texts in stores, and lay them into rows: several texts a row, none of which sees another.

A text of n ids takes n - 1 places of a row: the input of each is an id, its target the next one. Its ids lie in one
store, a bit for each of them, whether it is trained, in another: words of 16 bits, each text's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

import numpy as np
import xxhash
from attrs import astuple, define, evolve, frozen
from numpy.typing import NDArray

from ironfn.data.packing import Packs, pack
from ironfn.data.store import StoreWriter, TokenStore

Arrays: TypeAlias = dict[str, NDArray]
OnOverlong: TypeAlias = Literal["truncate", "split", "drop"]
_WORD = 16
TRAINED = ".trained"
"""What the name of a split's second store ends with, behind that of the first."""
BIT_IDS = (1 << _WORD, 0)
"""How many ids that store has, its words, and the one that would end a document there."""


@define
class Fit:
    """Count what became of texts that are longer than a row.

    overlong: how many there were. lost: how many of them, or of the pieces that they were split into, have nothing
    left to train, or were dropped. targets, lost_targets: the trained ids before, and those of them that no row holds.
    """

    overlong: int = 0
    lost: int = 0
    targets: int = 0
    lost_targets: int = 0


@frozen(eq=False)
class PackedStore(TokenStore):
    """Hold one split of one set of supervised texts, laid into rows.

    bits: the other store. text, first, size: int64 [pieces], of each piece of a text that stands in a row: the text,
    where in it the piece begins, and the places that it takes. packs: which pieces stand in which row.
    """

    bits: TokenStore
    text: NDArray[np.int64]
    first: NDArray[np.int64]
    size: NDArray[np.int64]
    packs: Packs
    fit: Fit

    @property
    def tokens(self) -> int:
        """Count the places of the rows that hold a token."""
        return self.packs.used

    def windows(self, length: int) -> int:
        """Count the rows of an epoch."""
        assert length == self.packs.length, "laid into rows of another length"
        return self.packs.rows


def lay(ids: TokenStore, bits: TokenStore, length: int, overlong: OnOverlong) -> PackedStore:
    """Lay the texts of two stores into rows. overlong: what becomes of texts that take more than ``length`` places.

    ``truncate`` keeps their beginning, ``split`` makes pieces, which see each other no more than other texts do,
    ``drop`` leaves them out. A piece ends with its last target; one without any is left out.
    """
    places, fit = np.diff(ids.offsets) - 1, Fit()
    short = np.flatnonzero(places <= length)
    pieces = [np.stack((short, np.zeros_like(short), places[short]), 1)]
    for text in np.flatnonzero(places > length).tolist():
        trained = trained_ids(bits, text, int(places[text]) + 1)
        found = [(text, *piece) for piece in _pieces(trained, length, overlong, fit)]
        pieces.append(np.array(found, np.int64).reshape(-1, 3))
    joined = np.concatenate(pieces)
    joined = joined[np.argsort(joined[:, 0], kind="stable")]
    text, first, size = (np.ascontiguousarray(column) for column in joined.T)
    whole = evolve(ids, checksum=xxhash.xxh3_64_intdigest(repr([ids.checksum, bits.checksum, overlong]).encode()))
    return PackedStore(
        *astuple(whole, recurse=False), bits=bits, text=text, first=first, size=size, packs=pack(size, length), fit=fit
    )


def _pieces(trained: NDArray[np.bool_], length: int, overlong: OnOverlong, fit: Fit) -> Iterator[tuple[int, int]]:
    """Yield where the pieces of a text that is too long begin, and the places that they take."""
    total = int(trained.sum())
    fit.overlong += 1
    fit.targets += total
    kept = 0
    ends = {"truncate": length, "split": len(trained) - 1, "drop": 0}[overlong]
    for first in range(0, ends, length):
        targets = np.flatnonzero(trained[first + 1 : first + length + 1])
        if len(targets):
            kept += len(targets)
            yield first, int(targets[-1]) + 1
        else:
            fit.lost += 1
    fit.lost += overlong == "drop"
    fit.lost_targets += total - kept


def trained_ids(bits: TokenStore, text: int, count: int) -> NDArray[np.bool_]:
    """Return which ids of a text are trained."""
    words = bits.ids[bits.offsets[text] : bits.offsets[text + 1]]
    return np.unpackbits(words.astype("<u2").view(np.uint8), count=count, bitorder="little").astype(bool)


def cut_packs(store: PackedStore, windows: NDArray[np.int64]) -> Arrays:
    """Read rows of a store as [windows, length] arrays; see `types.Batch`. What no text fills has the segment -1."""
    shape = (len(windows), store.packs.length)
    rows: Arrays = {
        "tokens": np.full(shape, store.eos, np.int64),
        "targets": np.full(shape, store.eos, np.int64),
        "weight": np.zeros(shape, np.float32),
        "position": np.zeros(shape, np.int64),
        "segment": np.full(shape, -1, np.int64),
    }
    for row, window in enumerate(windows.tolist()):
        at = 0
        here = store.packs.texts[store.packs.offsets[window] : store.packs.offsets[window + 1]]
        for segment, piece in enumerate(here.tolist()):
            text, first, size = int(store.text[piece]), int(store.first[piece]), int(store.size[piece])
            start = int(store.offsets[text]) + first
            place = np.s_[row, at : at + size]
            rows["tokens"][place] = store.ids[start : start + size]
            rows["targets"][place] = store.ids[start + 1 : start + size + 1]
            rows["weight"][place] = trained_ids(store.bits, text, first + size + 1)[first + 1 :]
            rows["position"][place] = np.arange(size)
            rows["segment"][place] = segment
            at += size
    return rows


@frozen
class PackedWriter:
    """Write one split of a set of supervised texts into its two stores."""

    ids: StoreWriter
    bits: StoreWriter

    def append(
        self,
        ids: NDArray[np.int64],
        trained: NDArray[np.bool_],
        counts: NDArray[np.int64],
        byte_lengths: NDArray[np.int32],
    ) -> int:
        """Add texts, and return how many bytes of text they stand for.

        ids, trained: of all of them. counts: the ids of each. byte_lengths: of each id.
        """
        words = -(-counts // _WORD)
        starts = np.cumsum(words) - words  # where each text's words begin
        flags = np.zeros(int(words.sum()) * _WORD, bool)
        flags[np.repeat(starts * _WORD - (np.cumsum(counts) - counts), counts) + np.arange(len(ids))] = trained
        size = int(byte_lengths[ids].sum())
        self.ids.append(ids, counts.tolist(), size)
        self.bits.append(np.packbits(flags, bitorder="little").view("<u2"), words.tolist(), 0)
        return size
