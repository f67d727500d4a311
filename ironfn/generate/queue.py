"""Decide what the next forward pass computes for which text: bookkeeping alone, without a tensor.

Texts come and go between two passes, and each pass takes one token of every text that is being continued and, as far as
its limit allows, a chunk of those whose prompts are still to be read (Yu et al. 2022, Orca; Agrawal et al. 2023,
arXiv 2308.16369). What other texts have computed already is found by `blocks.known`, also where they compute it in this
very pass: in every layer the keys and values are written before anything looks at them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from typing import Literal, TypeAlias

from attrs import evolve, field, frozen

from ironfn.generate.blocks import Blocks, drop, hold, known, seal, take
from ironfn.generate.sampling import Sampling

Reason: TypeAlias = Literal["stop", "length", "context", "memory"]
Copy: TypeAlias = tuple[int, int, int]
"""(first slot to read, first slot to write, tokens)."""


@frozen(kw_only=True)
class Request:
    """Ask for ``n`` continuations of a prompt of ids, each of ``limit`` new tokens at most.

    key: names the request in what comes back. stop: ids that end a continuation, themselves included. top: how many of
    the likeliest ids to tell with each token. The draws depend on (sampling.seed, stream, number of the continuation,
    number of the token) alone. ValueError for an empty prompt and for numbers below 1.
    """

    key: Hashable
    prompt: tuple[int, ...]
    limit: int
    sampling: Sampling = field(factory=Sampling)
    stop: frozenset[int] = frozenset()
    n: int = 1
    top: int = 0
    stream: tuple[int | str, ...] = ()

    def __attrs_post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("an empty prompt has nothing to continue; begin with the end-of-text id")
        for name, low in (("limit", 1), ("n", 1), ("top", 0)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} {getattr(self, name)} must be at least {low}")


@frozen
class Token:
    """Tell the next id of a continuation. log_prob: see `sampling.draw`. top: (id, log_prob), the likeliest first.

    experts: where the generator tells them, int16 [ids, layers with experts, choices]: with the first id those that
    computed the prompt, then those of the id before.
    """

    key: Hashable
    number: int
    id: int
    log_prob: float
    top: tuple[tuple[int, float], ...] = ()
    experts: bytes = b""


@frozen
class End:
    """Tell that a continuation is complete: an id of ``stop``, its limit, the model's context, or the cache's size."""

    key: Hashable
    number: int
    reason: Reason


Event: TypeAlias = Token | End


@frozen(eq=False)
class Row:
    """One text: what is known of it, and where its keys and values lie.

    ids: the prompt and what followed it. table: its blocks. cached: how many of the ids are in them. root: whose
    blocks these are. forks: the further continuations that begin where the prompt ends.
    """

    request: Request
    ids: tuple[int, ...]
    number: int = 0
    forks: int = 0
    table: tuple[int, ...] = ()
    cached: int = 0
    root: Hashable = None

    @property
    def left(self) -> int:
        """Return how many ids are still to be computed."""
        return len(self.ids) - self.cached


@frozen
class Limits:
    """Bound one forward pass. rows: texts that are computed at a time. tokens: of all of them together."""

    rows: int = 32
    tokens: int = 512


@frozen
class Queue:
    """Hold every text and the blocks: a value, of which each function here returns the next.

    running: texts with blocks, the oldest first. copies: what has to be copied before the next pass.
    """

    blocks: Blocks
    waiting: tuple[Row, ...] = ()
    running: tuple[Row, ...] = ()
    copies: tuple[Copy, ...] = ()


@frozen
class Work:
    """Say what a pass computes: of each row, in the order of ``rows``, so many ids from ``cached`` on.

    copies: tokens to copy first. ended: what found no room in the cache.
    """

    rows: tuple[Row, ...]
    counts: tuple[int, ...]
    copies: tuple[Copy, ...]
    ended: tuple[End, ...] = ()


Root: TypeAlias = Callable[[int], Hashable]
"""From a text's length to the root of the blocks that it can read."""


