"""Keep the book on a cache's blocks: who holds which, what each is known to hold, and which may be used again.

A cache is ``count`` blocks of ``size`` tokens each. A text's table lists the blocks that its tokens lie in, in order. A
full block can be sealed: it becomes a node of a radix tree whose edges are a block's tokens, and another text that
begins alike finds it there (as SGLang's RadixAttention does, arXiv 2312.07104, over the blocks of vLLM, arXiv
2309.06180). What a token's keys and values are depends on all tokens before it, so a block is only ever found behind
the very blocks that it was computed behind.

A block is free; or held by references; or idle: known, without a reference, and free as soon as its room is needed.
Whoever holds a block holds those before it in its table: take tables whole, and give them back whole or from the end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import islice
from typing import TypeAlias

from attrs import evolve, field, frozen

Ids: TypeAlias = tuple[int, ...]
Place: TypeAlias = tuple[Hashable, int | None]
"""Where a known block stands: below its root, and behind which block; None is the beginning of a text."""


@frozen
class Blocks:
    """Hold the whole book. Every function here returns a new one and leaves the old as it was.

    free: a byte a block, 1 where it is free. references: how many, of each block that is held. known: where each known
    block stands and what it holds. behind: the known blocks at each place, by what they hold. idle: the least recently
    used first, and of blocks that were given back together the last of the text first.
    """

    count: int
    size: int
    free: bytes = field(repr=False)
    references: Mapping[int, int]
    known: Mapping[int, tuple[Place, Ids]]
    behind: Mapping[Place, Mapping[Ids, int]]
    idle: Mapping[int, None]


@frozen
class Known:
    """Say how much of a text is in the cache.

    table: full blocks, in order. partial: a block that goes on as the text does, and for how many tokens; they are to
    be copied, for behind them it goes on otherwise. tokens: how many in all.
    Hold the table and the partial block before blocks are taken, which might be these.
    """

    table: tuple[int, ...]
    partial: tuple[int, int] | None
    tokens: int


def no_blocks(count: int, size: int) -> Blocks:
    """Return the book of ``count`` free blocks of ``size`` tokens. ValueError for less than one of either."""
    if count < 1 or size < 1:
        raise ValueError(f"{count} blocks of {size} tokens hold nothing; both must be at least 1")
    return Blocks(count, size, b"\1" * count, {}, {}, {}, {})


def free_count(blocks: Blocks) -> int:
    """Count the blocks that hold nothing."""
    return blocks.free.count(1)


def idle_count(blocks: Blocks) -> int:
    """Count the known blocks without a reference, which may be evicted."""
    return len(blocks.idle)


def known(blocks: Blocks, root: Hashable, ids: Sequence[int]) -> Known:
    """Find the longest beginning of a text that is in the cache below ``root``.

    root: what else keys and values depend on, such as the version of the parameters.
    """
    table: list[int] = []
    partial, last = None, None
    while (there := blocks.behind.get((root, last))) is not None:
        wanted = tuple(ids[len(table) * blocks.size :][: blocks.size])
        if wanted not in there:
            partial = _nearest(there, wanted)
            break
        last = there[wanted]
        table.append(last)
    return Known(tuple(table), partial, len(table) * blocks.size + (partial[1] if partial else 0))


def _nearest(there: Mapping[Ids, int], wanted: Ids) -> tuple[int, int] | None:
    """Return the block that begins most as ``wanted`` does, and for how many tokens; None where none begins so."""
    near = list(there)
    for shared, token in enumerate(wanted):
        closer = [held for held in near if held[shared] == token]
        if not closer:
            return (there[near[0]], shared) if shared else None
        near = closer
    return (there[near[0]], len(wanted)) if wanted else None


def hold(blocks: Blocks, table: Iterable[int]) -> Blocks:
    """Add a reference to each of these known or held blocks."""
    references, idle = dict(blocks.references), dict(blocks.idle)
    for block in table:
        assert not blocks.free[block], f"block {block} is free: nobody knows what it holds"
        references[block] = references.get(block, 0) + 1
        idle.pop(block, None)
    return evolve(blocks, references=references, idle=idle)


def take(blocks: Blocks, count: int, after: int | None = None) -> tuple[Blocks, tuple[int, ...]] | None:
    """Take fresh blocks, with one reference each; where too few are free, those least recently used are evicted.

    Memory that lies in a row is read without a copy: blocks behind ``after`` come first, then long free stretches.
    Returns None, and evicts nothing, where there are not enough.
    """
    missing = count - free_count(blocks)
    if missing > 0:
        if missing > len(blocks.idle):
            return None
        blocks = _without(blocks, set(islice(blocks.idle, missing)))
    free = bytearray(blocks.free)
    taken = _choose(free, count, after)
    references = {**blocks.references, **dict.fromkeys(taken, 1)}
    return evolve(blocks, free=bytes(free), references=references), tuple(taken)


def _choose(free: bytearray, count: int, after: int | None) -> list[int]:
    """Choose where fresh blocks lie, and strike them from ``free``: behind ``after``, else in the longest stretches.

    What lies before a stretch may be a text that grows into it: of a stretch that is not used up it keeps the half.
    """
    taken: list[int] = []

    def strike(start: int, stop: int) -> None:
        free[start:stop] = bytes(stop - start)
        taken.extend(range(start, stop))

    if after is not None:
        limit = min(after + 1 + count, len(free))
        end = free.find(0, after + 1, limit)
        strike(after + 1, limit if end < 0 else end)
    longest = sorted((run.span() for run in re.finditer(b"\1+", free)), key=lambda span: span[0] - span[1])
    for start, stop in longest if len(taken) < count else ():
        rest = count - len(taken)
        if rest < stop - start and start:
            start = min((start + stop) // 2, stop - rest)
        strike(start, min(stop, start + rest))
        if len(taken) == count:
            break
    return taken


def seal(blocks: Blocks, root: Hashable, table: Sequence[int], number: int, ids: Sequence[int]) -> Blocks:
    """Make a full block known: ``table[number]``, which holds its part of ``ids`` behind ``table[:number]``.

    It stays private, and whatever comes behind it, where another block is known to hold the same.
    """
    block, last = table[number], table[number - 1] if number else None
    place, held = (root, last), tuple(ids[number * blocks.size : (number + 1) * blocks.size])
    assert block in blocks.references, f"block {block} is not held by the text that fills it"
    assert len(held) == blocks.size, f"block {block} has {len(held)} of {blocks.size} tokens"
    assert blocks.known.get(block, (place, held)) == (place, held), f"block {block} is known to hold something else"
    there = blocks.behind.get(place, {})
    if held in there or (last is not None and last not in blocks.known):
        return blocks
    assert last is None or blocks.known[last][0][0] == root, f"block {last} is below another root than {root!r}"
    known = {**blocks.known, block: (place, held)}
    return evolve(blocks, known=known, behind={**blocks.behind, place: {**there, held: block}})


def drop(blocks: Blocks, table: Sequence[int]) -> Blocks:
    """Take a reference from each block. Those without any are idle where they are known, else free."""
    references, idle, free = dict(blocks.references), dict(blocks.idle), bytearray(blocks.free)
    for block in reversed(table):  # the end of a text goes before its beginning
        assert block in references, f"block {block} is given back, but nobody holds it"
        references[block] -= 1
        if references[block]:
            continue
        del references[block]
        if block in blocks.known:
            idle[block] = None
        else:
            free[block] = 1
    return evolve(blocks, references=references, idle=idle, free=bytes(free))


def forget(blocks: Blocks, keep: Callable[[Hashable], bool]) -> Blocks:
    """Unlearn all below the roots that are not kept. Idle blocks become free at once, others when they are dropped."""
    gone = {root for root, _ in blocks.behind if not keep(root)}
    return _without(blocks, {block for block, ((root, _), _) in blocks.known.items() if root in gone})


def _without(blocks: Blocks, gone: set[int]) -> Blocks:
    """Unlearn these blocks; those that are idle become free."""
    free, behind = bytearray(blocks.free), dict(blocks.behind)
    for place in {blocks.known[block][0] for block in gone}:
        left = {held: block for held, block in behind.pop(place).items() if block not in gone}
        if left:
            behind[place] = left
    assert not any(last in gone for _, last in behind), "what is known may not stay behind what is not"
    for block in gone & blocks.idle.keys():
        free[block] = 1
    return evolve(
        blocks,
        free=bytes(free),
        known={block: what for block, what in blocks.known.items() if block not in gone},
        behind=behind,
        idle={block: None for block in blocks.idle if block not in gone},
    )
