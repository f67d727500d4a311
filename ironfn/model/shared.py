"""Compute what several texts begin with once: they share a trunk in one row, and see nothing of each other.

The completions of one prompt, the choices of a question, the two sides of a preference pair: a decoder computes a
position from those before it alone, so where two texts begin alike they are alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from ironfn.model.attention import Attention, by_span
from ironfn.model.causal import PLAIN, Look
from ironfn.types import Batch


@frozen(eq=False)
class Folded:
    """Hold groups of texts in one row of N tokens that stand for the M tokens of the texts laid end to end.

    tokens, position: int64 [1, N]. places: int64 [M], where in the row each token of the texts is.
    firsts: int64 [N], where among the texts each token of the row is first. lengths: the texts' tokens, in order.
    """

    tokens: Tensor
    position: Tensor
    places: Tensor
    firsts: Tensor
    lengths: tuple[int, ...]

    @property
    def batch(self) -> Batch:
        """Return what `transformer.hidden` reads; its ``Forward`` needs the attention of `shared_prefix` too."""
        return {"tokens": self.tokens, "position": self.position}

    @property
    def segment(self) -> Tensor:
        """Return the number of the text of each of the M tokens, int64 [1, M]."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths))[None]

    def to(self, device: torch.device) -> Folded:
        """Return the same with its tensors on a device."""
        tensors = (self.tokens, self.position, self.places, self.firsts)
        tokens, position, places, firsts = (x.to(device) for x in tensors)
        return Folded(tokens, position, places, firsts, self.lengths)


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
    places: list[int] = []
    firsts: list[int] = []
    for group in groups:
        trunk, start = common(group), len(tokens)
        for number, text in enumerate(group):
            new = 0 if number == 0 else trunk
            firsts += range(len(places) + new, len(places) + len(text))
            places += range(start, start + new)
            places += range(len(tokens), len(tokens) + len(text) - new)
            tokens += text[new:]
            position += range(new, len(text))
    return Folded(
        torch.tensor(tokens)[None],
        torch.tensor(position)[None],
        torch.tensor(places),
        torch.tensor(firsts),
        tuple(len(text) for group in groups for text in group),
    )


def shared_prefix(folded: Folded, inner: Attention = by_span) -> Attention:
    """Return the attention of the texts, for a row in which they share their beginnings.

    Each text attends by ``inner`` as if it stood alone, whatever that does with windows or biases: its queries, keys
    and values are read from the row, and the results of what it shares are taken once. Rotary angles that depend on
    the length of a text (`rope.lengths`) cannot be shared by texts beyond the original context.
    """
    attend = inner(folded.segment)
    if len(folded.places) == len(folded.firsts):
        return lambda _: attend

    def folded_attend(q: Tensor, k: Tensor, v: Tensor, look: Look = PLAIN) -> Tensor:
        q, k, v = (x.index_select(1, folded.places) for x in (q, k, v))
        return attend(q, k, v, look).index_select(1, folded.firsts)

    return lambda _: folded_attend
