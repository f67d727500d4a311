"""Hold the keys and values of tokens in slots, ``size`` of them a block; `generate.blocks` says whose they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from ironfn import pages
from ironfn.mesh.axis import Mesh
from ironfn.model.arch import Arch


@frozen(eq=False)
class Pool:
    """Hold a cache's tensors: one a layer, [kv_heads of this rank, slots, head_dim].

    A token at place p of block b is in slot b * size + p. Heads come first because each reads a text's slots alone:
    from memory that lies together it does so up to twice as fast.
    experts: int16 [slots, layers with experts, choices], which experts computed them; None where nobody asks.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    experts: Tensor | None = None


def make_pool(
    arch: Arch,
    count: int,
    size: int,
    mesh: Mesh,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    routes: bool = False,
) -> Pool:
    """Return a pool of ``count`` blocks of ``size`` tokens. routes: it remembers their experts as well.

    It is of zeros, because a masked product with what happens to lie in memory may be no number; and in large pages,
    because a text's keys are a piece of each head.
    """
    heads, width = _heads(arch, mesh)
    shape = (heads, count * size, width)
    keys, values = (tuple(pages.zeros(shape, dtype, device) for _ in range(arch.layers)) for _ in range(2))
    experts = None
    if routes:
        assert arch.moe is not None, "a model that chooses experts"
        shape = (count * size, len(arch.expert_layers), arch.moe.top_k)
        experts = torch.zeros(shape, dtype=torch.int16, device=device)
    return Pool(keys, values, experts)


def _heads(arch: Arch, mesh: Mesh) -> tuple[int, int]:
    """Return the shape of a token's keys in one layer on this rank."""
    return arch.kv_heads // mesh.tp.size, arch.head_dim


def token_bytes(arch: Arch, mesh: Mesh, dtype: torch.dtype) -> int:
    """Return the bytes of a token's keys and values in all layers, on one rank."""
    heads, width = _heads(arch, mesh)
    return 2 * arch.layers * heads * width * dtype.itemsize


def blocks_within(budget: int, arch: Arch, size: int, mesh: Mesh, dtype: torch.dtype) -> int:
    """Return how many blocks of ``size`` tokens fit a budget in bytes. ValueError where not even one does."""
    one = size * token_bytes(arch, mesh, dtype)
    if budget < one:
        raise ValueError(f"a cache of {budget} bytes holds no block of {size} tokens; give it at least {one}")
    return budget // one


def copy_tokens(pool: Pool, copies: Sequence[tuple[int, int, int]]) -> Pool:
    """Copy (from slot, to slot, tokens) in every layer, all at once, in the buffers of ``pool`` (donated)."""
    if not copies:
        return pool
    device = pool.keys[0].device
    source, target = (
        torch.cat([torch.arange(copy[end], copy[end] + copy[2]) for copy in copies]).to(device) for end in (0, 1)
    )
    for x in (*pool.keys, *pool.values):
        x.index_copy_(1, target, x.index_select(1, source))
    if pool.experts is not None:
        pool.experts.index_copy_(0, target, pool.experts.index_select(0, source))
    return pool


def slots(table: Sequence[int], size: int, first: int, stop: int) -> list[int]:
    """Return the slots of a text's places from ``first`` to before ``stop``.

    >>> slots((3, 9), 16, 15, 17)
    [63, 144]
    """
    return [table[place // size] * size + place % size for place in range(first, stop)]


def stretches(table: Sequence[int], size: int, length: int) -> tuple[tuple[int, int], ...]:
    """Return (first slot, slot behind the last) of each run of slots in which a text's ``length`` tokens lie.

    >>> stretches((3, 4, 9), 16, 40)
    ((48, 80), (144, 152))
    """
    found: list[tuple[int, int]] = []
    for number, start in enumerate(range(0, length, size)):
        first = table[number] * size
        stop = first + min(size, length - start)
        if found and found[-1][1] == first:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((first, stop))
    return tuple(found)
