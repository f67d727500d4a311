"""Damage checkpoints by accident and by design: everything is noticed, and nothing is believed before it is checked."""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
import xxhash

from bench.damage import HARMS, a_state, is_noticed
from ironfn.checkpoint import DamagedCheckpoint, load, newest, read_manifest, save, steps, verify
from ironfn.checkpoint import read as read_module


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("room") / "pristine"
    for step in (100, 200):
        save(path, step, a_state(step, width=16), {"seed": 0}, file_bytes=1 << 14)
    return path


@pytest.mark.parametrize("kind", HARMS)
def test_harm_is_noticed(pristine: Path, kind: str) -> None:
    assert [found for seed in range(20) if (found := is_noticed(pristine, HARMS[kind], seed))] == []


def test_a_flip_of_any_byte_of_any_file_is_noticed(tmp_path: Path) -> None:
    tree = {"a": torch.arange(5, dtype=torch.bfloat16), "b": {"c": torch.tensor(True), "d": torch.arange(3)}, "e": {}}
    path = save(tmp_path, 1, tree, {"seed": 1}, file_bytes=16)
    unnoticed: list[tuple[str, int]] = []
    for file in path.iterdir():
        data = bytearray(file.read_bytes())
        for place in range(len(data)):
            data[place] ^= 1 << place % 8
            file.write_bytes(data)
            unnoticed += [] if verify(path) else [(file.name, place)]
            data[place] ^= 1 << place % 8
        file.write_bytes(data)
    assert unnoticed == []
    assert verify(path) == []


def test_bytes_added_to_a_file_are_noticed(pristine: Path, tmp_path: Path) -> None:
    path = save(tmp_path, 1, a_state(1, 8), {})
    for file in path.iterdir():
        size = file.stat().st_size
        with open(file, "ab") as opened:
            opened.write(b"\0")
        assert verify(path) != []
        os.truncate(file, size)
    assert verify(path) == []


def test_verify_names_every_leaf_that_is_hurt(tmp_path: Path) -> None:
    path = save(tmp_path, 1, {name: torch.ones(100) for name in "abc"}, {})
    file = path / "shard-00000-of-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1  # the last byte of c
    data[-1200] ^= 1  # the first of a
    file.write_bytes(data)
    assert [(p.file, p.leaf) for p in verify(path)] == [(file.name, "a"), (file.name, "c")]


def test_checkpoints_that_traded_their_directories_are_noticed(tmp_path: Path) -> None:
    one, two = (save(tmp_path, step, a_state(step, 8), {}) for step in (1, 2))
    one.rename(tmp_path / "aside")
    two.rename(one)
    (tmp_path / "aside").rename(two)
    assert "is of step 2, but the directory is step-00000001" in str(verify(one)[0])
    with pytest.raises(DamagedCheckpoint, match="none of the 2"):
        newest(tmp_path, lambda message: None)
    copy = one.rename(tmp_path / "best")  # under a name that states no step it is itself again
    assert verify(copy) == []


# What follows was made on purpose, with every checksum right.


def seal(body: Any) -> bytes:
    packed = body if isinstance(body, bytes) else msgpack.packb(body)
    return packed + b"\xc4\x10" + xxhash.xxh3_128_digest(packed)


def forge(path: Path, change: Callable[[dict], object]) -> Path:
    file = path / "manifest.msgpack"
    body = msgpack.unpackb(file.read_bytes()[:-18])
    change(body)
    file.write_bytes(seal(body))
    return path


def leaf(body: dict) -> dict:
    return body["leaves"]["a"]


def rename_file(body: dict, name: str) -> None:
    body["files"] = {name: next(iter(body["files"].values()))}
    for described in body["leaves"].values():
        described["pieces"][0][0] = name


