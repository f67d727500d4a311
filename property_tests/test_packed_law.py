"""Laws 5 and 6 for supervised texts: each target once an epoch, and a text learns in a full row what it does alone."""

from __future__ import annotations

import pytest
import torch
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from ironfn import tree
from ironfn.algo.step import State, make_step
from ironfn.data.dataset import Dataset, batch_at, eval_batches, rows_at, share_at
from ironfn.data.packed import PackedStore
from ironfn.grad.value_and_grad import accumulate, value_and_grad
from ironfn.loss.lm import lm_loss
from ironfn.mesh.axis import SINGLE
from ironfn.model.arch import complete
from ironfn.model.init import init
from ironfn.model.tables import table
from ironfn.optim.adamw import adamw
from ironfn.spec.records import ModelSpec
from ironfn.types import Batch
from tests.data_stores import dataset, hold_packed

SEEDS = st.integers(0, 2**31)
VOCAB = 400


@frozen
class Case:
    """Hold a dataset, and its texts: ids that are all different, and which are trained."""

    data: Dataset
    texts: list[tuple[list[int], list[bool]]]
    overlong: str

    @property
    def store(self) -> PackedStore:
        (store,) = self.data.stores
        assert isinstance(store, PackedStore)
        return store


@st.composite
def cases(draw: st.DrawFn, longest: int = 30) -> Case:
    texts: list[tuple[list[int], list[bool]]] = []
    fresh = 1
    for size in draw(st.lists(st.integers(2, longest), min_size=1, max_size=12)):
        # the last id is always trained, as `supervised` leaves it
        trained = [False, *draw(st.lists(st.booleans(), min_size=size - 2, max_size=size - 2)), True]
        texts.append((list(range(fresh, fresh + size)), trained))
        fresh += size
    overlong = draw(st.sampled_from(["truncate", "split", "drop"]))
    length = draw(st.integers(1, longest))
    store = hold_packed(texts, length, overlong, vocab_size=VOCAB)
    return Case(dataset((store,), length, shuffle=draw(st.booleans())), texts, overlong)


def targets(batch: Batch) -> list[int]:
    return batch["targets"][batch["weight"] > 0].tolist()


def whole(batches: list[Batch]) -> Batch:
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


@settings(deadline=None)
@given(case=cases(), seed=SEEDS, epoch=st.integers(0, 3))
def test_every_target_that_fits_is_one_once_an_epoch(case: Case, seed: int, epoch: int) -> None:
    rows, length = case.data.rows, case.data.length
    expected: list[int] = []
    for ids, trained in case.texts:
        if len(ids) - 1 <= length or case.overlong == "split":
            kept = len(ids)
        else:
            kept = length + 1 if case.overlong == "truncate" else 0
        expected += [i for i, learned in zip(ids[:kept], trained, strict=False) if learned]
    got = targets(rows_at(case.data, range(epoch * rows, (epoch + 1) * rows), seed)) if rows else []
    assert sorted(got) == sorted(expected)
    fit = case.store.fit
    assert fit.overlong == sum(len(ids) - 1 > length for ids, _ in case.texts)
    assert len(got) + fit.lost_targets == sum(sum(trained) for _, trained in case.texts)


@settings(deadline=None)
@given(case=cases(), seed=SEEDS)
def test_each_token_reads_its_own_text_alone(case: Case, seed: int) -> None:
    if not case.data.rows:
        return
    batch = rows_at(case.data, range(case.data.rows), seed)
    home = {i: (number, at) for number, (ids, _) in enumerate(case.texts) for at, i in enumerate(ids)}
    real = batch["segment"] >= 0
    for row in range(len(real)):
        seen: dict[int, list[tuple[int, int, int]]] = {}
        for place in real[row].nonzero().flatten().tolist():
            token, target = (int(batch[name][row, place]) for name in ("tokens", "targets"))
            assert target == token + 1  # the next id of the same text
            assert home[token][0] == home[target][0]
            assert bool(batch["weight"][row, place]) == case.texts[home[target][0]][1][home[target][1]]
            entry = (home[token][0], home[token][1], int(batch["position"][row, place]))
            seen.setdefault(int(batch["segment"][row, place]), []).append(entry)
        for entries in seen.values():
            text, first, _ = entries[0]
            assert entries == [(text, first + k, k) for k in range(len(entries))]
    assert not batch["weight"][~real].any()
    assert (batch["segment"][~real] == -1).all()


