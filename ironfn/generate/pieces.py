"""Cut what many texts see into pieces of memory, each read once for all the texts that share it. No tensor here.

A text's tokens lie in slots of a pool, in runs that are not always adjacent: its stretches. A row is a new token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby

from attrs import frozen

Stretches = tuple[tuple[int, int], ...]
"""(start, stop) of each run of slots, in the text's order."""

_LONG = 64
"""Tokens from which reading them where they lie, as a piece of their own, costs less than a copy beside others."""


@frozen
class Part:
    """Say where a text's ``count`` new tokens belong: after ``start`` cached ones; ``stretches`` hold them all."""

    count: int
    start: int
    stretches: Stretches


@frozen
class Piece:
    """Let rows see slots, whose first holds the text's token ``first``.

    masked: whether there are slots that come after some of the rows, or before their windows.
    """

    rows: tuple[int, ...]
    first: int
    stretches: Stretches
    masked: bool = False


def size_of(stretches: Stretches) -> int:
    """Count the slots.

    >>> size_of(((0, 4), (8, 9)))
    5
    """
    return sum(stop - start for start, stop in stretches)


def cut(stretches: Stretches, start: int, stop: int) -> Stretches:
    """Return the slots of the tokens ``start`` to ``stop``.

    >>> cut(((0, 4), (8, 12)), 2, 6)
    ((2, 4), (8, 10))
    """
    found: list[tuple[int, int]] = []
    for first, last in stretches:
        size = last - first
        if start < size and stop > 0:
            found.append((first + max(start, 0), first + min(stop, size)))
        start, stop = start - size, stop - size
    return tuple(found)


@frozen
class Text:
    """Say which rows of the flat row are a part's new tokens."""

    rows: tuple[int, ...]
    part: Part

    @property
    def end(self) -> int:
        """Return the length of the text with its new tokens."""
        return self.part.start + self.part.count


def texts(parts: Sequence[Part]) -> list[Text]:
    """Give each part its rows, one part after the other."""
    ends = list(accumulate(part.count for part in parts))
    return [Text(tuple(range(end - part.count, end)), part) for part, end in zip(parts, ends, strict=True)]


def pieces(cached: Iterable[Text], window: int) -> list[Piece]:
    """Return what the rows of texts of which something is cached see under a window (0: everything before them)."""
    masked: list[Piece] = []
    whole: list[Piece] = []
    for text in cached:
        part, rows = text.part, text.rows
        first = max(0, part.start + 1 - window) if window else 0
        if part.count == 1:
            whole.append(Piece(rows, first, cut(part.stretches, first, text.end)))
        elif window and text.end > window:
            masked.append(Piece(rows, first, cut(part.stretches, first, text.end), True))
        else:
            whole.append(Piece(rows, 0, cut(part.stretches, 0, part.start)))
            masked.append(Piece(rows, part.start, cut(part.stretches, part.start, text.end), True))
    return masked + list(_shared(whole))


def _shared(whole: Iterable[Piece]) -> Iterator[Piece]:
    """Cut pieces where those that begin alike part ways, so that what they share is one piece of all their rows."""
    alike: dict[tuple[int, int], list[Piece]] = defaultdict(list)
    for piece in whole:
        alike[piece.first, piece.stretches[0][0]].append(piece)
    for (first, _), group in alike.items():
        trunk, rests = _parted([list(piece.stretches) for piece in group]) if len(group) > 1 else ((), [])
        size = size_of(trunk)
        if size < 2 * _LONG or len(group) == 1:
            yield from (part for piece in group for part in _alone(piece))
            continue
        yield Piece(tuple(row for piece in group for row in piece.rows), first, trunk)
        left = zip(group, rests, strict=True)
        yield from _shared(Piece(piece.rows, first + size, tuple(rest)) for piece, rest in left if rest)


def _parted(all_: list[list[tuple[int, int]]]) -> tuple[Stretches, list[list[tuple[int, int]]]]:
    """Return the slots with which all of these begin, and what is left of each."""
    trunk: list[tuple[int, int]] = []
    while all(all_) and len({each[0][0] for each in all_}) == 1:
        start, stop = all_[0][0][0], min(each[0][1] for each in all_)
        trunk.append((start, stop))
        all_ = [[(stop, each[0][1])][each[0][1] == stop :] + each[1:] for each in all_]
    return tuple(trunk), all_


def _alone(text: Piece) -> Iterator[Piece]:
    """Cut one text's slots so that long stretches are read where they lie, and short ones together."""
    if len(text.stretches) == 1 or size_of(text.stretches) < 2 * _LONG:
        yield text
        return
    first = text.first
    for is_long, run in groupby(text.stretches, lambda s: s[1] - s[0] >= _LONG):
        together = tuple(run)
        for stretches in ((each,) for each in together) if is_long else (together,):
            yield Piece(text.rows, first, stretches)
            first += size_of(stretches)
