"""Rows: windows, positions, segments, order, mixing, epochs, prefetch: worked examples."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from ironfn.data.dataset import batch_at, eval_batches, place, prefetch, rows_at
from ironfn.data.order import deal, permute, shares
from ironfn.types import Batch
from tests.data_stores import dataset, write_store


def test_a_row_by_hand(tmp_path: Path) -> None:
    data = dataset((write_store(tmp_path, [[5, 6, 0], [7, 8, 9, 0]]),), length=7, shuffle=False)
    batch = batch_at(data, 0, 1, 0)
    assert {name: values[0].tolist() for name, values in batch.items() if name != "row"} == {
        "tokens": [0, 5, 6, 0, 7, 8, 9],
        "targets": [5, 6, 0, 7, 8, 9, 0],
        "weight": [1.0] * 7,
        "position": [0, 1, 2, 0, 1, 2, 3],
        "segment": [0, 0, 0, 1, 1, 1, 1],
    }
    assert batch["row"].tolist() == [0]
    assert {name: values.dtype for name, values in batch.items()} == {
        **dict.fromkeys(("tokens", "targets", "position", "segment", "row"), torch.int64),
        "weight": torch.float32,
    }


def test_a_document_over_two_rows_and_padding(tmp_path: Path) -> None:
    data = dataset((write_store(tmp_path, [[5, 6, 7, 8, 9, 0], [4, 0]]),), length=5, shuffle=False)
    batch = batch_at(data, 0, 2, 0)
    assert batch["tokens"].tolist() == [[0, 5, 6, 7, 8], [9, 0, 4, 0, 0]]
    assert batch["targets"].tolist() == [[5, 6, 7, 8, 9], [0, 4, 0, 0, 0]]
    assert batch["weight"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch["position"].tolist() == [[0, 1, 2, 3, 4], [0, 0, 1, 0, 0]]
    assert batch["segment"].tolist() == [[0, 0, 0, 0, 0], [0, 1, 1, -1, -1]]


def test_attending_to_the_row(tmp_path: Path) -> None:
    data = dataset((write_store(tmp_path, [[5, 0], [7, 0]]),), length=3, shuffle=False, attend="row")
    batch = batch_at(data, 0, 2, 0)
    assert "segment" not in batch
    assert batch["position"].tolist() == [[0, 1, 2]] * 2
    assert batch["weight"].tolist() == [[1, 1, 1], [1, 0, 0]]


@pytest.mark.parametrize(("tokens", "rows", "last"), [(33, 5, 1), (32, 4, 8), (8, 1, 8), (1, 1, 1)])
def test_windows_and_tail(tmp_path: Path, tokens: int, rows: int, last: int) -> None:
    # 33 tokens, 8 a row: four full windows and one more for the last token, filled up with weight 0.
    data = dataset((write_store(tmp_path, [[*range(1, tokens), 0]], vocab_size=40),), length=8, shuffle=False)
    batch = batch_at(data, 0, data.rows, 0)
    assert (data.rows, data.tokens) == (rows, tokens)
    assert batch["weight"].sum(1).tolist() == [8.0] * (rows - 1) + [float(last)]
    seen = batch["targets"][batch["weight"] > 0].tolist()
    assert seen == [*range(1, tokens), 0]


def test_epochs_have_different_orders_and_the_same_rows(tmp_path: Path) -> None:
    data = dataset((write_store(tmp_path, [[i, 0] for i in range(1, 101)], vocab_size=101),), length=2)
    epochs = [batch_at(data, epoch, 100, seed=5)["targets"][:, 0].tolist() for epoch in range(3)]
    assert all(sorted(epoch) == list(range(1, 101)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0] != list(range(1, 101))
    assert batch_at(data, 1, 100, seed=5)["targets"][:, 0].tolist() == epochs[1]
    assert batch_at(data, 0, 100, seed=6)["targets"][:, 0].tolist() != epochs[0]


def test_resume_inside_the_second_epoch(tmp_path: Path) -> None:
    # 10 rows, 3 a batch: steps straddle the edges of epochs, and what comes after any step is what always comes.
    data = dataset((write_store(tmp_path, [[i, 0] for i in range(1, 11)], vocab_size=11),), length=2)
    straight = [batch_at(data, step, 3, 0)["targets"][:, 0].tolist() for step in range(20)]
    flat = [i for step in straight for i in step]
    assert all(sorted(flat[e * 10 : e * 10 + 10]) == list(range(1, 11)) for e in range(6))
    assert [batch_at(data, step, 3, 0)["targets"][:, 0].tolist() for step in range(5, 20)] == straight[5:]


def test_mixture_shares_are_nearly_exact(tmp_path: Path) -> None:
    stores = tuple(write_store(tmp_path, [[1, 0]] * 50, name=f"{name}/train") for name in "ab")
    data = dataset(stores, length=2, weights=(0.9, 0.1))
    sets, _ = place(data, np.arange(1000), 0)
    assert abs(int((sets == 0).sum()) - 900) <= 10
    for seed in range(3):
        sets, windows = place(data, np.arange(1024 * 20), seed)
        assert abs(int((sets == 0).sum()) - 18432) <= 1
        for k in (0, 1):  # each set walks its own epochs
            mine = windows[sets == k]
            whole = len(mine) // 50 * 50
            assert (np.sort(mine[:whole].reshape(-1, 50)) == np.arange(50)).all()
    assert not (place(data, np.arange(1000), 0)[0] == place(data, np.arange(1000), 1)[0]).all()


def test_mixture_of_many_and_of_tiny_shares() -> None:
    weights = (1e-6, 1.0, 1.0, *([0.01] * 37))
    sets, places = deal(np.arange(1600 * 20), shares(weights, [1] * 40, None), 0)
    assert all((places[sets == k] == np.arange((sets == k).sum())).all() for k in range(40))
    counts = np.bincount(sets, minlength=len(weights))
    expected = np.array(weights) / sum(weights) * len(sets)
    assert np.abs(counts - expected).max() < len(weights)
    assert np.abs(np.delete(counts - expected, counts.argmax())).max() <= 1


def test_temperature() -> None:
    assert shares([9, 1], [300, 100], 1.0) == pytest.approx((0.75, 0.25))
    assert shares([9, 1], [10**12, 10**12 // 10_000], 4.0) == pytest.approx((10 / 11, 1 / 11))
    assert shares([9, 1], [300, 100], 1e9) == pytest.approx((0.5, 0.5))
    assert shares([9, 1], [300, 100], None) == (0.9, 0.1)


def test_rows_of_sets_keep_their_own_documents(tmp_path: Path) -> None:
    stores = (
        write_store(tmp_path, [[1, 2, 3, 0]] * 30, name="a/train"),
        write_store(tmp_path, [[4, 5, 0]] * 30, name="b/train"),
    )
    batch = rows_at(dataset(stores, length=6, weights=(0.5, 0.5)), range(200), 0)
    kinds = [set(row.tolist()) - {0} for row in batch["targets"]]
    assert all(kind in ({1, 2, 3}, {4, 5}) for kind in kinds)
    assert 80 < sum(kind == {4, 5} for kind in kinds) < 120


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 100])
def test_evaluation_sees_each_window_once_and_adds_no_copy(tmp_path: Path, rows: int) -> None:
    stores = (
        write_store(tmp_path, [[i, 0] for i in range(1, 8)], name="a/validation", vocab_size=40),
        write_store(tmp_path, [[i, 0] for i in range(20, 25)], name="b/validation", vocab_size=40),
    )
    data = dataset(stores, length=2)
    batches = list(eval_batches(data, rows))
    assert [len(b["row"]) for b in batches] == [rows] * (12 // rows) + [12 % rows] * (12 % rows > 0)
    assert torch.cat([b["row"] for b in batches]).tolist() == list(range(12))
    assert torch.cat([b["targets"][:, 0] for b in batches]).tolist() == [*range(1, 8), *range(20, 25)]
    some = torch.cat([b["targets"][:, 0] for b in eval_batches(data, rows, limit=4)]).tolist()
    assert some == [1, 4, 7, 22]
    assert sum(len(b["row"]) for b in eval_batches(data, rows, limit=1000)) == 12


def test_permutation_of_every_small_size() -> None:
    for size in range(1, 130):
        assert sorted(permute(np.arange(size), size, 3).tolist()) == list(range(size))
    big = permute(np.arange(100_000), 100_000, 3)
    assert (np.bincount(big, minlength=100_000) == 1).all()
    one = permute(np.array([123_456_789]), 10**15, 3)
    assert 0 <= one[0] < 10**15
    assert permute(np.array([5, 123_456_789]), 10**15, 3)[1] == one[0]


def test_permutation_is_spread_evenly() -> None:
    # Where index 0 and the pair (0, 1) land over many keys, against the uniform law (chi-square at p = 0.001).
    size, keys = 7, 4200
    spots = np.array([permute(np.arange(2), size, key) for key in range(keys)])
    single = np.bincount(spots[:, 0], minlength=size)
    assert ((single - keys / size) ** 2 / (keys / size)).sum() < 22.5
    pairs = np.bincount(spots[:, 0] * size + spots[:, 1], minlength=size * size).reshape(size, size)
    assert np.trace(pairs) == 0
    off, expected = pairs[~np.eye(size, dtype=bool)], keys / (size * (size - 1))
    assert ((off - expected) ** 2 / expected).sum() < 74.7


@pytest.mark.parametrize("workers", [0, 1, 2, 5])
def test_prefetch_keeps_the_order_whatever_the_workers(workers: int) -> None:
    def make(step: int) -> Batch:
        time.sleep(0.003 if step % 3 == 0 else 0.0)  # the early ones finish late
        return {"row": torch.tensor([step])}

    got = [int(b["row"]) for b in prefetch(make, 4, 40, workers=workers, ahead=3)]
    assert got == list(range(4, 40))
    endless = prefetch(make, 7, workers=workers)
    assert [int(next(endless)["row"]) for _ in range(5)] == [7, 8, 9, 10, 11]
    endless.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("batches")]


def test_prefetch_is_bounded_and_raises_at_its_step() -> None:
    made: list[int] = []

    def make(step: int) -> Batch:
        if step == 5:
            raise ValueError("step 5")
        made.append(step)
        return {"row": torch.tensor([step])}

    batches = prefetch(make, 0, 100, workers=2, ahead=3)
    assert int(next(batches)["row"]) == 0
    time.sleep(0.05)
    assert max(made) <= 3
    assert [int(next(batches)["row"]) for _ in range(4)] == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="step 5"):
        next(batches)
    assert not [t for t in threading.enumerate() if t.name.startswith("batches")]