FORGERIES: dict[str, Callable[[dict], object]] = {
    "path traversal": lambda b: rename_file(b, "../../secret"),
    "absolute file": lambda b: rename_file(b, "/etc/passwd"),
    "other name": lambda b: rename_file(b, "shard-00000-of-00001.safetensors\n"),
    "file not listed": lambda b: b["files"].clear(),
    "unknown dtype": lambda b: leaf(b).update(dtype="F128"),
    "dtype of no text": lambda b: leaf(b).update(dtype=["F32"]),
    "other dtype": lambda b: leaf(b).update(dtype="I32"),
    "wider dtype": lambda b: leaf(b).update(dtype="F64"),
    "lying shape": lambda b: leaf(b).update(shape=[4, 5]),
    "both shapes lie": lambda b: (leaf(b).update(shape=[5, 4]), leaf(b)["pieces"][0].__setitem__(3, [5, 4])),
    "turned shape": lambda b: (leaf(b).update(shape=[3, 4]), leaf(b)["pieces"][0].__setitem__(3, [3, 4])),
    "enormous shape": lambda b: (leaf(b).update(shape=[2**62]), leaf(b)["pieces"][0].__setitem__(3, [2**62])),
    "negative shape": lambda b: (leaf(b).update(shape=[-4, -3]), leaf(b)["pieces"][0].__setitem__(3, [-4, -3])),
    "true as a size": lambda b: leaf(b).update(shape=[True, 12]),
    "no pieces": lambda b: leaf(b).update(pieces=[]),
    "twice the same piece": lambda b: leaf(b)["pieces"].append(leaf(b)["pieces"][0]),
    "overlapping pieces": lambda b: leaf(b).update(
        pieces=[[*leaf(b)["pieces"][0][:2], o, [3, 3], bytes(16)] for o in ([0, 0], [1, 0])]
    ),
    "a piece outside": lambda b: leaf(b)["pieces"][0].__setitem__(2, [0, 1]),
    "a tensor shared by different leaves": lambda b: leaf(b)["pieces"][0].__setitem__(1, "b/c"),
    "a short checksum": lambda b: leaf(b)["pieces"][0].__setitem__(4, b"x"),
    "a wrong size": lambda b: next(iter(b["files"].values())).__setitem__(0, 2**62),
    "a negative step": lambda b: b.update(step=-1),
    "a true step": lambda b: b.update(step=True),
    "no leaves": lambda b: b.pop("leaves"),
    "an unknown key": lambda b: b.update(code="import os"),
    "another format": lambda b: b.update(format="pickle"),
    "a leaf through a leaf": lambda b: b["empty"].update({"a/x": True}),
    "a dotted path": lambda b: b["leaves"].update({"x//y": leaf(b)}),
    "a path that is no text": lambda b: b["leaves"].update({b"x": leaf(b)}),
    "an extension": lambda b: b["meta"].update(x=msgpack.ExtType(5, b"x")),
    "a time": lambda b: b["meta"].update(x=msgpack.Timestamp(1)),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_manifest_is_refused(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, 1, {"a": torch.arange(12.0).reshape(4, 3), "b": {"c": torch.ones(2)}}, {})
    forge(path, FORGERIES[name])
    problem = verify(path)[0]
    assert problem.file == "manifest.msgpack" or "its header is not the one" in problem.what
    with pytest.raises(DamagedCheckpoint):
        load(path)


RAW: dict[str, bytes] = {
    "nothing": b"",
    "a nest of lists": b"\x91" * 100_000,
    "a nest of long lists": b"\xdc\x10\x00" * 500,
    "a nest of longer lists": b"\xdd\x00\x40\x00\x00" * 500,
    "a list that says 2^32": b"\xdd\xff\xff\xff\xff",
    "a map that says 2^32": b"\xdf\xff\xff\xff\xff",
    "a text that says 2^32": b"\xdb\xff\xff\xff\xff",
    "an extension that says 2^32": b"\xc9\xff\xff\xff\xff\x05",
    "two values": b"\x80\x80",
    "no map": b"\x01",
}


@pytest.mark.parametrize("name", RAW)
def test_hostile_msgpack_is_refused_without_memory(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, 1, {"a": torch.ones(1)}, {})
    (path / "manifest.msgpack").write_bytes(seal(RAW[name]))
    tracemalloc.start()
    try:
        assert len(verify(path)) == 1
        assert tracemalloc.get_traced_memory()[1] < 24 << 20
    finally:
        tracemalloc.stop()


def test_three_hundred_thousand_leaves_are_refused_before_they_are_read(tmp_path: Path) -> None:
    path = save(tmp_path, 1, {"a": torch.empty(0)}, {})
    forge(path, lambda b: b["leaves"].update({f"leaf/{i}": leaf(b) for i in range(300_000)}))
    size = (path / "manifest.msgpack").stat().st_size
    tracemalloc.start()
    try:
        assert "300001" in str(verify(path)[0])
        assert tracemalloc.get_traced_memory()[1] < size + (4 << 20)
    finally:
        tracemalloc.stop()
    with pytest.raises(ValueError, match="300000 leaves"):
        save(tmp_path, 2, {str(i): torch.empty(0) for i in range(300_000)}, {})


def test_an_enormous_manifest_is_refused_by_its_size(tmp_path: Path) -> None:
    path = save(tmp_path, 1, {"a": torch.ones(1)}, {})
    os.truncate(path / "manifest.msgpack", 1 << 40)
    tracemalloc.start()
    try:
        assert "1099511627776 bytes" in str(verify(path)[0])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("length", [2**62, 2**64 - 1, 2**40, 0])
def test_a_header_that_lies_about_its_length_is_refused(tmp_path: Path, length: int) -> None:
    path = save(tmp_path, 1, {"a": torch.ones(1000)}, {})
    file = path / "shard-00000-of-00001.safetensors"
    file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])
    tracemalloc.start()
    try:
        assert "its header is not the one" in str(verify(path)[0])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_pipe_or_a_link_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1, {"a": torch.ones(1000)}, {})
    for name in ("shard-00000-of-00001.safetensors", "manifest.msgpack"):
        (path / name).rename(tmp_path / "kept")
        (path / name).symlink_to(tmp_path / "kept")
        assert "missing" in str(verify(path)[0])
        (path / name).unlink()
        os.mkfifo(path / name)
        assert "missing" in str(verify(path)[0])
        (path / name).unlink()
        (path / name).mkdir()
        assert "missing" in str(verify(path)[0])
        (path / name).rmdir()
        (tmp_path / "kept").rename(path / name)
    assert verify(path) == []


