"""Cut rows from token stores. A batch is a function of (dataset, seed, step), and of nothing else.

How rows are cut. A store is one stream of ids in which each document is closed by the end id. Every id is a target
once an epoch, the first of a document and its end id included: the input of a target is the id before it, and before
a document stands the end id of the one before (for the first document, one that is supplied). So the end id serves as
every document's start, and no document's last id ever predicts another's first. Window w holds the targets
[w * length, (w + 1) * length); the last one is filled up with weight 0 and segment -1. Nothing is dropped.
Supervised texts are laid into rows instead, see `packed`: there a window is a row of several texts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray
from torch import Tensor

from ironfn.data import order
from ironfn.data.packed import Arrays, PackedStore, cut_packs
from ironfn.data.pairs import PairStore, cut_pairs
from ironfn.data.store import TokenStore
from ironfn.types import Batch


@frozen(eq=False)
class Dataset:
    """Hold one split of every set, and how rows are drawn from them.

    shares: each set's share of the rows. byte_lengths: int32 [vocab_size], the bytes of text that an id stands for.
    tokenizer: the tokenizer.json. checksum: changes when any store or the tokenizer does.
    """

    names: tuple[str, ...]
    stores: tuple[TokenStore, ...]
    shares: tuple[float, ...]
    length: int
    attend: Literal["document", "row"]
    shuffle: bool
    vocab_size: int
    eos: int
    byte_lengths: Tensor
    tokenizer: Path
    checksum: int

    @property
    def tokens(self) -> int:
        """Count the tokens of all the sets: those that an epoch of each reads."""
        return sum(store.tokens for store in self.stores)

    @property
    def text_bytes(self) -> int:
        """Count the UTF-8 bytes of text that the tokens were made from."""
        return sum(store.text_bytes for store in self.stores)

    @property
    def windows(self) -> tuple[int, ...]:
        """Count each set's windows: the rows after which it has been seen once."""
        return tuple(store.windows(self.length) for store in self.stores)

    @property
    def rows(self) -> int:
        """Count the windows of all the sets."""
        return sum(self.windows)


def batch_at(dataset: Dataset, step: int, rows: int, seed: int) -> Batch:
    """Return the global batch of a step: global rows [step * rows, (step + 1) * rows). See types.Batch for its fields.

    With ``attend: row`` there is no ``segment``, and positions run through the row.
    """
    return rows_at(dataset, range(step * rows, (step + 1) * rows), seed)


def share_at(dataset: Dataset, step: int, rows: int, seed: int, share: int, shares: int) -> Batch:
    """Return one of ``shares`` contiguous equal parts of the global batch of a step: what one rank trains on.

    Joined in order, the shares are `batch_at`'s batch, whatever their number: a run may go on over other ranks.
    ValueError where the rows do not divide.
    """
    if rows % shares:
        raise ValueError(f"{shares} shares cannot be cut evenly from {rows} rows; change train.batch or mesh")
    mine = rows // shares
    first = step * rows + share * mine
    return rows_at(dataset, range(first, first + mine), seed)


def rows_at(dataset: Dataset, rows: Sequence[int], seed: int) -> Batch:
    """Return any global rows, in the order given: a rank may fetch its own and sees what batch_at would show."""
    numbers = np.asarray(rows, np.int64)
    sets, windows = place(dataset, numbers, seed)
    return _tensors(_gather(dataset, sets, windows), numbers)


