"""Lay pairs of completions into rows: the prompt once, both completions after it, several pairs a row.

In the stores of `packed` text 2 i is chosen over text 2 i + 1, which has the same prompt. Judged completions are one
text each: the first id's bit, which no target needs, is set where it is liked, and the other completion of its prompt
is that of the next text, from which a loss learns what is to be expected (arXiv 2402.01306, section 4.1).

A completion begins with the last id of the prompt, which predicts its first: so each place asks for one id. Where a
text is to be scored instead, all of its ids are in the row, and the last of them is what is asked for.
"""

from __future__ import annotations

import numpy as np
import xxhash
from attrs import astuple, evolve, frozen
from numpy.typing import NDArray

from ironfn.data.packed import Arrays, Fit, OnOverlong, trained_ids
from ironfn.data.packing import Packs, pack
from ironfn.data.store import TokenStore


@frozen(eq=False)
class PairStore(TokenStore):
    """Hold one split of one set of preferences, laid into rows.

    bits: the other store, as `packed.PackedStore`. paired: whether texts are pairs, or judged one by one. scored:
    whether they are to be scored as a whole.
    texts: int64 [pairs, 2], the texts whose completions are compared. asked: int64 [pairs, 2], where in each its first
    target is. first: int64 [pairs], where the prompt begins that is kept, in the first of the texts. size: int64
    [pairs, 2], the places of each completion. packs: which pairs stand in which row. reference: float32 [pairs, 2], the
    reference's log-probabilities of the completions, where they are known beforehand.
    """

    bits: TokenStore
    paired: bool
    scored: bool
    texts: NDArray[np.int64]
    asked: NDArray[np.int64]
    first: NDArray[np.int64]
    size: NDArray[np.int64]
    packs: Packs
    fit: Fit
    reference: NDArray[np.float32] | None = None

    @property
    def tokens(self) -> int:
        """Count the places of the rows that hold a token."""
        return self.packs.used

    def windows(self, length: int) -> int:
        """Count the rows of an epoch."""
        assert length == self.packs.length, "laid into rows of another length"
        return self.packs.rows


