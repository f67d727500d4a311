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

_RESERVE = 16
"""What part of all blocks is kept free as long as others are idle. With a full cache of 4,000 blocks and 32 texts of
500 to 770 tokens, a text lies in 3 stretches so, and in 11 where nothing is kept."""


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
    """Take fresh blocks, with one reference each; None, and nothing is evicted, where there are not enough.

    Memory that lies in a row is read without a copy. So blocks behind ``after`` come first, then long free stretches;
    and before there are none, many of the idle blocks are evicted at once, those least recently used.
    """
    free, reserve = free_count(blocks), blocks.count // _RESERVE
    if count > free + len(blocks.idle):
        return None
    if count + reserve > free:
        blocks = _without(blocks, islice(blocks.idle, max(0, count + 2 * reserve - free)))
    taken = _choose(blocks, count, after)
    left = bytearray(blocks.free)
    for block in taken:
        left[block] = 0
    return evolve(blocks, free=bytes(left), references={**blocks.references, **dict.fromkeys(taken, 1)}), taken


def _choose(blocks: Blocks, count: int, after: int | None) -> tuple[int, ...]:
    """Choose free blocks: those behind ``after``, else the longest stretches.

    A text that may yet grow and the one that comes behind it share what room there is.
    """
    free, taken = blocks.free, list[int]()
    if after is not None:
        limit = min(after + 1 + count, len(free))
        end = free.find(0, after + 1, limit)
        taken += range(after + 1, limit if end < 0 else end)
    if len(taken) == count:
        return tuple(taken)
    stretches = [run.span() for run in re.finditer(b"\1+", free)]
    for start, stop in sorted(stretches, key=lambda span: span[0] - span[1]):
        rest = count - len(taken)
        if start - 1 == after:  # taken
            continue
        if rest < stop - start and start - 1 in blocks.references:
            start += (stop - start - rest) // 2
        taken += range(start, min(stop, start + rest))
        if len(taken) == count:
            break
    return tuple(taken)


def seal(blocks: Blocks, root: Hashable, table: Sequence[int], numbers: Iterable[int], ids: Sequence[int]) -> Blocks:
    """Make full blocks known: the ``numbers`` of a table, in order, which hold their parts of ``ids``.

    A block stays private, and whatever comes behind it, where another is known to hold the same.
    """
    known, behind = dict(blocks.known), dict(blocks.behind)
    for number in numbers:
        block, last = table[number], table[number - 1] if number else None
        place, held = (root, last), tuple(ids[number * blocks.size : (number + 1) * blocks.size])
        assert block in blocks.references, f"block {block} is not held by the text that fills it"
        assert len(held) == blocks.size, f"block {block} has {len(held)} of {blocks.size} tokens"
        assert known.get(block, (place, held)) == (place, held), f"block {block} is known to hold something else"
        there = behind.get(place, {})
        if held in there or (last is not None and last not in known):
            continue
        assert last is None or known[last][0][0] == root, f"block {last} is below another root than {root!r}"
        known[block], behind[place] = (place, held), {**there, held: block}
    return evolve(blocks, known=known, behind=behind)


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
    return _without(blocks, [block for block, ((root, _), _) in blocks.known.items() if root in gone])


def _without(blocks: Blocks, gone: Iterable[int]) -> Blocks:
    """Unlearn these blocks, behind which no other is left; those that are idle become free."""
    free, idle = bytearray(blocks.free), dict(blocks.idle)
    known, behind = dict(blocks.known), dict(blocks.behind)
    left: dict[Place, dict[Ids, int]] = {}
    for block in gone:
        place, held = known.pop(block)
        if place not in left:
            left[place] = dict(behind.pop(place))
        del left[place][held]
        if block in idle:
            del idle[block]
            free[block] = 1
    behind |= {place: there for place, there in left.items() if there}
    assert all(last is None or last in known for _, last in behind), "a block is behind one that is not known any more"
    return evolve(blocks, free=bytes(free), known=known, behind=behind, idle=idle)