def test_nothing_is_allocated_for_a_checkpoint_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, 1, {"a": torch.ones(1000)}, {})
    os.truncate(path / "shard-00000-of-00001.safetensors", 100)

    def refuse(*arguments: object, **named: object) -> None:
        raise AssertionError("allocated")

    monkeypatch.setattr(read_module.torch, "empty", refuse)
    with pytest.raises(DamagedCheckpoint, match="has 100 bytes, the manifest says"):
        load(path)


def test_a_leaf_in_pieces_loads_whole(tmp_path: Path) -> None:
    """Ranks will each write their part; the manifest already says how parts form a leaf."""
    whole = torch.arange(20.0).reshape(4, 5)
    parts = {"p00": whole[:1, :3], "p01": whole[:1, 3:], "p10": whole[1:, :3], "p11": whole[1:, 3:]}
    path = save(tmp_path, 1, parts, {}, file_bytes=30)
    offsets = {"p00": [0, 0], "p01": [0, 3], "p10": [1, 0], "p11": [1, 3]}

    def join(body: dict) -> None:
        pieces = []
        for name, offset in offsets.items():
            (file, tensor, _, shape, checksum) = body["leaves"][name]["pieces"][0]
            pieces.append([file, tensor, offset, shape, checksum])
        body["leaves"] = {"w": {"dtype": "F32", "shape": [4, 5], "pieces": pieces}}

    forge(path, join)
    assert verify(path) == []
    assert torch.equal(load(path)[0]["w"], whole)
    into = {"w": torch.zeros(5, 4).t()}
    load(path, into=into)
    assert torch.equal(into["w"], whole)
    assert len(read_manifest(path).leaves["w"].pieces) == 4
    forge(path, lambda b: b["leaves"]["w"]["pieces"].pop())
    with pytest.raises(DamagedCheckpoint, match="exactly once"):
        load(path)
    assert list(steps(tmp_path)) == [1]
