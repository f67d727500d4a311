"""Attend to what a cache holds: many texts' new tokens in one flat row, each of which sees its own text.

All rows that see one piece of memory make one product with it; a softmax over several pieces is put together from
theirs by the logsumexps (as in flash-decoding; of a shared beginning in Juravsky et al. 2024, arXiv 2402.05099). So
what texts share is read once, and what lies together is read where it lies.

Legend of shapes: N new tokens in all, n of them, T cached tokens, H heads, K kv_heads, C head_dim; M = n H / K.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from attrs import frozen
from torch import Tensor

from ironfn.generate.cache import Pool
from ironfn.generate.pieces import Part, Piece, Stretches, Text, cut, pieces, texts
from ironfn.model.attention import Attention
from ironfn.model.causal import PLAIN, Look, causal, sdpa

_flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default._op

_BLOCK = 512
"""Rows M whose scores are written out at a time."""


_Run: TypeAlias = tuple[int, Stretches]
"""(row, the slots that it alone sees)."""


@frozen(eq=False)
class _Placed:
    """Hold a piece with its rows as an index of the flat row, and their places in the text."""

    rows: slice | Tensor
    at: Tensor
    piece: Piece


@frozen(eq=False)
class _Padded:
    """Hold one row each of several texts: the slots [n, T] that it sees, their places, and its own place ``at`` [n]."""

    rows: slice | Tensor
    slots: Tensor
    places: Tensor
    at: Tensor


@frozen(eq=False)
class _Plan:
    """Hold how a flat row attends under one window.

    fresh: rows of texts of which nothing is cached. runs: rows that see all that there is in slots of their own, as
    torch's kernel on a CPU sees them: what decoding mostly is. alone: other pieces that are all that their rows see.
    joint, joint_runs: such pieces to put together; parts: for each row that they are about, which of all their rows it
    is made of, and a number more than there are where it is of fewer. order: where each row is among the results; None
    where they come in order.
    """

    fresh: list[slice]
    runs: list[_Run]
    alone: list[_Placed]
    joint: list[_Placed]
    joint_runs: list[_Run]
    parts: Tensor
    padded: _Padded | None
    order: Tensor | None


def paged(pool: Pool, parts: Sequence[Part]) -> Attention:
    """Return the attention of a flat row of new tokens, which belong to ``parts`` one after the other.

    Each block's new keys and values are written into the pool, which is donated, before anything is read.
    """
    return (padded if pool.keys[0].device.type == "cuda" else in_place)(pool, parts)


def in_place(pool: Pool, parts: Sequence[Part]) -> Attention:
    """Read the cache where it lies, a piece at a time: for a CPU, where copies cost more than calls."""
    return _attention(pool, parts, lambda text: False)


def padded(pool: Pool, parts: Sequence[Part]) -> Attention:
    """Read the caches of all texts with one new token by one gather: for a GPU, where calls cost more than copies."""
    return _attention(pool, parts, lambda text: text.part.count == 1)


def _attention(pool: Pool, parts: Sequence[Part], pad: Callable[[Text], bool]) -> Attention:
    device = pool.keys[0].device
    found = texts(parts)
    new = _slots((cut(text.part.stretches, text.part.start, text.end) for text in found), device)
    plan = cache(partial(_planned, found, pad, device))

    def attend(q: Tensor, k: Tensor, v: Tensor, look: Look = PLAIN) -> Tensor:
        keys, values = pool.keys[look.layer], pool.values[look.layer]
        keys.index_copy_(1, new, k[0].transpose(0, 1))
        values.index_copy_(1, new, v[0].transpose(0, 1))
        how = plan(look.window, look.softcap is None and look.slopes is None)
        done = [causal(q[:, at], k[:, at], v[:, at], look)[0] for at in how.fresh]
        if how.runs:
            done.append(_run_by_run(q, how.runs, keys, values, look.scale)[0])
        done += [_seen(q[0], each, keys, values, look)[0] for each in how.alone]
        if how.joint or how.joint_runs:
            several = [_seen(q[0], each, keys, values, look) for each in how.joint]
            if how.joint_runs:
                several.append(_run_by_run(q, how.joint_runs, keys, values, look.scale))
            done.append(_joined(several, how.parts))
        if how.padded is not None:
            done.append(_gathered(q[0], how.padded, keys, values, look))
        mixed = torch.cat(done) if len(done) > 1 else done[0]
        return (mixed if how.order is None else mixed[how.order])[None]

    return lambda _: attend


def _slots(stretches: Iterable[Stretches], device: torch.device) -> Tensor:
    return torch.tensor([slot for each in stretches for run in each for slot in range(*run)], device=device)


def _planned(
    found: Sequence[Text], pad: Callable[[Text], bool], device: torch.device, window: int, plain: bool
) -> _Plan:
    of_one_run = plain and device.type == "cpu"
    if of_one_run and not window and (lone := _lone(found)):
        return _Plan([], lone, [], [], [], torch.empty(0), None, None)
    fresh = [text.rows for text in found if text.part.start == 0 and text.part.count > 1]
    many = [text for text in found if pad(text)]
    seen = pieces((text for text in found if text.rows not in fresh and not pad(text)), window)
    times = Counter(row for piece in seen for row in piece.rows)
    single, several = _split(seen, lambda piece: all(times[row] == 1 for row in piece.rows))
    (runs, alone), (joint_runs, joint) = (
        _split(each, lambda piece: of_one_run and len(piece.rows) == 1 and not piece.masked)
        for each in (single, several)
    )
    made: dict[int, list[int]] = defaultdict(list)
    for number, row in enumerate(row for piece in (*joint, *joint_runs) for row in piece.rows):
        made[row].append(number)
    at = torch.tensor([place for text in found for place in range(text.part.start, text.end)], device=device)
    placed = partial(_placed, at)
    rows = [*(row for rows in fresh for row in rows), *(row for piece in (*runs, *alone) for row in piece.rows), *made]
    rows += [text.rows[0] for text in many]
    order = sorted(range(len(rows)), key=rows.__getitem__)
    return _Plan(
        fresh=[slice(rows[0], rows[-1] + 1) for rows in fresh],
        runs=[(piece.rows[0], piece.stretches) for piece in runs],
        alone=[placed(piece) for piece in alone],
        joint=[placed(piece) for piece in joint],
        joint_runs=[(piece.rows[0], piece.stretches) for piece in joint_runs],
        parts=_rectangle(list(made.values()), device),
        padded=_padded(many, at, window) if many else None,
        order=None if order == list(range(len(rows))) else torch.tensor(order, device=device),
    )


def _lone(found: Sequence[Text]) -> list[_Run]:
    """Return the runs of texts that want a token each and share nothing, as most passes have them; else none."""
    runs: dict[int, _Run] = {}
    for text in found:
        stretches = text.part.stretches
        if text.part.count != 1 or len(stretches) != 1 or stretches[0][0] in runs:
            return []
        runs[stretches[0][0]] = text.rows[0], stretches
    return list(runs.values())


def _split(found: Iterable[Piece], test: Callable[[Piece], bool]) -> tuple[list[Piece], list[Piece]]:
    kinds: tuple[list[Piece], list[Piece]] = [], []
    for piece in found:
        kinds[not test(piece)].append(piece)
    return kinds


def _rectangle(parts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return lists of different lengths as one tensor, filled up with a number more than there are in all."""
    count, most = sum(map(len, parts)), max(map(len, parts), default=0)
    return torch.tensor([[*each, *[count] * (most - len(each))] for each in parts], dtype=torch.long, device=device)


