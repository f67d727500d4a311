"""Let every position look at the positions before it, in its own document only.

Shapes: q [rows, length, heads, head_dim]; k, v [rows, length, kv_heads, head_dim]; the result is shaped like q.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch
from attrs import frozen
from torch import Tensor

from ironfn import rng
from ironfn.model.causal import PLAIN, Look, causal, sdpa


class Attend(Protocol):
    """Mix v by how q looks at k, causally."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, look: Look = PLAIN) -> Tensor:
        """Return mixed v."""
        ...


Attention: TypeAlias = "Callable[[Tensor | None], Attend]"
"""From the batch's ``segment`` (None: each row is one document) to what all blocks of this forward pass call."""


def spans(segment: Tensor) -> list[tuple[int, bool]]:
    """Cut the flattened rows where the segment changes: (tokens, is text) one after the other.

    A span never crosses a row; segment -1 is padding.

    >>> spans(torch.tensor([[0, 0, 1, -1]]))
    [(2, True), (1, True), (1, False)]
    """
    rows, length = segment.shape
    edge = torch.ones_like(segment, dtype=torch.bool)
    edge[:, 1:] = segment[:, 1:] != segment[:, :-1]
    starts = edge.flatten().nonzero().flatten()
    sizes = torch.diff(starts, append=starts.new_tensor([rows * length]))
    return list(zip(sizes.tolist(), (segment.flatten()[starts] >= 0).tolist(), strict=True))


def by_span(segment: Tensor | None) -> Attend:
    """Attend one document at a time: no mask is built, and the cost is what the documents cost.

    Reads ``segment`` on the host: give it on the CPU when the rest is on a GPU.
    """
    if segment is None:
        return causal
    found = spans(segment)
    if all(size == segment.shape[1] and text for size, text in found):
        return causal
    sizes = [size for size, _ in found]

    def attend(q: Tensor, k: Tensor, v: Tensor, look: Look = PLAIN) -> Tensor:
        pieces = zip(*(x.flatten(0, 1).split(sizes) for x in (q, k, v)), found, strict=True)
        mixed = [
            causal(qs[None], ks[None], vs[None], look)[0] if text else torch.zeros_like(qs)
            for qs, ks, vs, (_, text) in pieces
        ]
        return torch.cat(mixed).view_as(q)

    return attend


def allowed(segment: Tensor, window: int = 0) -> Tensor:
    """Return the bool mask [rows, 1, length, length] of who may look at whom; padding sees padding."""
    length = segment.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segment.device).tril()
    if window:
        causal = causal.triu(1 - window)
    return (causal & (segment[:, None, :] == segment[:, :, None]))[:, None]


def by_mask(segment: Tensor | None) -> Attend:
    """Attend under a mask [rows, 1, length, length]: for a compiler, which cannot branch on data.

    ``segment`` may lie on the host: the compiler brings it over once, whatever the number of layers.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, look: Look = PLAIN) -> Tensor:
        if look.softcap is not None:
            return written(q, k, v, look)
        if segment is None and not look.window and look.slopes is None:
            return sdpa(q, k, v, scale=look.scale)
        mask = allowed(_documents(segment, q), look.window)
        if look.slopes is not None:
            mask = torch.where(mask, _distances(look.slopes, q), -math.inf)
        return sdpa(q, k, v, mask, look.scale)

    written = written_out(segment)
    return attend


def _documents(segment: Tensor | None, q: Tensor) -> Tensor:
    return torch.zeros(q.shape[:2], dtype=torch.long, device=q.device) if segment is None else segment.to(q.device)


def _distances(slopes: Tensor, q: Tensor) -> Tensor:
    """Return ALiBi's terms [heads, length, length], 0 for the own place and less for what is far."""
    place = torch.arange(q.shape[1], device=q.device)
    return (slopes[:, None, None] * (place - place[:, None])).to(q.dtype)


def written_out(segment: Tensor | None, drop: Callable[[Tensor], Tensor] = lambda p: p) -> Attend:
    """Attend with every probability there to be seen: for `torch.func` (SDPA's CPU kernel has neither
    a forward derivative nor a rule for vmap) and for dropout.

    drop: what happens to the probabilities [rows, heads, length, length] before they weigh the values.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, look: Look = PLAIN) -> Tensor:
        share = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(share, dim=2).transpose(1, 2) for x in (k, v))
        mask = allowed(_documents(segment, q), look.window)
        scale = q.shape[-1] ** -0.5 if look.scale is None else look.scale
        scores = q.transpose(1, 2) @ k.transpose(2, 3) * scale
        if look.softcap is not None:
            scores = (scores / look.softcap).tanh() * look.softcap
        if look.slopes is not None:
            scores = scores + _distances(look.slopes, q)
        high = torch.promote_types(q.dtype, torch.float32)
        probabilities = scores.masked_fill(~mask, -math.inf).to(high).softmax(-1).to(q.dtype)
        return (drop(probabilities) @ v).transpose(1, 2)

    return attend


@frozen
class Dropout:
    """Drop a share ``rate`` of values; which ones depends on the seed, the place and the global row alone."""

    rate: float
    seed: int

    def hidden(self, x: Tensor, place: str, rows: Tensor, start: int = 0) -> Tensor:
        """Drop from activations x [rows, length, width] whose first position is ``start``."""
        device = x.device
        coordinates = [
            rows.to(device),
            torch.arange(start, start + x.shape[1], device=device),
            torch.arange(x.shape[2], device=device),
        ]
        return rng.dropout(x, self.rate, rng.key(self.seed, "dropout", place), coordinates)

    def attention(self, segment: Tensor | None, place: str, rows: Tensor, first_head: int) -> Attend:
        """Return an attention that drops from its probabilities."""

        def drop(probabilities: Tensor) -> Tensor:
            device = probabilities.device
            heads = torch.arange(first_head, first_head + probabilities.shape[1], device=device)
            places = torch.arange(probabilities.shape[2], device=device)
            coordinates = [rows.to(device), heads, places, places]
            return rng.dropout(probabilities, self.rate, rng.key(self.seed, "dropout", place), coordinates)

        return written_out(segment, drop)