def lay_pairs(
    ids: TokenStore, bits: TokenStore, length: int, overlong: OnOverlong, *, paired: bool = True, scored: bool = False
) -> PairStore:
    """Lay the pairs of two stores into rows. overlong: of pairs that take more than ``length`` places.

    ``drop`` leaves them out; ``truncate`` cuts the beginning of the prompt, which stays the same for both, and only
    where that is not enough the ends of the completions, the longer first. ValueError for ``split``, which would part
    them, for rows of less than 3 places, and for a single judged completion, to which there is no other.
    """
    if overlong == "split" or length < 3:
        raise ValueError(f"pairs cannot be laid into rows of {length} with overlong: {overlong}; truncate or drop them")
    texts, asked, size = _completions(ids, bits, paired)
    first, fit = np.zeros(len(texts), np.int64), Fit()
    room = length - scored  # the last id of a prompt stands in the row, and not in front of both completions
    over = asked[:, 0] - 1 + size.sum(1) > room
    fit.overlong, fit.targets = int(over.sum()), _targets(ids, bits, texts[over], asked[over], size[over])
    if overlong == "drop":
        fit.lost, fit.lost_targets = fit.overlong, fit.targets
        texts, asked, size, first = (each[~over] for each in (texts, asked, size, first))
    else:
        most = np.maximum(room - size[:, ::-1], room // 2)  # what the other leaves, or one half
        size = np.minimum(size, most)
        first = np.where(over, asked[:, 0] - 1 - (room - size.sum(1)), 0)
        fit.lost_targets = fit.targets - _targets(ids, bits, texts[over], asked[over], size[over])
    places = asked[:, 0] - 1 - first + size.sum(1) + scored
    code = repr([ids.checksum, bits.checksum, overlong, length, paired, scored]).encode()
    whole = evolve(ids, checksum=xxhash.xxh3_64_intdigest(code))
    return PairStore(
        *astuple(whole, recurse=False), bits=bits, paired=paired, scored=scored, texts=texts, asked=asked, first=first,
        size=size, packs=pack(places, length), fit=fit,
    )  # fmt: skip


def _completions(
    ids: TokenStore, bits: TokenStore, paired: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the two texts of each pair, where in them their completions begin, and how many ids these have."""
    count = len(ids.offsets) - 1
    if not paired and count == 1:
        raise ValueError(f"{ids.path}: a single judged completion has no other to compare it with; give more of them")
    lengths = np.diff(ids.offsets)
    own = np.array([trained_ids(bits, text, int(n))[1:].argmax() + 1 for text, n in enumerate(lengths)], np.int64)
    numbers = np.arange(count)
    texts = numbers.reshape(-1, 2) if paired else np.stack((numbers, np.roll(numbers, -1)), 1)
    return texts, own[texts], (lengths - own)[texts]


def _targets(
    ids: TokenStore, bits: TokenStore, texts: NDArray[np.int64], asked: NDArray[np.int64], size: NDArray[np.int64]
) -> int:
    """Count the targets of completions of these sizes."""
    sides = zip(texts.flatten().tolist(), asked.flatten().tolist(), size.flatten().tolist(), strict=True)
    lengths = np.diff(ids.offsets)
    return sum(int(trained_ids(bits, text, int(lengths[text]))[at : at + n].sum()) for text, at, n in sides)


def cut_pairs(store: PairStore, windows: NDArray[np.int64]) -> Arrays:
    """Read rows of a store as [windows, length] arrays; see `types.Batch`. Pair p of a row has the segments 2p, 2p + 1.

    The reference's log-probability of a completion stands at its first place. Nothing is asked for in a prompt.
    """
    shape = (len(windows), store.packs.length)
    rows: Arrays = {
        "tokens": np.full(shape, store.eos, np.int64),
        "targets": np.full(shape, store.eos, np.int64),
        "weight": np.zeros(shape, np.float32),
        "position": np.zeros(shape, np.int64),
        "segment": np.full(shape, -1, np.int64),
        "until": np.full(shape, -1, np.int64),
    }
    if not store.paired:
        rows["liked"] = np.zeros(shape, np.int64)
    if store.reference is not None:
        rows["reference"] = np.zeros(shape, np.float32)
    for row, window in enumerate(windows.tolist()):
        at = 0
        here = store.packs.texts[store.packs.offsets[window] : store.packs.offsets[window + 1]]
        for number, pair in enumerate(here.tolist()):
            at = _write(rows, row, at, store, pair, 2 * number)
    return rows


def _write(rows: Arrays, row: int, at: int, store: PairStore, pair: int, segment: int) -> int:
    """Write a pair into a row from the place ``at``; return where it ends."""
    start, first, asked = int(store.offsets[store.texts[pair, 0]]), int(store.first[pair]), int(store.asked[pair, 0])
    prompt = store.ids[start + first : start + asked].astype(np.int64)
    shared = len(prompt) - 1 + store.scored
    trunk = np.s_[row, at : at + shared]
    at += shared
    rows["tokens"][trunk] = prompt[:shared]
    rows["position"][trunk] = np.arange(shared)
    rows["segment"][trunk], rows["until"][trunk] = segment, segment + 1
    for side in (0, 1):
        text, size, begin = (int(x[pair, side]) for x in (store.texts, store.size, store.asked))
        ids = store.ids[store.offsets[text] + begin : store.offsets[text] + begin + size]
        bits = trained_ids(store.bits, text, begin + size)
        place = np.s_[row, at : at + size]
        rows["tokens"][place] = ids if store.scored else np.concatenate((prompt[-1:], ids[:-1]))
        rows["targets"][place] = ids
        rows["weight"][place] = np.arange(size) == size - 1 if store.scored else bits[begin:]
        rows["position"][place] = shared + np.arange(size)
        rows["segment"][place] = rows["until"][place] = segment + side
        if not store.paired and side == 0:
            rows["liked"][place] = bits[0]
        if store.reference is not None:
            rows["reference"][row, at] = store.reference[pair, side]
        at += size
    return at
