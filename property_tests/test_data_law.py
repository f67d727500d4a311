"""Law 5: a batch is a function of (spec, seed, step), and every token is a target exactly once an epoch."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from ironfn.data.admit import split_of
from ironfn.data.dataset import Dataset, batch_at, eval_batches, prefetch, rows_at, share_at
from ironfn.data.fim import cut
from ironfn.data.order import permute
from ironfn.spec.records import FimSpec, SplitSpec
from ironfn.types import Batch
from tests.data_stores import dataset, hold_store

SEEDS = st.integers(0, 2**31)


@frozen
class Case:
    """Hold a dataset and the documents, as lists of ids, of each of its sets."""

    data: Dataset
    sets: list[list[list[int]]]


@st.composite
def cases(draw: st.DrawFn, most_sets: int = 3) -> Case:
    """Draw sets of documents whose ids are all different, so that a target tells which token it is."""
    sizes = draw(st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=8), min_size=1, max_size=most_sets))
    sets: list[list[list[int]]] = []
    fresh = 1
    for documents in sizes:
        sets.append([])
        for size in documents:
            sets[-1].append([*range(fresh, fresh + size), 0])
            fresh += size
    vocab_size = draw(st.sampled_from([fresh, 70_000]))
    weights = draw(st.lists(st.floats(0.1, 1.0), min_size=len(sets), max_size=len(sets)))
    stores = tuple(hold_store(documents, vocab_size=vocab_size) for documents in sets)
    return Case(dataset(stores, draw(st.integers(1, 20)), tuple(weights), draw(st.booleans())), sets)


def equal(one: Batch, two: Batch) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def cat(batches: list[Batch]) -> Batch:
    return {name: torch.cat([b[name] for b in batches]) for name in batches[0]}


def targets(batch: Batch) -> list[int]:
    return batch["targets"][batch["weight"] > 0].tolist()


@settings(deadline=None)
@given(case=cases(most_sets=1), seed=SEEDS, epoch=st.integers(0, 5))
def test_every_token_is_a_target_once_an_epoch(case: Case, seed: int, epoch: int) -> None:
    rows = case.data.rows
    got = targets(rows_at(case.data, range(epoch * rows, (epoch + 1) * rows), seed))
    assert Counter(got) == Counter(i for document in case.sets[0] for i in document)
    assert len(got) == case.data.tokens


@settings(deadline=None)
@given(case=cases(), seed=SEEDS)
def test_every_set_walks_its_own_epochs(case: Case, seed: int) -> None:
    batch = rows_at(case.data, range(500), seed)
    for documents in case.sets:
        mine = Counter(i for document in documents for i in document if i)
        seen = Counter(i for i in targets(batch) if i in mine)
        rounds = max(seen.values())
        assert set(seen.values()) <= {rounds, rounds - 1}
        assert rounds == 1 or seen.keys() == mine.keys()


@settings(deadline=None)
@given(case=cases(), seed=SEEDS, first=st.integers(0, 2000), rows=st.integers(1, 12), data=st.data())
def test_any_split_of_the_rows_is_the_batch(case: Case, seed: int, first: int, rows: int, data: st.DataObject) -> None:
    whole = batch_at(case.data, first, rows, seed)
    assert whole["row"].tolist() == list(range(first * rows, (first + 1) * rows))
    edges = sorted(data.draw(st.sets(st.integers(1, rows - 1), max_size=4))) if rows > 1 else []
    parts = [
        rows_at(case.data, range(first * rows + a, first * rows + b), seed)
        for a, b in zip([0, *edges], [*edges, rows], strict=True)
    ]
    assert equal(cat(parts), whole)
    order = data.draw(st.permutations(range(rows)))
    mixed = rows_at(case.data, [first * rows + i for i in order], seed)
    assert equal(mixed, {name: values[list(order)] for name, values in whole.items()})


@settings(deadline=None)
@given(case=cases(), seed=SEEDS, steps=st.lists(st.integers(0, 500), min_size=1, max_size=6), rows=st.integers(1, 5))
def test_no_call_leaves_a_trace(case: Case, seed: int, steps: list[int], rows: int) -> None:
    alone = {step: batch_at(case.data, step, rows, seed) for step in sorted(steps)}
    assert all(equal(batch_at(case.data, step, rows, seed), alone[step]) for step in reversed(steps))


@settings(max_examples=20, deadline=None)
@given(case=cases(), seed=SEEDS, start=st.integers(0, 50), workers=st.integers(0, 4), ahead=st.integers(1, 4))
def test_prefetching_changes_nothing(case: Case, seed: int, start: int, workers: int, ahead: int) -> None:
    def make(step: int) -> Batch:
        return batch_at(case.data, step, 3, seed)

    early = list(prefetch(make, start, start + 8, workers=workers, ahead=ahead))
    assert all(equal(a, make(step)) for a, step in zip(early, range(start, start + 8), strict=True))


@settings(deadline=None)
@given(case=cases(), seed=SEEDS)
def test_rows_show_their_documents(case: Case, seed: int) -> None:
    """Inputs, positions and segments follow from the documents: each segment is a stretch of one, shifted by one."""
    before = {}
    for documents in case.sets:
        for document in documents:
            before |= dict(zip(document[:-1], [0, *document[:-2]], strict=True))
    batch = rows_at(case.data, range(40), seed)
    for tokens, goals, weight, position, segment in zip(
        *(batch[name].tolist() for name in ("tokens", "targets", "weight", "position", "segment")), strict=True
    ):
        real = int(sum(weight))
        assert weight == [1.0] * real + [0.0] * (len(weight) - real)
        assert segment[real:] == [-1] * (len(weight) - real)
        assert segment[0] == 0
        for t in range(real):
            starts = t == 0 or goals[t - 1] == 0
            assert position[t] == (0 if starts else position[t - 1] + 1)
            assert segment[t] == (0 if t == 0 else segment[t - 1] + starts)
            assert t == 0 or tokens[t] == goals[t - 1]
            assert goals[t] == 0 or tokens[t] == before[goals[t]]


@settings(deadline=None)
@given(case=cases(), rows=st.integers(1, 9), limit=st.none() | st.integers(1, 30))
def test_evaluation_holds_every_token_once(case: Case, rows: int, limit: int | None) -> None:
    batches = list(eval_batches(case.data, rows, limit))
    got = cat(batches)
    assert len(got["row"]) == min(limit or case.data.rows, case.data.rows)
    assert all(len(b["row"]) == rows for b in batches[:-1])
    counts = Counter(i for i in targets(got) if i)
    assert set(counts.values()) <= {1}
    if limit is None:
        assert len(targets(got)) == case.data.tokens


@settings(deadline=None)
@given(case=cases(), seed=SEEDS, step=st.integers(0, 300), shares=st.integers(1, 6), rows=st.integers(1, 4))
def test_the_ranks_shares_are_the_batch(case: Case, seed: int, step: int, shares: int, rows: int) -> None:
    """Whatever the number of ranks: so a run that goes on over others sees no row twice and misses none."""
    parts = [share_at(case.data, step, rows * shares, seed, share, shares) for share in range(shares)]
    assert [len(part["tokens"]) for part in parts] == [rows] * shares
    assert equal(cat(parts), batch_at(case.data, step, rows * shares, seed))
    with pytest.raises(ValueError, match="cannot be cut evenly"):
        share_at(case.data, step, rows * shares, seed, 0, rows * shares + 1)


@settings(deadline=None)
@given(case=cases(), rows=st.integers(1, 5), limit=st.none() | st.integers(1, 30), shares=st.integers(1, 6))
def test_ranks_evaluate_in_step_and_together_every_token_once(
    case: Case, rows: int, limit: int | None, shares: int
) -> None:
    parts = [list(eval_batches(case.data, rows, limit, share, shares)) for share in range(shares)]
    sizes = [[len(batch["tokens"]) for batch in part] for part in parts]
    assert sizes == [sizes[0]] * shares, "ranks that compute together make equally many passes over equally many rows"
    assert max(sizes[0]) <= rows
    whole = [t for batch in eval_batches(case.data, rows, limit) for t in targets(batch)]
    assert Counter(t for part in parts for batch in part for t in targets(batch)) == Counter(whole)
    blank = [b["segment"][(b["weight"] == 0).all(1)] for part in parts for b in part]
    assert all((segment == -1).all() for segment in blank)


@settings(deadline=None)
@given(size=st.integers(1, 5000), coordinates=st.tuples(SEEDS, st.text(max_size=3)))
def test_a_permutation_is_one(size: int, coordinates: tuple[int, str]) -> None:
    assert (np.sort(permute(np.arange(size), size, *coordinates)) == np.arange(size)).all()


@settings(deadline=None)
@given(text=st.text(max_size=60), seed=SEEDS, spans=st.sampled_from(["character", "line"]), rate=st.floats(0, 1))
def test_fim_keeps_the_text(text: str, seed: int, spans: str, rate: float) -> None:
    spec = FimSpec(rate=rate, spans=spans)  # pyright: ignore[reportArgumentType]
    parts = cut(text, spec, seed, text)
    assert parts == cut(text, spec, seed, text)
    if parts is None:
        assert rate < 1 or not text
    else:
        assert parts.prefix + parts.middle + parts.suffix == text
        assert parts.middle
        assert rate > 0


@settings(deadline=None)
@given(digest=st.binary(min_size=16, max_size=16), test=st.floats(0, 0.4), validation=st.floats(0, 0.4))
def test_a_split_moves_no_document_between_the_others(digest: bytes, test: float, validation: float) -> None:
    name = split_of(digest, SplitSpec(validation=validation, test=test))
    assert name != "validation" or validation > 0
    assert name != "test" or test > 0
    assert name != "test" or split_of(digest, SplitSpec(validation=0.0, test=test)) == "test"
    assert name != "validation" or split_of(digest, SplitSpec(validation=validation, test=0.0)) == "validation"
    assert split_of(digest, SplitSpec(validation=0.0, test=0.0)) == "train"
