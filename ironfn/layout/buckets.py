"""Lay leaves end to end, so that many of them travel in one collective.

What each rank of an axis is to receive (or has to give) makes a stream of numbers: first its equal shares of the cut
leaves, which stand at the same place in every stream, then the leaves that it owns. A bucket is one stretch of all the
streams: a leaf may begin in one bucket and end in another, so that only the end of the streams is ever padded.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping

import torch
from attrs import define, field, frozen
from torch import Tensor

from ironfn.layout.table import Placement
from ironfn.types import Flat

BUCKET_BYTES = 25 << 20
"""About as much as DistributedDataParallel reduces together (Li et al. 2020, arXiv 2006.15704, section 5.3)."""


@frozen
class Span:
    """Place one leaf, or its share, in a stream: the numbers ``start`` to ``stop``."""

    path: str
    start: int
    stop: int


@frozen
class Streams:
    """Tell what stands where in the streams of the ``ranks`` ranks of an axis.

    shared: the shares of the cut leaves, alike in all streams. own: by rank, the leaves that it owns, after those.
    length: of the longest stream; the others are padded to it.
    """

    ranks: int
    shared: tuple[Span, ...]
    own: tuple[tuple[Span, ...], ...]
    length: int

    def buckets(self, size: int) -> Iterator[tuple[int, int]]:
        """Yield the stretches of ``size`` numbers a stream that make up the whole."""
        for start in range(0, self.length, size):
            yield start, min(start + size, self.length)


def streams(numbers: Mapping[str, int], places: Mapping[str, Placement], ranks: int) -> Streams:
    """Lay leaves of these many numbers out over the ranks of dp; over 1 rank, each leaf is its own share."""
    assert all(numbers.values()), "a leaf without numbers ends in no bucket"
    owned = {path for path in numbers if ranks > 1 and places[path].owner is not None}
    shared = _spans({path: n // ranks for path, n in numbers.items() if path not in owned}, 0)
    first = shared[-1].stop if shared else 0
    own = tuple(
        _spans({path: n for path, n in numbers.items() if path in owned and places[path].owner == rank}, first)
        for rank in range(ranks)
    )
    return Streams(ranks, shared, own, max([first, *(spans[-1].stop for spans in own if spans)]))


def _spans(numbers: Mapping[str, int], start: int) -> tuple[Span, ...]:
    found: list[Span] = []
    for path, n in numbers.items():
        found.append(Span(path, start, start + n))
        start += n
    return tuple(found)


def spread(leaf: Tensor, place: Placement, ranks: int) -> Tensor:
    """Return a view [ranks, *share] of the shares of a leaf that dp cuts; of a leaf that is its own share, [1, *leaf].

    Writing to it writes to the leaf.
    """
    dim = place.dim("dp")
    if ranks == 1 or dim is None:
        return leaf[None]
    return leaf.unflatten(dim, (ranks, -1)).movedim(dim, 0)


def pack(spans: tuple[Span, ...], parts: Flat, start: int, stop: int, out: Tensor) -> int:
    """Copy the numbers ``start`` to ``stop`` of some rows of streams into ``out`` [rows, stop - start].

    parts: the leaves that the spans name, as [rows, *shape]. Returns where the last of them ends in ``out``.
    """
    end = 0
    for span, low, high in within(spans, start, stop):
        part = parts[span.path]
        room = out[:, low - start : high - start]
        if high - low == span.stop - span.start:
            room.view(part.shape).copy_(part)
        else:
            room.copy_(part.reshape(len(part), -1)[:, low - span.start : high - span.start])
        end = high - start
    return end


def within(spans: tuple[Span, ...], start: int, stop: int) -> Iterator[tuple[Span, int, int]]:
    """Yield the spans that a bucket touches, with the stretch of the stream that both have."""
    for i in range(bisect_right(spans, start, key=lambda span: span.stop), len(spans)):
        span = spans[i]
        if span.start >= stop:
            return
        yield span, max(span.start, start), min(span.stop, stop)


@define
class Unpacked:
    """Collect the leaves that come out of buckets, one stretch after another."""

    _pieces: dict[str, list[Tensor]] = field(factory=dict)

    def take(self, spans: tuple[Span, ...], x: Tensor, start: int, stop: int) -> Iterator[tuple[str, Tensor]]:
        """Take a bucket [rows, stop - start] of the streams, and yield each leaf that it completes as [rows, n]."""
        for span, low, high in within(spans, start, stop):
            pieces = self._pieces.setdefault(span.path, [])
            pieces.append(x[:, low - start : high - start])
            if high == span.stop:
                yield span.path, pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
                del self._pieces[span.path]
