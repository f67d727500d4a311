"""Attend within one document a row, at the cost of what is seen: no mask of a long row is ever made.

Shapes: q [rows, length, heads, head_dim]; k, v [rows, length, kv_heads, head_dim]; the result is shaped like q.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Look(NamedTuple):
    """Say how heads weigh what they see. A tuple, because a compiler follows its making into the forward pass.

    scale: of the scores; None is 1 / sqrt(head_dim). window: how many positions are seen, the own included; 0 is all.
    softcap: c of c tanh(score / c). slopes: of ALiBi, [heads], this rank's. layer: the block's number, for a cache.
    """

    scale: float | None = None
    window: int = 0
    softcap: float | None = None
    slopes: Tensor | None = None
    layer: int = 0

    @property
    def plain(self) -> bool:
        """Tell whether this is what torch's kernels do by themselves."""
        return self.scale is None and not self.window and self.softcap is None and self.slopes is None


PLAIN = Look()


def alibi_slopes(heads: int) -> list[float]:
    """Return each head's slope (Press et al. 2021, arXiv 2108.12409, and its code where heads is no power of two).

    >>> alibi_slopes(4)
    [0.25, 0.0625, 0.015625, 0.00390625]
    >>> alibi_slopes(3)
    [0.0625, 0.00390625, 0.25]
    """
    below = 1 << (heads.bit_length() - 1)
    first, more = ([2.0 ** (-8.0 * (i + 1) / count) for i in range(count)] for count in (below, 2 * below))
    return first + more[::2][: heads - below]


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    """Attend by torch's kernel: causally, or under a mask [rows or 1, heads or 1, length, keys], bools or terms."""
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=k.shape[2] != q.shape[2],
    )
    return out.transpose(1, 2)


def causal(q: Tensor, k: Tensor, v: Tensor, look: Look = PLAIN) -> Tensor:
    """Attend over whole rows."""
    if look.plain:
        return sdpa(q, k, v)
    window = look.window if look.window < q.shape[1] else 0
    width = q.shape[3]
    scale = width**-0.5 if look.scale is None else look.scale
    if look.softcap is not None:
        return _Capped.apply(q, k, v, scale, window, look.softcap)  # pyright: ignore[reportReturnType]
    if look.slopes is not None:
        q, k, v = _with_slopes(q, k, v, look.slopes / scale)
    mixed = _windowed(q, k, v, window, scale) if window else sdpa(q, k, v, scale=scale)
    return mixed[..., :width]


def _with_slopes(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Write ALiBi into queries and keys, as products of their own.

    A softmax does not see what all keys have in common, so slope times the key's place is as good as times the
    distance. The place is in two parts that bfloat16 holds exactly. Kernels want widths by eight, and all three alike.
    """
    place = torch.arange(k.shape[1], device=k.device)
    of_key = F.pad(torch.stack([place // 256, place % 256], -1).to(k.dtype), (0, 6))
    of_query = F.pad(torch.stack([slopes * 256, slopes], -1).to(q), (0, 6))
    return (
        torch.cat([q, of_query.expand(*q.shape[:3], 8)], -1),
        torch.cat([k, of_key[:, None].expand(*k.shape[:3], 8)], -1),
        F.pad(v, (0, 8)),
    )


def _in_window(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Return the bool mask [queries, keys] of the last ``queries`` places on the last ``keys``; window 0 is all."""
    ago = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return (ago >= 0) & (ago < window) if window else ago >= 0


def _windowed(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
    """Attend block by block, each to the blocks that its window reaches."""
    size = min(max(window // 4, 64), 512)
    back = math.ceil((window - 1) / size)
    queries, keys, values = (x.split(size, 1) for x in (q, k, v))
    mixed: list[Tensor] = []
    for i, block in enumerate(queries):
        near = slice(max(0, i - back), i + 1)
        seen = torch.cat(keys[near], 1)
        mask = _in_window(block.shape[1], seen.shape[1], window, q.device)
        mixed.append(sdpa(block, seen, torch.cat(values[near], 1), mask, scale))
    return torch.cat(mixed, 1)


class _Capped(torch.autograd.Function):
    """(q, k, v, scale, window, cap) -> mixed v under capped scores, which exist for one block of queries at a time."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, cap: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        out = _by_head(torch.empty_like(q), k.shape[2])
        v = v.transpose(1, 2)
        for rows, columns, shares, _ in _capped_blocks(q, k, scale, window, cap):
            mixed = shares.flatten(2, 3).to(v.dtype) @ v[:, :, columns]
            out[:, :, :, rows] = mixed.unflatten(2, shares.shape[2:4])
        return out.flatten(1, 2).transpose(1, 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        q, k, v, *ctx.how = inputs
        ctx.save_for_backward(q, k, v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v = ctx.saved_tensors
        scale = ctx.how[0]
        heads = _by_head(q, k.shape[2])
        q_grad, k_grad, v_grad = torch.zeros_like(heads), *(torch.zeros_like(x.transpose(1, 2)) for x in (k, v))
        grad, keys, values = _by_head(grad, k.shape[2]), k.transpose(1, 2), v.transpose(1, 2)
        for rows, columns, shares, tanh in _capped_blocks(q, k, *ctx.how):
            of_out, shape = grad[:, :, :, rows].flatten(2, 3), shares.shape[2:4]
            v_grad[:, :, columns] += shares.flatten(2, 3).to(v.dtype).mT @ of_out
            of_shares = (of_out @ values[:, :, columns].mT).unflatten(2, shape).to(shares.dtype)
            of_scores = shares * (of_shares - (shares * of_shares).sum(-1, keepdim=True))
            of_scores = (of_scores * (1 - tanh * tanh) * scale).flatten(2, 3).to(q.dtype)
            q_grad[:, :, :, rows] = (of_scores @ keys[:, :, columns]).unflatten(2, shape)
            k_grad[:, :, columns] += of_scores.mT @ heads[:, :, :, rows].flatten(2, 3)
        return q_grad.flatten(1, 2).transpose(1, 2), k_grad.transpose(1, 2), v_grad.transpose(1, 2), None, None, None


def _by_head(q: Tensor, kv_heads: int) -> Tensor:
    """Return queries as [rows, kv_heads, sharing heads, length, head_dim]."""
    return q.transpose(1, 2).unflatten(1, (kv_heads, -1))


def _capped_blocks(
    q: Tensor, k: Tensor, scale: float, window: int, cap: float
) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Yield for each block of queries its places, those it sees, the probabilities, and the tanh of its scores."""
    heads, keys, size = _by_head(q, k.shape[2]), k.transpose(1, 2), 128
    high = torch.promote_types(q.dtype, torch.float32)
    for start in range(0, q.shape[1], size):
        stop = min(start + size, q.shape[1])
        rows, columns = slice(start, stop), slice(max(0, start - window + 1) if window else 0, stop)
        block = heads[:, :, :, rows]
        tanh = (block.flatten(2, 3) @ keys[:, :, columns].mT).to(high).mul_(scale / cap).tanh_()
        tanh = tanh.unflatten(2, block.shape[2:4])
        mask = _in_window(stop - start, columns.stop - columns.start, window, q.device)
        yield rows, columns, (tanh * cap).masked_fill_(~mask, -math.inf).softmax(-1), tanh
