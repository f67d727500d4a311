"""Token stores: what was written is read back, and what is not whole is refused."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve

from ironfn.data.dataset import Dataset, rows_at
from ironfn.data.store import HEADER_BYTES, TokenStore, open_store, verify
from tests.data_stores import dataset, write_store


@pytest.mark.parametrize(
    ("vocab_size", "width"), [(1, 2), (65535, 2), (65536, 2), (65537, 4), (70001, 4), (151644, 4), (1 << 32, 4)]
)
def test_width_follows_the_vocabulary(tmp_path: Path, vocab_size: int, width: int) -> None:
    store = write_store(tmp_path, [[0], [vocab_size - 1]], vocab_size=vocab_size)
    assert store.ids.dtype.itemsize == width
    assert store.ids.tolist() == [0, vocab_size - 1]


def test_ids_above_16_bits_come_back_equal(tmp_path: Path) -> None:
    store = write_store(tmp_path, [[65535, 65536, 70000, 151643]], vocab_size=151644)
    assert store.ids.tolist() == [65535, 65536, 70000, 151643]


def test_one_width_for_all_the_stores_of_a_vocabulary(tmp_path: Path) -> None:
    low = write_store(tmp_path, [[10]], vocab_size=70000, name="a/train")
    high = write_store(tmp_path, [[69999]], vocab_size=70000, name="b/train")
    assert low.ids.dtype == high.ids.dtype == np.uint32
    data = dataset((low, high), length=1)
    assert sorted(rows_at(data, range(1024), 0)["targets"].unique().tolist()) == [10, 69999]


def test_an_id_outside_the_vocabulary_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="id 5 is outside the vocabulary of 5"):
        write_store(tmp_path, [[4, 5]], vocab_size=5)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_an_error_while_writing_keeps_the_old_store(tmp_path: Path) -> None:
    write_store(tmp_path, [[1, 2, 3]])
    path = tmp_path / "a/train.tokens"
    old = path.read_bytes()
    with pytest.raises(ValueError, match="id 10 is outside"):
        write_store(tmp_path, [[4], [10]])
    assert [p.name for p in path.parent.iterdir()] == ["train.tokens"]
    assert path.read_bytes() == old


def test_an_empty_store(tmp_path: Path) -> None:
    store = write_store(tmp_path, [])
    assert (store.tokens, store.documents) == (0, 0)
    verify(store)


def test_offsets_beyond_32_bits(tmp_path: Path) -> None:
    # Field value: sample 600000 of 4096 two-byte ids begins at byte 4915200000. The file is sparse: it takes no disk.
    length, row = 4096, 600_000
    tokens = (row + 1) * length
    assert row * length * 2 == 4_915_200_000
    whole = write_store(tmp_path, [[7]])
    path, sparse = whole.path, tmp_path / "b" / "train.tokens"
    sparse.parent.mkdir()
    with sparse.open("wb") as file:
        file.truncate(HEADER_BYTES + 2 * tokens)
        file.seek(HEADER_BYTES + 4_915_200_000)
        file.write(np.arange(1, 9, dtype="<u2").tobytes())
    ids = np.memmap(sparse, "<u2", "r", HEADER_BYTES, (tokens,))
    big = TokenStore(path, ids, np.array([0, tokens - 4096 + 5, tokens]), 10, 0, 0, 0, 0, 0)
    batch = rows_at(dataset((big,), length=length, shuffle=False), [row], 0)
    assert batch["targets"][0, :9].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 0]
    assert batch["segment"][0, :7].tolist() == [0, 0, 0, 0, 0, 1, 1]


def damages(whole: bytes) -> dict[str, bytes]:
    return {
        "is no token store": b"PK\3\4" + whole[4:],
        "is no token store (0 bytes": b"",
        "is no token store (100": whole[:100],
        "damaged header": whole[:12] + b"\4" + whole[13:],
        "promises": whole[:-1],
        "promises ": whole + b"\0",
        "has format": whole[:8] + b"\2" + whole[9:],
    }


@pytest.mark.parametrize("what", damages(bytes(200)))
def test_damage_is_named(tmp_path: Path, what: str) -> None:
    store = write_store(tmp_path, [[1, 2, 3], [4]])
    store.path.write_bytes(damages(store.path.read_bytes())[what])
    with pytest.raises(ValueError, match=rf"train\.tokens: .*{what.strip().replace('(', '.')}.*run `ironfn prepare`"):
        open_store(store.path, "a/train")


def test_a_missing_and_a_swapped_store_are_named(tmp_path: Path) -> None:
    store = write_store(tmp_path, [[1]])
    other = store.path.with_name("validation.tokens")
    with pytest.raises(ValueError, match="cannot be opened"):
        open_store(other, "a/validation")
    shutil.copy(store.path, other)
    with pytest.raises(ValueError, match=r"another store than 'a/validation'"):
        open_store(other, "a/validation")


def test_every_flipped_bit_and_cut_is_detected(tmp_path: Path) -> None:
    store = write_store(tmp_path, [list(range(1, 9))] * 20)
    whole, draw = store.path.read_bytes(), random.Random(0)
    for _ in range(300):
        data = bytearray(whole)
        if draw.random() < 0.2:
            del data[draw.randrange(len(data)) :]
        else:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        store.path.write_bytes(data)
        with pytest.raises(ValueError, match=r"train\.tokens"):
            verify(open_store(store.path, "a/train"))


def test_a_dataset_is_a_value(tmp_path: Path) -> None:
    data = dataset((write_store(tmp_path, [[1, 2]]),), length=2)
    assert isinstance(data, Dataset)
    with pytest.raises(AttributeError):
        data.length = 3  # pyright: ignore[reportAttributeAccessIssue]
    assert evolve(data, length=1).rows == 2