def submit(queue: Queue, request: Request) -> Queue:
    """Return the queue with a request at its end. ValueError for a prompt that the cache could never hold."""
    room = queue.blocks.count * queue.blocks.size
    if len(request.prompt) > room:
        raise ValueError(
            f"a prompt of {len(request.prompt)} tokens does not fit the cache of {room}; give it more memory"
        )
    return evolve(queue, waiting=(*queue.waiting, Row(request, request.prompt, forks=request.n - 1)))


def cancel(queue: Queue, key: Hashable, number: int | None = None) -> Queue:
    """Return the queue without a request, or without one of its continuations that has begun; it may be gone."""

    def meant(row: Row) -> bool:
        return row.request.key == key and (number is None or (row.number == number and not row.forks))

    blocks = queue.blocks
    for row in queue.running:
        if meant(row):
            blocks = drop(blocks, row.table)
    waiting, running = (tuple(r for r in rows if not meant(r)) for rows in (queue.waiting, queue.running))
    return evolve(queue, blocks=blocks, waiting=waiting, running=running)


def plan(queue: Queue, limits: Limits, root: Root) -> tuple[Queue, Work]:
    """Choose what the next pass computes, and give it its blocks.

    First come the texts that want one token, then the chunks of those that are being read, then new ones. Where no
    block is left, the youngest text gives up its own and waits: what it has said stays, and is read again later.
    """
    draft = _Draft(queue, limits, root)
    for row in sorted(queue.running, key=lambda row: row.left > 1):  # stable: the oldest first
        if row in draft.running:
            draft.go_on(row)
    while draft.admit():
        pass
    return draft.done()