def _index(rows: Sequence[int], device: torch.device) -> slice | Tensor:
    """Return a slice where the rows lie together, because that copies nothing."""
    if list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return torch.tensor(rows, device=device)


def _placed(at: Tensor, piece: Piece) -> _Placed:
    rows = _index(piece.rows, at.device)
    return _Placed(rows, at[rows], piece)


def _padded(many: Sequence[Text], at: Tensor, window: int) -> _Padded:
    """Pad with slots of places that are still to come: nobody sees them."""
    first = [max(0, text.end - window) if window else 0 for text in many]
    length = max(text.end - start for text, start in zip(many, first, strict=True))
    slots = torch.zeros(len(many), length, dtype=torch.long)
    for row, text, start in zip(slots, many, first, strict=True):
        row[: text.end - start] = _slots([cut(text.part.stretches, start, text.end)], row.device)
    places = torch.tensor(first)[:, None] + torch.arange(length)
    rows = _index([text.rows[0] for text in many], at.device)
    return _Padded(rows, slots.to(at.device), places.to(at.device), at[rows])


def _terms(at: Tensor, places: Tensor, look: Look, masked: bool, q: Tensor) -> Tensor:
    """Return what is added to the scores [1 or H, n, T] of rows at ``at`` [n] for keys at ``places`` [T] or [n, T].

    ALiBi's terms grow from the row itself, so that they stay small where they count.
    """
    ago, high = at[:, None] - places, torch.promote_types(q.dtype, torch.float32)
    terms = ago.new_zeros((1, *ago.shape), dtype=high)
    if look.slopes is not None:
        terms = (-look.slopes[:, None, None] * ago).to(high)
    seen = (ago >= 0) & (ago < look.window) if look.window else ago >= 0
    return terms.masked_fill(~seen, -math.inf) if masked else terms


