"""The book on a cache's blocks, held to a model that is too simple to be wrong, over any history.

The model's memory holds in each slot what a real one's keys and values depend on: the root, and the text up to there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from itertools import pairwise
from typing import Any

from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ironfn.generate.blocks import (
    Blocks,
    drop,
    forget,
    free_count,
    hold,
    idle_count,
    known,
    no_blocks,
    seal,
    take,
)
from ironfn.generate.cache import stretches
from ironfn.model.shared import common

ROOTS = st.sampled_from(["plain", ("lora", 1)])
TOKENS = st.integers(0, 1)
Prefix = tuple[Hashable, tuple[int, ...]]


@define(eq=False)
class Text:
    """A request: its root, its ids, where they lie, how many of its blocks were sealed, and if it is late with that."""

    root: Hashable
    late: bool = False
    ids: list[int] = field(factory=list)
    table: list[int] = field(factory=list)
    sealed: int = 0

    def upto(self, length: int) -> Prefix:
        return self.root, tuple(self.ids[:length])


def picture(blocks: Blocks) -> tuple[bytes, str]:
    return blocks.free, repr(blocks)


class Book(RuleBasedStateMachine):
    @initialize(count=st.integers(1, 36), size=st.sampled_from([2, 1, 3]))
    def begin(self, count: int, size: int) -> None:
        self.blocks, self.count, self.size = no_blocks(count, size), count, size
        self.memory: list[Prefix | None] = [None] * (count * size)
        self.texts: list[Text] = []
        self.known: dict[Prefix, int] = {}
        self.idle: list[Prefix] = []

    def do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        before = picture(self.blocks)
        result = function(self.blocks, *arguments)
        assert picture(self.blocks) == before, "a function wrote into the book that it was given"
        return result

    def slot(self, text: Text, number: int) -> int:
        return text.table[number // self.size] * self.size + number % self.size

    # what the book ought to say

    def idles(self) -> list[Prefix]:
        """Return the known blocks that no text holds, in the order in which they fell idle."""
        held = {block for text in self.texts for block in text.table}
        fell = [prefix for prefix, block in self.known.items() if block not in held and prefix not in self.idle]
        fell.sort(key=lambda prefix: -len(prefix[1]))  # in one step: all of one text, whose end goes first
        self.idle = [prefix for prefix in self.idle if prefix in self.known and self.known[prefix] not in held] + fell
        return self.idle

    def evict(self, count: int) -> None:
        for _ in range(count):
            first = next(
                (root, ids) for root, ids in self.idle
                if not any(r == root and len(i) > len(ids) and i[: len(ids)] == ids for r, i in self.known)
            )  # fmt: skip
            self.idle.remove(first)
            del self.known[first]

    def take(self, text: Text, length: int) -> bool:
        """Give a text the blocks that its first ``length`` tokens still need, if there are enough."""
        need = -(-length // self.size) - len(text.table)
        free, idle = free_count(self.blocks), len(self.idles())
        taken = self.do(take, need, text.table[-1] if text.table else None)
        assert (taken is None) == (need > free + idle)
        if taken is None:
            return False
        if need + self.count // 16 > free:
            self.evict(min(max(0, need + 2 * (self.count // 16) - free), idle))
        self.blocks, fresh = taken
        assert len(set(fresh)) == need
        text.table += fresh
        return True

    def write(self, text: Text, ids: list[int]) -> None:
        for token in ids:
            text.ids.append(token)
            self.memory[self.slot(text, len(text.ids) - 1)] = text.upto(len(text.ids))
        if not text.late:
            self.seal(text)

    def copy(self, text: Text, block: int, ids: list[int]) -> None:
        """Write ids by copying what is in a block."""
        for place, token in enumerate(ids):
            text.ids.append(token)
            self.memory[self.slot(text, len(text.ids) - 1)] = self.memory[block * self.size + place]

    def seal(self, text: Text) -> None:
        """Make the full blocks of a text known, unless others are or what is before them is private."""
        numbers = range(text.sealed, len(text.ids) // self.size)
        self.blocks = self.do(seal, text.root, text.table, numbers, text.ids)
        for number in numbers:
            before, prefix = text.upto(number * self.size), text.upto((number + 1) * self.size)
            if number == 0 or self.known.get(before) == text.table[number - 1]:
                self.known.setdefault(prefix, text.table[number])
            text.sealed = number + 1

    def drop(self, table: list[int]) -> None:
        self.blocks = self.do(drop, table)

    # what may happen

    @rule(root=ROOTS, ids=st.lists(TOKENS, min_size=1, max_size=10), late=st.booleans())
    def enter(self, root: Hashable, ids: list[int], late: bool) -> None:
        """A request enters: it finds what is known, copies what is partly so and computes the rest."""
        found, text = self.do(known, root, ids), Text(root, late)
        full = 0
        while (root, tuple(ids[: (full + 1) * self.size])) in self.known and (full + 1) * self.size <= len(ids):
            full += 1
        assert found.table == tuple(self.known[root, tuple(ids[: (n + 1) * self.size])] for n in range(full))
        after, rest = tuple(ids[: full * self.size]), ids[full * self.size :]
        near = {
            block: common([i, ids]) - len(after) for (r, i), block in self.known.items()
            if r == root and len(i) == len(after) + self.size and i[: len(after)] == after
        }  # fmt: skip
        best = max(near.values(), default=0)
        assert found.tokens == len(after) + best
        assert near[found.partial[0]] == found.partial[1] == best if found.partial else best == 0
        table = [*found.table]
        partial = [found.partial[0]] if found.partial else []
        self.blocks = self.do(hold, table + partial)
        holds = Text(root, table=partial)
        self.texts += [text, holds]
        text.ids, text.table, text.sealed = [*after], table, len(table)
        entered = self.take(text, len(ids))
        if entered:
            self.copy(text, partial[0] if partial else -1, rest[:best])
            self.write(text, rest[best:])
        self.texts.remove(holds)
        self.drop(partial)
        self.idles()
        if not entered:
            self.texts.remove(text)
            self.drop(table)
        self.idles()

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), ids=st.lists(TOKENS, min_size=1, max_size=9))
    def grow(self, data: st.DataObject, ids: list[int]) -> None:
        text = data.draw(st.sampled_from(self.texts))
        if self.take(text, len(text.ids) + len(ids)):
            self.write(text, ids)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """Another completion of the same beginning: full blocks are shared, the last is copied."""
        text = data.draw(st.sampled_from(self.texts))
        full = len(text.ids) // self.size
        other = Text(text.root, True, text.ids[: full * self.size], text.table[:full], min(text.sealed, full))
        self.blocks = self.do(hold, other.table)
        self.texts.append(other)
        if self.take(other, len(text.ids)):
            self.copy(other, text.table[-1], text.ids[full * self.size :])
        elif not full:
            self.texts.remove(other)

    @precondition(lambda self: self.texts)
    @rule()
    def catch_up(self) -> None:
        for text in self.texts:
            self.seal(text)

    @precondition(lambda self: self.texts)
    @rule()
    def end_all(self) -> None:
        for text in [*self.texts]:
            self.texts.remove(text)
            self.drop(text.table)
            self.idles()

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A request ends, or is put back to a part of what it was."""
        text = data.draw(st.sampled_from(self.texts))
        kept = data.draw(st.integers(0, max(0, len(text.table) - 1)))
        rest, text.table = text.table[kept:], text.table[:kept]
        del text.ids[kept * self.size :]
        text.sealed = min(text.sealed, kept)
        if not kept:
            self.texts.remove(text)
        self.drop(rest)
        self.idles()

    @precondition(lambda self: self.known)
    @rule(kept=ROOTS.map(lambda root: {root}))
    def change(self, kept: set[Hashable]) -> None:
        """Parameters change: what was computed with the old is not found again."""
        self.blocks = self.do(forget, lambda root: root in kept)
        self.known = {prefix: block for prefix, block in self.known.items() if prefix[0] in kept}

    # what always holds

    @invariant()
    def every_text_reads_its_own(self) -> None:
        for text in self.texts:
            slots = [slot for run in stretches(text.table, self.size, len(text.ids)) for slot in range(*run)]
            assert [self.memory[slot] for slot in slots] == [text.upto(n + 1) for n in range(len(text.ids))]

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        held, b = Counter(block for text in self.texts for block in text.table), self.blocks
        assert dict(b.references) == held
        assert list(b.idle) == [self.known[prefix] for prefix in self.idles()]
        assert idle_count(b) == len(self.idle)
        free = set(range(self.count)) - set(held) - set(self.known.values())
        assert {block for block in range(self.count) if b.free[block]} == free
        assert len(b.free) == self.count
        assert free_count(b) == len(free)

    @invariant()
    def every_known_block_is_found_and_holds_what_it_says(self) -> None:
        assert self.blocks.known.keys() == set(self.known.values())
        assert sum(map(len, self.blocks.behind.values())) == len(self.known)
        for (root, ids), block in self.known.items():
            found = known(self.blocks, root, ids)
            assert (found.table[-1], found.tokens) == (block, len(ids))
            slots = range(block * self.size, (block + 1) * self.size)
            assert [self.memory[slot] for slot in slots] == [
                (root, ids[: n + 1]) for n in range(len(ids) - self.size, len(ids))
            ]

    def teardown(self) -> None:
        if not hasattr(self, "texts"):
            return
        for text in self.texts:
            self.drop(text.table)
        assert not self.blocks.references
        assert free_count(self.blocks) + idle_count(self.blocks) == self.count
        everything = self.do(take, self.count)
        assert everything is not None
        assert sorted(everything[1]) == list(range(self.count))
        assert [everything[0].known, everything[0].behind, everything[0].idle] == [{}, {}, {}]