class _Draft:
    """Build the next queue, seen by `plan` alone."""

    def __init__(self, queue: Queue, limits: Limits, root: Root) -> None:
        self.blocks, self.running, self.waiting = queue.blocks, list(queue.running), list(queue.waiting)
        self.copies, self.root = list(queue.copies), root
        self.tokens, self.rows = limits.tokens, limits.rows
        self.work: list[tuple[Row, int]] = []
        self.fresh: set[int] = set()
        self.ended: list[End] = []

    def go_on(self, row: Row) -> None:
        """Compute what is left of a running row, or a part of it."""
        if row.root != self.root(len(row.ids)):  # its keys were turned by the angles of a shorter text
            self.step_back(row)
            return
        count = min(row.left, self.tokens)
        if count == 0:
            return
        while (wide := self.widened(row, row.cached + count)) is None:
            if len(self.running) == 1:
                self.end(row)
                return
            worked = [other for other, _ in self.work]
            youngest = [other for other in self.running if other not in worked][-1]
            self.step_back(youngest)
            if youngest is row:
                return
        self.running[self.running.index(row)] = wide
        self.compute(wide, count)

    def widened(self, row: Row, tokens: int) -> Row | None:
        """Return the row with blocks for so many tokens; None where there are none."""
        lacking = -(-tokens // self.blocks.size) - len(row.table)
        if lacking <= 0:
            return row
        taken = take(self.blocks, lacking, row.table[-1] if row.table else None)
        if taken is None:
            return None
        self.blocks, new = taken
        return evolve(row, table=(*row.table, *new))

    def compute(self, row: Row, count: int) -> None:
        """Put a row into the pass, and let others find the blocks that it fills."""
        self.work.append((row, count))
        self.tokens -= count
        size = self.blocks.size
        full = range(row.cached // size, (row.cached + count) // size)
        if full:
            self.blocks = seal(self.blocks, row.root, row.table, full, row.ids)
            self.fresh.update(row.table[number] for number in full)

    def step_back(self, row: Row) -> None:
        """Take a row's blocks away and let it wait, first in line."""
        self.blocks = drop(self.blocks, row.table)
        self.running.remove(row)
        self.waiting.insert(0, evolve(row, table=(), cached=0))

    def end(self, row: Row) -> None:
        """Give a row up that has all the cache to itself and still too little."""
        self.blocks = drop(self.blocks, row.table)
        self.running.remove(row)
        self.ended += [End(row.request.key, row.number + more, "memory") for more in range(row.forks + 1)]

    def admit(self) -> bool:
        """Let the first of the waiting in, with all the blocks that its ids want; tell whether there was room."""
        if not self.waiting or not self.tokens or len(self.running) >= self.rows:
            return False
        row, before = self.waiting[0], self.blocks
        root = self.root(len(row.ids))
        found = known(before, root, row.ids[:-1])  # the last id is always computed: what follows it is wanted
        self.blocks = hold(before, found.table)
        table, cached = found.table, len(found.table) * before.size
        wide = self.widened(evolve(row, root=root, table=table), len(row.ids))
        if wide is None:
            self.blocks = before
            if not self.running:
                self.waiting.pop(0)
                self.running.append(row)
                self.end(row)
            return False
        if found.partial is not None and found.partial[0] not in self.fresh:  # what this pass writes is not there yet
            block, tokens = found.partial
            self.copies.append((block * before.size, wide.table[len(table)] * before.size, tokens))
            cached += tokens
        self.waiting.pop(0)
        self.running.append(evolve(wide, cached=cached))
        self.compute(self.running[-1], min(self.running[-1].left, self.tokens))
        return True

    def done(self) -> tuple[Queue, Work]:
        """Return what has become of it."""
        rows, counts = zip(*self.work, strict=True) if self.work else ((), ())
        queue = Queue(self.blocks, tuple(self.waiting), tuple(self.running))
        copies = {copy[1]: copy for copy in self.copies}  # a block that was given up and taken again wants the last
        return queue, Work(rows, counts, tuple(copies.values()), tuple(self.ended))


def absorb(
    queue: Queue, work: Work, drawn: Sequence[Sequence[int]], limits: Limits, context: int
) -> tuple[Queue, tuple[End, ...]]:
    """Return the queue after a pass, and which continuations it has completed.

    drawn: for each row of the work whose ids are now all computed, in order, the next id of each of its continuations.
    context: how many ids the model can take.
    """
    size, blocks, draws = queue.blocks.size, queue.blocks, iter(drawn)
    after: dict[Row, list[Row]] = {}
    copies: list[Copy] = []
    for row, count in zip(work.rows, work.counts, strict=True):
        cached = row.cached + count
        if cached < len(row.ids):
            after[row] = [evolve(row, cached=cached)]
            continue
        ids = [(*row.ids, new) for new in next(draws)]
        after[row] = [evolve(row, ids=ids[0], cached=cached, forks=0)]
        whole, part = divmod(cached, size)
        for number, each in enumerate(ids[1:], 1):
            held = hold(blocks, row.table[:whole])
            taken = take(held, 1) if part else (held, ())
            fork = Row(row.request, each, number)  # without blocks it waits, and finds what it shares again
            if taken is not None and len(queue.running) + sum(map(len, after.values())) - len(after) < limits.rows:
                blocks, new = taken
                copies += [(row.table[whole] * size, block * size, part) for block in new]
                fork = evolve(fork, table=(*row.table[:whole], *new), cached=cached, root=row.root)
            after[row].append(fork)
    running: list[Row] = []
    waiting: list[Row] = []
    ended: list[End] = []
    for row in chain.from_iterable(after.get(row, [row]) for row in queue.running):
        reason = _reason(row, context)
        if reason is not None:
            blocks = drop(blocks, row.table)
            ended.append(End(row.request.key, row.number, reason))
        else:
            (running if row.table else waiting).append(row)
    return Queue(blocks, (*waiting, *queue.waiting), tuple(running), tuple(copies)), tuple(ended)


def _reason(row: Row, context: int) -> Reason | None:
    """Return why a row is complete, None where it is not."""
    new = len(row.ids) - len(row.request.prompt)
    if new == 0:
        return None
    if row.ids[-1] in row.request.stop:
        return "stop"
    if new == row.request.limit:
        return "length"
    return "context" if len(row.ids) > context else None