def place(dataset: Dataset, rows: NDArray[np.int64], seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the set and the window of each global row. Every set walks its own epochs, each in an order of its own."""
    sets, places = order.deal(rows, dataset.shares, seed)
    windows = np.empty_like(rows)
    for k, size in enumerate(dataset.windows):
        mine = sets == k
        epochs, inside = np.divmod(places[mine], size)
        if dataset.shuffle:
            for epoch in np.unique(epochs):
                now = epochs == epoch
                inside[now] = order.permute(inside[now], size, seed, "order", dataset.names[k], int(epoch))
        windows[mine] = inside
    return sets, windows


def eval_batches(
    dataset: Dataset, rows: int, limit: int | None = None, share: int = 0, shares: int = 1
) -> Iterator[Batch]:
    """Yield every window once in a fixed order, ``rows`` at a time; the last batch is short, never filled with copies.

    limit: take this many windows, evenly spread over all. ``row`` counts from 0. With several shares each yields its
    own windows, and every share as many batches of as many rows as the others, since their ranks compute together:
    rows of weight 0 and segment -1 stand in where there are no windows left.
    """
    ends = np.cumsum((0, *dataset.windows))
    taken = dataset.rows if limit is None else min(limit, dataset.rows)
    for first in range(0, taken, rows * shares):
        size = -(-min(rows * shares, taken - first) // shares)
        numbers = first + share * size + np.arange(size)
        real = numbers < min(first + rows * shares, taken)
        overall = np.where(real, numbers, 0) * dataset.rows // max(taken, 1)
        sets = np.searchsorted(ends, overall, "right") - 1
        yield _tensors(_emptied(_gather(dataset, sets, overall - ends[sets]), ~real, dataset.eos), numbers)


def _emptied(rows: Arrays, empty: NDArray[np.bool_], eos: int) -> Arrays:
    """Blank the rows that stand in for none."""
    blank = {"tokens": eos, "targets": eos, "segment": -1, "until": -1}
    for name, values in rows.items() if empty.any() else ():
        values[empty] = blank.get(name, 0)
    return rows


def _gather(dataset: Dataset, sets: NDArray[np.int64], windows: NDArray[np.int64]) -> Arrays:
    if len(dataset.stores) == 1:
        return _cut(dataset.stores[0], windows, dataset.length, dataset.attend)
    merged: Arrays = {}
    for k in np.unique(sets):
        mine = sets == k
        for name, values in _cut(dataset.stores[k], windows[mine], dataset.length, dataset.attend).items():
            merged.setdefault(name, np.empty((len(sets), dataset.length), values.dtype))[mine] = values
    return merged


def _cut(store: TokenStore, windows: NDArray[np.int64], length: int, attend: Literal["document", "row"]) -> Arrays:
    """Read windows of one store as [windows, length] arrays."""
    if isinstance(store, PackedStore):
        return cut_packs(store, windows)
    if isinstance(store, PairStore):
        return cut_pairs(store, windows)
    starts = windows[:, None] * length
    at = starts + np.arange(length)
    real = at < store.tokens
    at = np.minimum(at, store.tokens - 1)
    targets = np.where(real, store.ids[at].astype(np.int64), store.eos)
    before = store.ids[np.maximum(at - 1, 0)].astype(np.int64)
    rows: Arrays = {
        "tokens": np.where(real & (at > 0), before, store.eos),
        "targets": targets,
        "weight": real.astype(np.float32),
    }
    if attend == "row":
        return rows | {"position": np.broadcast_to(np.arange(length), at.shape).copy()}
    document = np.searchsorted(store.offsets, at, "right") - 1
    first = np.maximum(store.offsets[document], starts)
    return rows | {
        "position": np.where(real, at - first, 0),
        "segment": np.where(real, document - document[:, :1], -1),
    }


def _tensors(arrays: Arrays, rows: NDArray[np.int64]) -> Batch:
    return {name: torch.from_numpy(values) for name, values in arrays.items()} | {"row": torch.from_numpy(rows.copy())}


def prefetch(
    make: Callable[[int], Batch], start: int, stop: int | None = None, *, workers: int = 1, ahead: int = 2
) -> Iterator[Batch]:
    """Yield ``make(step)`` for start <= step < stop, in that order, up to ``ahead`` of them made early by threads.

    workers: 0 makes each when it is asked for. An error of ``make`` is raised at its own step.
    """
    steps = count(start) if stop is None else iter(range(start, stop))
    if workers == 0:
        yield from map(make, steps)
        return
    pool = ThreadPoolExecutor(workers, thread_name_prefix="batches")
    waiting: deque[Future[Batch]] = deque()
    try:
        for step in steps:
            waiting.append(pool.submit(make, step))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
