"""Say which window stands at which global row: pure arithmetic on (seed, epoch, row), nothing is stored or walked.

A mixture deals its rows in blocks. Within a block each set has its exact quota, shuffled; the quotas of all the blocks
before follow from one integer product, so the place inside a set of any row is known without dealing the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ironfn import rng

_UNIT = 1 << 32  # shares are rounded to multiples of 1 / _UNIT, so that quotas are exact integers
_ROUNDS = 6


def permute(indices: NDArray[np.int64], size: int, *coordinates: int | str) -> NDArray[np.int64]:
    """Return where a keyed permutation of ``range(size)`` sends each of ``indices``, in O(1) memory.

    A Feistel network on the smallest even number of bits that holds ``size``, walked until it falls inside (Black and
    Rogaway 2002, "Ciphers with arbitrary finite domains").
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    keys = [np.uint64(rng.key(*coordinates, "round", i)) for i in range(_ROUNDS)]

    def once(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = x >> shift, x & mask
        for key in keys:
            left, right = right, left ^ (_scramble(right ^ key) & mask)
        return left << shift | right

    place = once(indices.astype(np.uint64))
    while (outside := place >= size).any():
        place[outside] = once(place[outside])
    return place.astype(np.int64)


def _scramble(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix 64-bit words (the finaliser of MurmurHash3, Appleby)."""
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))


def shares(weights: Sequence[float], tokens: Sequence[int], temperature: float | None) -> tuple[float, ...]:
    """Return each set's share of the rows: its weight's, or at a temperature T proportional to tokens^(1/T).

    >>> shares([3, 1], [10, 10], None), shares([1, 1], [400, 100], 2.0)
    ((0.75, 0.25), (0.6666666666666666, 0.3333333333333333))
    """
    if temperature is None:
        parts = [float(weight) for weight in weights]
    else:
        largest = max(tokens)
        parts = [(count / largest) ** (1 / temperature) for count in tokens]
    return tuple(part / sum(parts) for part in parts)


def deal(rows: NDArray[np.int64], parts: Sequence[float], seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the set of each global row, and the row's place among all the rows of its set since row 0.

    After any number of whole blocks the counts differ from the shares by less than one row a set.
    """
    if len(parts) == 1:
        return np.zeros_like(rows), rows
    size = max(1024, len(parts) ** 2)
    units = [round(part * _UNIT) for part in parts]
    largest = max(range(len(parts)), key=lambda k: units[k])
    sets, places = np.empty_like(rows), np.empty_like(rows)
    for block in np.unique(rows // size):
        before, after = (_dealt(int(b) * size, units, largest) for b in (block, block + 1))
        hand = np.repeat(np.arange(len(parts)), [b - a for a, b in zip(before, after, strict=True)])
        hand = hand[permute(np.arange(size), size, seed, "deal", int(block))]
        rank = np.empty(size, np.int64)
        for k, first in enumerate(before):
            mine = hand == k
            rank[mine] = first + np.arange(np.count_nonzero(mine))
        here = rows // size == block
        sets[here], places[here] = hand[rows[here] % size], rank[rows[here] % size]
    return sets, places


def _dealt(rows: int, units: Sequence[int], largest: int) -> list[int]:
    """Count the rows of each set among the first ``rows``: rounded down, the remainder to the largest set."""
    counts = [rows * unit // _UNIT for unit in units]
    counts[largest] += rows - sum(counts)
    return counts
