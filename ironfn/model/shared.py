"""Compute what several texts begin with once: they share a trunk in one row, and see nothing of each other.

The completions of one prompt, the choices of a question, the two sides of a preference pair: a decoder computes a
position from those before it alone, so where two texts begin alike they are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from attrs import evolve, frozen
from torch import Tensor

from ironfn.model.attention import Attend, Attention, by_span
from ironfn.model.causal import PLAIN, Look
from ironfn.types import Batch


@frozen(eq=False)
class Folded:
    """Hold groups of texts in one row of N tokens that stand for the M tokens of the texts laid end to end.

    tokens, position, segment, until: int64 [1, N], as `types.Batch` has them: the texts are numbered through the row.
    places: int64 [M], where in the row each token of the texts is. lengths: the texts' tokens, in order.
    """

    tokens: Tensor
    position: Tensor
    segment: Tensor
    until: Tensor
    places: Tensor
    lengths: tuple[int, ...]

    @property
    def batch(self) -> Batch:
        """Return what `transformer.hidden` reads."""
        return {"tokens": self.tokens, "position": self.position, "segment": self.segment, "until": self.until}

    def to(self, device: torch.device) -> Folded:
        """Return the same on a device, but for where texts begin, which is read on the host."""
        tokens, position, places = (x.to(device) for x in (self.tokens, self.position, self.places))
        return evolve(self, tokens=tokens, position=position, places=places)


def common(texts: Sequence[Sequence[int]]) -> int:
    """Count the tokens with which all of the texts begin.

    >>> common([[5, 6, 7], [5, 6, 8, 9]])
    2
    """
    differ = (i for i, ids in enumerate(zip(*texts, strict=False)) if len(set(ids)) > 1)
    return next(differ, min(map(len, texts)))


def fold(groups: Sequence[Sequence[Sequence[int]]]) -> Folded:
    """Lay groups of texts end to end, writing once what the texts of a group begin with alike. No text is empty.

    >>> fold([[[5, 6, 7], [5, 6, 8, 9]]]).tokens
    tensor([[5, 6, 7, 8, 9]])
    """
    tokens: list[int] = []
    position: list[int] = []
    held: list[tuple[int, int]] = []  # by the first and the last text
    places: list[int] = []
    first = 0
    for group in groups:
        trunk, start, last = common(group), len(tokens), first + len(group) - 1
        tokens += group[0][:trunk]
        position += range(trunk)
        held += [(first, last)] * trunk
        for number, text in enumerate(group, first):
            places += range(start, start + trunk)
            places += range(len(tokens), len(tokens) + len(text) - trunk)
            tokens += text[trunk:]
            position += range(trunk, len(text))
            held += [(number, number)] * (len(text) - trunk)
        first = last + 1
    segment, until = torch.tensor(held).unbind(1)
    lengths = tuple(len(text) for group in groups for text in group)
    return Folded(
        torch.tensor(tokens)[None],
        torch.tensor(position)[None],
        segment[None],
        until[None],
        torch.tensor(places),
        lengths,
    )


def sharing(until: Tensor, inner: Attention = by_span) -> Attention:
    """Return the attention of rows in which the token of a place belongs to the texts ``segment`` to ``until``.

    Each text attends by ``inner`` as if it stood alone, whatever that does with windows or biases: its queries, keys
    and values are read from the row, and the results of what it shares are taken once. Rotary angles that depend on
    the length of a text (`rope.lengths`) cannot be shared by texts beyond the original context. Both are read on the
    host.
    """

    def attention(segment: Tensor | None) -> Attend:
        if segment is None or torch.equal(segment, until):
            return inner(segment)
        sizes, order, firsts, texts = _texts(segment, until)
        spread = [sizes[stretch] for stretch in order]
        attend = inner(torch.repeat_interleave(torch.tensor(texts), torch.tensor(spread))[None])

        def shared(q: Tensor, k: Tensor, v: Tensor, look: Look = PLAIN) -> Tensor:
            # Pieces, not indices: what many texts read gets its gradient by a sum in their order, on any device.
            pieces = [x.flatten(0, 1).split(sizes) for x in (q, k, v)]
            queries, keys, values = (torch.cat([x[stretch] for stretch in order])[None] for x in pieces)
            mixed = attend(queries, keys, values, look)
            copies = mixed[0].split(spread)
            return torch.cat([copies[first] for first in firsts]).view_as(q)

        return shared

    return attention


def _texts(segment: Tensor, until: Tensor) -> tuple[list[int], list[int], list[int], list[int]]:
    """Cut rows into stretches of tokens that belong to the same texts.

    Return the stretches' sizes; the stretches of each text in turn, padding as one of its own; where among those each
    stretch stands first; and the texts' numbers, -1 for padding.
    """
    rows, length = segment.shape
    edge = torch.ones_like(segment, dtype=torch.bool)
    edge[:, 1:] = (segment[:, 1:] != segment[:, :-1]) | (until[:, 1:] != until[:, :-1])
    starts = edge.flatten().nonzero().flatten()
    ends = [*starts.tolist(), rows * length]
    held: dict[tuple[int, int], list[int]] = {}  # by row and text, the stretches
    spans = torch.stack([starts // length, segment.flatten()[starts], until.flatten()[starts]], 1).tolist()
    for stretch, (row, first, last) in enumerate(spans):
        for text in range(first, last + 1):
            held.setdefault((row, text if first >= 0 else -1 - stretch), []).append(stretch)
    order = [stretch for stretches in held.values() for stretch in stretches]
    place = {stretch: at for at, stretch in reversed([*enumerate(order)])}
    texts = [number if key[1] >= 0 else -1 for number, key in enumerate(held) for _ in held[key]]
    return [b - a for a, b in pairwise(ends)], order, [place[stretch] for stretch in range(len(spans))], texts
