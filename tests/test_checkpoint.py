"""Hold save and load to their promise: what comes back is, bit for bit, what was saved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ironfn import checkpoint, tree
from ironfn.checkpoint import load, load_newest, newest, prune, read_manifest, save, steps, verify
from ironfn.checkpoint import write as write_module
from ironfn.checkpoint.plan import DTYPES


def every_dtype() -> dict:
    generator = torch.Generator().manual_seed(0)
    leaves = {}
    for dtype, name in DTYPES.items():
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (3, 5, 8), dtype=torch.uint8, generator=generator)
        leaves[name] = raw.view(dtype) if dtype != torch.bool else raw.to(torch.bool)
    return leaves


def state() -> dict:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    return {
        "params": every_dtype(),
        "opt": {
            "count": torch.tensor(7),
            "scale": torch.tensor(-0.0, dtype=torch.float64),
            "nan": torch.tensor([0x7FC00001, 0x7F800001, -1], dtype=torch.int32).view(torch.float32),
            "transposed": base.t(),
            "strided": base[::2, 1::3],
            "one": base[0, :2:2],
            "expanded": torch.tensor([1.5]).expand(3, 4),
            "empty": torch.empty(0, 3, dtype=torch.bfloat16),
            "gradient": torch.nn.Parameter(torch.ones(3) / 3),
        },
        "extra": {},
        "deep": {"er": {"none": {}}},
    }


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    a, b = (torch.empty(x.shape, dtype=x.dtype).copy_(x.detach()).reshape(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


def assert_same(a: dict, b: dict) -> None:
    left, right = tree.flatten(a), tree.flatten(b)
    assert list(left) == list(right)
    assert [path for path in left if not same_bits(left[path], right[path])] == []


def quiet(message: str) -> None:
    raise AssertionError(f"unexpected warning: {message}")


def test_a_tree_comes_back_bit_for_bit(tmp_path: Path) -> None:
    saved = state()
    path = save(tmp_path / "runs" / "a", 100, saved, {"seed": 3, "spec": {"model": {"width": 8, "norm": None}}})
    assert path == tmp_path / "runs" / "a" / "step-00000100"
    loaded, meta = load(path)
    assert_same(saved, loaded)
    assert loaded["extra"] == {}
    assert loaded["deep"] == {"er": {"none": {}}}
    assert meta == {"step": 100, "seed": 3, "spec": {"model": {"width": 8, "norm": None}}}
    assert verify(path) == []
    assert sorted(p.name for p in path.parent.iterdir()) == ["step-00000100"]


def test_the_safetensors_library_reads_the_files(tmp_path: Path) -> None:
    saved = state()
    path = save(tmp_path, 0, saved, {}, file_bytes=700)
    read: dict = {}
    for file in sorted(path.glob("*.safetensors")):
        read |= safetensors.torch.load_file(file)
    assert len(list(path.glob("*.safetensors"))) > 1
    flat = tree.flatten(saved)
    assert read.keys() == flat.keys()
    assert [p for p in flat if not same_bits(flat[p], read[p])] == []


@pytest.mark.parametrize("file_bytes", [1, 700, 2 << 30])
def test_any_split_into_files_gives_the_same_tree(tmp_path: Path, file_bytes: int) -> None:
    saved = state()
    path = save(tmp_path, 5, saved, {}, file_bytes=file_bytes)
    assert_same(saved, load(path)[0])
    for record in read_manifest(path).files.values():
        assert file_bytes < 700 or record.size < file_bytes + 2000


def test_large_leaves_of_every_layout_stream_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_module, "CHUNK", 96)
    base = torch.randn(6, 7, 10, dtype=torch.float64)
    saved = {
        "plain": base,
        "transposed": base.permute(2, 0, 1),
        "one": base[:1].transpose(1, 2),
        "expanded": base[0, 0].expand(50, 10),
        "narrow": base[:, 2:5, ::2],
        "negated": torch.randn(4, 60, dtype=torch.complex64).conj().imag,
    }
    assert saved["negated"].is_neg()
    assert_same(saved, load(save(tmp_path, 1, saved, {}))[0])


def test_one_tensor_under_two_names_is_stored_once_and_stays_one(tmp_path: Path) -> None:
    weight = torch.randn(50, 40)
    saved = {"embed": weight, "head": weight, "also": weight.view(50, 40), "turned": weight.t(), "row": weight[0]}
    path = save(tmp_path, 1, saved, {})
    assert sum(f.size for f in read_manifest(path).files.values()) < 2 * weight.nbytes + 1000 + weight[0].nbytes
    loaded, _ = load(path)
    assert_same(saved, loaded)
    assert loaded["head"] is loaded["embed"]
    assert loaded["turned"].data_ptr() != loaded["embed"].data_ptr()
    into = tree.map(torch.zeros_like, saved)  # here they are separate tensors: each is filled
    load(path, into=into)
    assert_same(saved, into)


def test_into_fills_in_place_whatever_the_strides(tmp_path: Path) -> None:
    saved = {"a": torch.randn(4, 6), "b": {"c": torch.randn(3), "z": torch.tensor(2.0), "e": torch.empty(0)}}
    path = save(tmp_path, 1, saved, {})
    into = {
        "a": torch.zeros(6, 4).t(),
        "b": {"c": torch.nn.Parameter(torch.zeros(3)), "z": torch.tensor(0.0), "e": torch.empty(0)},
    }
    before = tree.leaves(into)
    back, _ = load(path, into=into)
    assert back is into
    assert all(x is y for x, y in zip(before, tree.leaves(into), strict=True))
    assert_same(saved, into)


def test_into_names_every_leaf_that_does_not_fit_and_changes_none(tmp_path: Path) -> None:
    saved = {"same": torch.ones(2), "gone": torch.ones(2), "shape": torch.ones(2), "dtype": torch.ones(2)}
    path = save(tmp_path, 1, saved, {})
    into = {
        "same": torch.zeros(2),
        "new": {"er": torch.zeros(1)},
        "shape": torch.zeros(1, 2),
        "dtype": torch.zeros(2, dtype=torch.bfloat16),
    }
    with pytest.raises(ValueError, match="does not fit") as caught:
        load(path, into=into)
    lines = str(caught.value).splitlines()[1:]
    assert [line.split(":")[0].strip() for line in lines].count("different") == 2
    assert any("missing in the checkpoint: new/er" in line for line in lines)
    assert any("not in the tree that it is loaded into: gone" in line for line in lines)
    assert len(lines) == 4
    assert torch.equal(into["same"], torch.zeros(2))


def test_a_part_of_the_tree_can_be_loaded(tmp_path: Path) -> None:
    path = save(tmp_path, 1, state(), {}, file_bytes=700)
    loaded, _ = load(path, keep=lambda p: p.startswith("opt/"))
    assert_same({"opt": state()["opt"]}, loaded)


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ({"a/b": torch.ones(1)}, "without '/'"),
        ({"": torch.ones(1)}, "leaf path ''"),
        ({"a\n": torch.ones(1)}, "printable"),
        ({"__metadata__": torch.ones(1)}, "__metadata__"),
        ({"a" * 1025: torch.ones(1)}, "at most 1024"),
        ({3: torch.ones(1)}, "name 3"),
        ({"c": torch.ones(1, dtype=torch.complex64)}, "complex64"),
        ({"m": torch.ones(1, device="meta")}, "meta"),
        ({"s": torch.ones(2, 2).to_sparse()}, "sparse"),
        ({"d": torch.ones([1] * 17)}, "17 dims"),
        ({"f": 1.0}, "'f'"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(tmp_path: Path, bad: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        save(tmp_path, 1, bad, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("meta", [{"x": object()}, {"x": 2**70}, {"x": {1: 2}}, {"step": 2}, {"x": [0] * 5000}])
def test_meta_that_cannot_be_stored_is_refused(tmp_path: Path, meta: dict) -> None:
    with pytest.raises(ValueError, match="meta"):
        save(tmp_path, 1, {"a": torch.ones(1)}, meta)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 1, {"a": torch.zeros(3)}, {})
    path = save(tmp_path, 1, {"a": torch.ones(3)}, {})
    assert torch.equal(load(path)[0]["a"], torch.ones(3))
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_the_newest_keep_and_the_multiples_stay(tmp_path: Path) -> None:
    for step in range(0, 100, 10):
        save(tmp_path, step, {"a": torch.tensor(step)}, {})
    assert list(steps(tmp_path)) == list(range(0, 100, 10))
    gone = prune(tmp_path, keep=2, keep_every=40)
    assert [p.name for p in gone] == [f"step-{s:08d}" for s in (70, 60, 50, 30, 20, 10)]
    assert list(steps(tmp_path)) == [0, 40, 80, 90]
    assert prune(tmp_path, keep=1) == [
        tmp_path / "step-00000080",
        tmp_path / "step-00000040",
        tmp_path / "step-00000000",
    ]
    assert load(tmp_path / "step-00000090")[0]["a"] == 90
    with pytest.raises(ValueError, match="keep the newest 0"):
        prune(tmp_path, keep=0)


def test_a_damaged_checkpoint_does_not_push_a_good_one_out(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, {"a": torch.tensor(step)}, {})
    (tmp_path / "step-00000003" / "manifest.msgpack").unlink()
    assert prune(tmp_path, keep=1) == [tmp_path / "step-00000001"]
    assert list(steps(tmp_path)) == [2, 3]


def test_the_newest_whole_one_is_taken_and_the_damaged_told(tmp_path: Path) -> None:
    assert newest(tmp_path / "nothing", quiet) is None
    assert load_newest(tmp_path, quiet) is None
    for step in (1, 2, 100_000_000):
        save(tmp_path, step, {"a": torch.tensor(step)}, {})
    (tmp_path / "step-00000099.bak").mkdir()
    assert newest(tmp_path, quiet) == tmp_path / "step-100000000"
    (tmp_path / "step-100000000" / "shard-00000-of-00001.safetensors").unlink()
    told: list[str] = []
    assert newest(tmp_path, told.append) == tmp_path / "step-00000002"
    assert len(told) == 1
    assert "shard-00000-of-00001.safetensors: missing" in told[0]
    assert "trying step-00000002" in told[0]
    found = load_newest(tmp_path, told.append)
    assert found is not None
    assert (found.path.name, found.meta["step"], int(found.tree["a"])) == ("step-00000002", 2, 2)  # type: ignore[arg-type]


def test_only_damaged_checkpoints_is_an_error_unless_a_restart_is_asked_for(tmp_path: Path) -> None:
    for step in (1, 2):
        (save(tmp_path, step, {"a": torch.tensor(step)}, {}) / "manifest.msgpack").write_bytes(b"")
    told: list[str] = []
    with pytest.raises(checkpoint.DamagedCheckpoint, match="none of the 2 checkpoints"):
        newest(tmp_path, told.append)
    assert len(told) == 2
    assert newest(tmp_path, told.append, restart=True) is None
    with pytest.raises(checkpoint.DamagedCheckpoint):
        load_newest(tmp_path, told.append)


def test_leftovers_of_a_death_are_removed_by_the_next_save(tmp_path: Path) -> None:
    (tmp_path / ".tmp-step-00000007").mkdir()
    (tmp_path / ".tmp-step-00000007" / "shard-00000-of-00001.safetensors").write_bytes(b"half")
    (tmp_path / ".tmp-mine").mkdir()  # not a name of ours: left alone
    save(tmp_path, 8, {"a": torch.ones(1)}, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == [".tmp-mine", "step-00000008"]


def test_a_newer_format_is_not_taken_for_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, {"a": torch.ones(1)}, {})
    with monkeypatch.context() as patch:
        patch.setattr("ironfn.checkpoint.sealed.VERSION", 2)
        save(tmp_path, 2, {"a": torch.ones(1)}, {})
    with pytest.raises(ValueError, match="version 2 is not 1"):
        newest(tmp_path, quiet)


def test_neither_names_nor_listing_nor_checking_need_torch() -> None:
    code = "import sys, ironfn.checkpoint as c; c.verify, c.newest, c.steps; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


MEMORY = """
import resource, sys, torch
from pathlib import Path
from ironfn.checkpoint import load, save
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
base = torch.ones(4, 8 << 20)
tree = {"plain": base, "turned": base.t(), "wide": base.t().unsqueeze(0), "half": base[:, ::2]}
save(Path(sys.argv[1]), 1, {"a": base[0, :10]}, {})
load(Path(sys.argv[1]) / "step-00000001")
begin = peak()
save(Path(sys.argv[1]), 2, tree, {})
saved = peak()
save(Path(sys.argv[1]), 3, {"plain": base}, {})
load(Path(sys.argv[1]) / "step-00000003", into={"plain": base})
filled = peak()
print(saved - begin, filled - saved, base.nbytes)
"""


def test_no_second_copy_of_the_tensors_is_made(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", MEMORY, tmp_path], capture_output=True, text=True, check=True)
    saving, filling, leaf = map(int, done.stdout.split())
    assert leaf == 128 << 20
    assert saving < 64 << 20  # a few chunks, where a copy of one leaf would be 128 MiB
    assert filling < 64 << 20