def test_no_block_is_lost_given_back_twice_or_shared_wrongly() -> None:
    run_state_machine_as_test(Book, settings=settings(max_examples=150, stateful_step_count=40))


@settings(max_examples=100)
@given(st.integers(2, 20), st.lists(st.booleans(), max_size=24), st.booleans())
def test_texts_that_grow_side_by_side_lie_in_a_row_while_there_is_room(
    quarter: int, turns: list[bool], full: bool
) -> None:
    """Also where the last block of a text is full when another text comes."""
    blocks, tables = no_blocks(4 * quarter, 1), ([], [])
    for turn in turns:
        table = tables[turn]
        if len(table) < quarter:
            taken = take(blocks, 1, table[-1] if table else None)
            assert taken is not None
            blocks, fresh = taken
            table += fresh
            if full:
                blocks = seal(blocks, "root", table, [len(table) - 1], [int(turn)] * len(table))
    for table in tables:
        assert len(stretches(table, 1, len(table))) == (len(table) > 0)


@given(st.permutations(range(9)), st.integers(1, 5), st.data())
def test_stretches_are_the_slots_in_order_and_cannot_be_joined(
    table: list[int], size: int, data: st.DataObject
) -> None:
    length = data.draw(st.integers(0, len(table) * size))
    found = stretches(table, size, length)
    assert [slot for run in found for slot in range(*run)] == [
        table[n // size] * size + n % size for n in range(length)
    ]
    assert all(one[1] != other[0] for one, other in pairwise(found))