def _seen(q: Tensor, placed: _Placed, keys: Tensor, values: Tensor, look: Look) -> tuple[Tensor, Tensor]:
    """Return what rows of q [N, H, C] make of a piece, [n, H, C], and the logsumexps of their scores, [n, H]."""
    piece, q = placed.piece, q[placed.rows]
    k, v = (_read(x, piece.stretches) for x in (keys, values))
    terms = None
    if piece.masked or look.slopes is not None:
        places = torch.arange(piece.first, piece.first + k.shape[1], device=q.device)
        terms = _terms(placed.at, places, look, piece.masked, q)
    return _mixed(q, k, v, terms, look)


def _read(x: Tensor, stretches: Stretches) -> Tensor:
    found = [x.narrow(-2, start, stop - start) for start, stop in stretches]
    return found[0] if len(found) == 1 else torch.cat(found, -2)


def _run_by_run(
    q: Tensor, runs: Sequence[_Run], keys: Tensor, values: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return as `_seen` what single rows of q [1, N, H, C] make of slots of their own, in as few calls as can be."""
    k, v, heads = keys[None], values[None], q.shape[2:]
    rows = q.view(-1, 1, keys.shape[0], heads[0] // keys.shape[0], heads[1]).unbind()
    done = [_flash(rows[row], _read(k, slots), _read(v, slots), scale=scale) for row, slots in runs]
    mixed, totals = (torch.cat(x) for x in zip(*done, strict=True))
    return mixed.reshape(-1, *heads), totals.reshape(-1, heads[0])


def _mixed(q: Tensor, k: Tensor, v: Tensor, terms: Tensor | None, look: Look) -> tuple[Tensor, Tensor]:
    """Attend from q [n, H, C] to k, v [K, T, C]: the heads that share keys are rows of one product."""
    count, heads, width = q.shape
    share = heads // len(k)
    q_KMC = q.unflatten(1, (-1, share)).transpose(0, 1).flatten(1, 2)
    if terms is not None:
        terms = terms.unflatten(0, (-1, share)) if len(terms) > 1 else terms[:, None].expand(-1, share, -1, -1)
        terms = terms.transpose(1, 2).flatten(1, 2)
    if look.softcap is None and q.device.type == "cpu":
        mask = None if terms is None else terms[None]
        out, total = (x[0] for x in _flash(q_KMC[None], k[None], v[None], attn_mask=mask, scale=look.scale))
    else:
        out, total = _written_out(q_KMC, k, v, terms, look)
    out = out.unflatten(1, (count, share)).transpose(0, 1).reshape(count, heads, width)
    return out, total.unflatten(1, (count, share)).transpose(0, 1).reshape(count, heads)


def _written_out(q: Tensor, k: Tensor, v: Tensor, terms: Tensor | None, look: Look) -> tuple[Tensor, Tensor]:
    """Attend from q [K, M, C] to k, v [K, T, C], some rows' scores at a time; also return the logsumexps [K, M]."""
    scale = q.shape[-1] ** -0.5 if look.scale is None else look.scale
    done: list[tuple[Tensor, Tensor]] = []
    for start in range(0, q.shape[1], _BLOCK):
        rows = slice(start, start + _BLOCK)
        scores = (q[:, rows] @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale
        if look.softcap is not None:
            scores = (scores / look.softcap).tanh() * look.softcap
        if terms is not None:
            scores = scores + terms[:, rows]
        total = scores.logsumexp(-1)
        done.append(((scores - total[..., None]).exp().to(v.dtype) @ v, total))
    mixed, totals = zip(*done, strict=True)
    return torch.cat(mixed, 1), torch.cat(totals, 1)


def _joined(found: Sequence[tuple[Tensor, Tensor]], parts: Tensor) -> Tensor:
    """Put together what rows have made of several pieces: a softmax over all, from those over each."""
    mixed, totals = (torch.cat(x) for x in zip(*found, strict=True))
    totals = torch.cat([totals, totals.new_full((1, totals.shape[1]), -math.inf)])  # of a piece that is not there
    shares = totals[parts].softmax(1)
    return (mixed[parts.clamp(max=len(mixed) - 1)] * shares[..., None]).sum(1).to(mixed.dtype)


def _gathered(q: Tensor, padded: _Padded, keys: Tensor, values: Tensor, look: Look) -> Tensor:
    """Return what one row each of n texts makes of its own cache, [n, H, C]."""
    q, k, v = q[padded.rows], keys[:, padded.slots], values[:, padded.slots]
    terms = _terms(padded.at, padded.places, look, True, q)
    if look.softcap is None:
        mask = terms.transpose(0, 1)[:, :, None].to(q.dtype)
        return sdpa(q[:, None], k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3), mask, look.scale)[:, 0]
    share = q.shape[1] // len(k)
    terms = terms.transpose(0, 1).expand(-1, q.shape[1], -1).reshape(-1, share, k.shape[2])
    rows = q.unflatten(1, (-1, share)).flatten(0, 1)
    k, v = (x.transpose(0, 1).flatten(0, 1) for x in (k, v))
    mixed, _ = _written_out(rows, k, v, terms, look)
    return mixed.view_as(q)