@settings(deadline=None)
@given(case=cases(), seed=SEEDS, step=st.integers(0, 40), shares=st.sampled_from([1, 2, 4]))
def test_a_batch_is_a_function_of_the_step_and_its_shares_join_to_it(
    case: Case, seed: int, step: int, shares: int
) -> None:
    if not case.data.rows:
        return
    batch = batch_at(case.data, step, 4, seed)
    joined = whole([share_at(case.data, step, 4, seed, share, shares) for share in range(shares)])
    assert all(torch.equal(batch[name], joined[name]) for name in batch)
    again = rows_at(case.data, list(reversed(range(4 * step, 4 * step + 4))), seed)
    assert all(torch.equal(batch[name], again[name].flip(0)) for name in batch)
    scored = whole(list(eval_batches(case.data, 3)))
    assert sorted(targets(scored)) == sorted(targets(rows_at(case.data, range(case.data.rows), seed)))


@pytest.fixture(scope="module")
def model() -> tuple[object, object]:
    arch = complete(ModelSpec(width=16, layers=2, heads=2, ffn=24, context=64), VOCAB)
    params = init(arch, 0, table(False), SINGLE, torch.float64)
    return params, value_and_grad(lm_loss(arch))


@settings(deadline=None, max_examples=6)
@given(case=cases(longest=20), seed=SEEDS)
def test_a_text_learns_in_a_full_row_what_it_learns_alone(model: tuple, case: Case, seed: int) -> None:
    if not case.data.rows:
        return
    params, vg = model
    packed, grads = vg(params, rows_at(case.data, range(case.data.rows), seed), SINGLE)
    alone, expected = vg(params, rows_of_their_own(case), SINGLE)
    assert float(packed.weight) == float(alone.weight) > 0
    torch.testing.assert_close(packed.total, alone.total, rtol=1e-9, atol=1e-12)
    for path, leaf in tree.flatten(grads).items():
        torch.testing.assert_close(leaf, tree.flatten(expected)[path], rtol=1e-9, atol=1e-12)
    # and through a whole step, a row at a time: nothing that keeps texts apart is lost on the way
    optimizer = adamw()
    step = make_step(accumulate(vg, 1), optimizer, lambda s: 0.1)
    _, told = step(State(0, params, optimizer.init(params)), rows_at(case.data, range(case.data.rows), seed))
    weight = float(alone.weight)
    assert told["loss"] == pytest.approx(float(alone.total) / weight, rel=1e-9)
    squares = sum(float(leaf.square().sum()) for leaf in tree.leaves(expected))
    assert told["grad_norm"] == pytest.approx(squares**0.5 / weight, rel=1e-9)


def rows_of_their_own(case: Case) -> Batch:
    """Return each piece of a text in a row of its own, filled up with anything."""
    store = case.store
    shape = (len(store.text), int(store.size.max()))
    batch = {name: torch.full(shape, 7) for name in ("tokens", "targets")} | {"weight": torch.zeros(shape)}
    batch |= {"position": torch.arange(shape[1]).expand(shape), "row": torch.arange(shape[0])}
    for row, (text, first, size) in enumerate(
        zip(store.text.tolist(), store.first.tolist(), store.size.tolist(), strict=True)
    ):
        ids, trained = (torch.tensor(values[first : first + size + 1]) for values in case.texts[text])
        batch["tokens"][row, :size], batch["targets"][row, :size] = ids[:-1], ids[1:]
        batch["weight"][row, :size] = trained[1:].float()
    return batch
