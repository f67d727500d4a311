"""Save and load on fake meshes: who writes what, what is refused, and how all ranks come to one verdict."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ironfn import tree
from ironfn.checkpoint import DISK, DamagedCheckpoint, Files, load, load_newest, prune, read_manifest, save, verify
from ironfn.checkpoint import write as write_module
from ironfn.layout.table import Placement, cut, shard
from ironfn.mesh import fake
from ironfn.mesh.agree import on_first
from ironfn.mesh.axis import Mesh
from ironfn.mesh.call import MeshError
from tests.faults import MemoryDisk, Unplugged, failing, recording

LAYOUT = {
    "params/w": cut("tp", 1),
    "params/b": Placement(),
    "opt/m": Placement((("tp", 1), ("dp", 0))),
    "opt/own": Placement(owner=1),
    "opt/count": Placement(),
}


def whole(step: int) -> dict:
    return {
        "params": {"w": torch.full((8, 6), float(step)), "b": torch.arange(3)},
        "opt": {
            "m": torch.arange(48.0).reshape(8, 6) + step,
            "own": torch.full((5, 4), step, dtype=torch.bfloat16),
            "count": torch.tensor(step),
        },
    }


def write(directory: Path, step: int, mesh: Mesh, files: Files = DISK) -> Path:
    mine = shard(whole(step), LAYOUT, mesh)
    return save(directory, step, mine, {"seed": 1}, layout=LAYOUT, mesh=mesh, file_bytes=150, files=files)


def on_two(function: Callable[[Mesh], Any]) -> list[Any]:
    return fake.run(function, dp=2, timeout=20)


def quiet(message: str) -> None:
    raise AssertionError(message)


def is_intact(path: Path, files: Files = DISK) -> bool:
    flat = tree.flatten(load(path, files=files)[0])
    right = tree.flatten(whole(int(path.name[5:])))
    return verify(path, files) == [] and all(torch.equal(leaf, right[p]) for p, leaf in flat.items())


def outcome(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        return error


ACTIONS: dict[str, Callable[[Path, Mesh, Files], Any]] = {
    "a new one": lambda directory, mesh, files: write(directory, 3, mesh, files),
    "the same step again": lambda directory, mesh, files: write(directory, 2, mesh, files),
    "save and prune": lambda directory, mesh, files: (
        write(directory, 3, mesh, files),
        on_first(mesh, lambda: prune(directory, keep=1, files=files)),
    ),
}


@pytest.mark.parametrize("name", ACTIONS)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_at_any_operation_of_any_rank_is_the_same_on_all(tmp_path: Path, name: str, rank: int) -> None:
    for place in range(1000):
        directory = tmp_path / str(place)
        on_two(lambda mesh, to=directory: [write(to, step, mesh) for step in (1, 2)])

        def attempt(mesh: Mesh, to: Path = directory, place: int = place) -> Any:
            files = failing(place, OSError(errno.ENOSPC, "injected")) if mesh.world.index == rank else DISK
            return outcome(lambda: ACTIONS[name](to, mesh, files))

        found = on_two(attempt)
        if not any(isinstance(each, Exception) for each in found):
            break
        for each in found:
            assert isinstance(each, OSError)
            assert each.errno == errno.ENOSPC
            assert f"rank {rank}: injected" in str(each)
        best = load_newest(directory, quiet)
        assert best is not None
        assert best.meta["step"] >= 2
        on_two(lambda mesh, to=directory: ACTIONS[name](to, mesh, DISK))  # nothing is in the next one's way
        assert all(is_intact(path) for path in directory.iterdir())
    assert place > (20 if rank == 0 else 5)


@pytest.mark.parametrize("name", ACTIONS)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_power_may_go_before_any_operation_of_any_rank(name: str, rank: int) -> None:
    directory = Path("/runs/a/checkpoints")
    for place in range(1000):
        disk = MemoryDisk()
        on_two(lambda mesh, disk=disk: [write(directory, step, mesh, disk.files) for step in (1, 2)])

        def attempt(mesh: Mesh, disk: MemoryDisk = disk, place: int = place) -> Any:
            # a machine without power takes all its ranks along: whoever lives on does nothing more
            dead = failing(place, Unplugged(), disk.files) if mesh.world.index == rank else disk.files
            return ACTIONS[name](directory, mesh, dead)

        try:
            on_two(attempt)
            break
        except Unplugged:
            pass
        for left in disk.after_a_cut():
            best = load_newest(directory, quiet, files=left.files)
            assert best is not None
            # between the two renames of a replacement there is the one before: tidying brings the old one back
            assert best.meta["step"] >= (1 if name == "the same step again" else 2)
            on_two(lambda mesh, left=left: ACTIONS[name](directory, mesh, left.files))
            names = left.files.names(directory)
            assert all(n.startswith("step-") for n in names)
            assert all(is_intact(directory / n, left.files) for n in names)
    assert place > (20 if rank == 0 else 5)


def test_only_rank_0_touches_the_directory(tmp_path: Path) -> None:
    seen: list[list[str]] = [[], []]

    def run(mesh: Mesh) -> None:
        for _ in range(2):
            write(tmp_path, 1, mesh, recording(seen[mesh.world.index]))

    on_two(run)
    assert set(seen[1]) == {"create", "write", "sync", "sync_directory"}
    assert {"mkdir", "rename", "unlink", "rmdir"} <= set(seen[0])


def test_what_many_hold_is_written_once_and_shared_out_by_bytes(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 2000, (60,), generator=generator).tolist()
    leaves = {f"l{i}": torch.full((size,), float(i)) for i, size in enumerate(sizes)}
    leaves |= {f"cut{i}": torch.full((4, 300 + i), float(i)) for i in range(8)}
    layout = {p: cut("tp", 0) if p.startswith("cut") else Placement() for p in leaves}

    def run(mesh: Mesh) -> Path:
        return save(tmp_path, 1, shard(leaves, layout, mesh), {}, layout=layout, mesh=mesh)

    path = fake.run(run, dp=3, tp=2, ep=1, timeout=20)[0]
    assert all(torch.equal(leaf, leaves[p]) for p, leaf in tree.flatten(load(path)[0]).items())
    sizes = [record.size for record in read_manifest(path).files.values()]
    assert len(sizes) == 6
    largest = max(leaf.nbytes for leaf in leaves.values())
    assert max(sizes) - min(sizes) <= largest
    assert sum(sizes) < sum(leaf.nbytes for leaf in leaves.values()) + 6 * 4000


def test_ranks_that_do_not_save_the_same_are_refused(tmp_path: Path) -> None:
    trees = [{"w": torch.ones(3)}, {"w": torch.ones(4)}]
    with pytest.raises(ValueError, match=r"ranks \[1\] do not save the same leaves"):
        on_two(lambda mesh: save(tmp_path, 1, trees[mesh.dp.index], {}, mesh=mesh))
    with pytest.raises(ValueError, match="not save the same"):
        on_two(lambda mesh: save(tmp_path, 1 + mesh.dp.index, trees[0], {}, mesh=mesh))
    layout = {"w": Placement(owner=1)}
    with pytest.raises(ValueError, match="rank 0: leaf 'w' is dp rank 1's alone, but rank 0 has it too"):
        on_two(lambda mesh: save(tmp_path, 1, trees[0], {}, layout=layout, mesh=mesh))
    with pytest.raises(ValueError, match="rank 1: leaf 'x' is 3, not a tensor"):
        on_two(lambda mesh: save(tmp_path, 1, {"x": 3} if mesh.dp.index else trees[0], {}, mesh=mesh))
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_share_no_file_system_are_told_so(tmp_path: Path) -> None:
    def run(mesh: Mesh) -> Path:
        mine = tmp_path / str(mesh.dp.index)
        (mine / ".tmp-step-00000001").mkdir(parents=True) if mesh.dp.index else None
        return save(mine, 1, {"w": torch.ones(3), "v": torch.ones(3)}, {}, mesh=mesh)

    with pytest.raises(OSError, match="the ranks have to share the file system") as caught:
        on_two(run)
    assert caught.value.errno == errno.ENOENT
    assert list((tmp_path / "0").iterdir()) == []


def test_a_disk_that_is_full_for_one_rank_is_told_with_all_that_is_needed(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"rank 0: the checkpoint needs [\d,]+ bytes and 1,000 are free"):
        on_two(lambda mesh: write(tmp_path, 1, mesh, Files(free=lambda path: 1000)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_finds_damaged_all_give_up(tmp_path: Path, rank: int) -> None:
    """Each rank reads what it needs: a flipped bit in what rank 1 alone needs is seen by rank 1 alone."""
    layout = {"m": cut("dp", 0)}
    for step in (1, 2):
        on_two(lambda mesh, step=step: save(tmp_path, step, {"m": torch.ones(2) * step}, {}, layout=layout, mesh=mesh))
    name = next(
        piece.file
        for piece in read_manifest(tmp_path / "step-00000002").leaves["m"].pieces
        if piece.offset == (2 * rank,)
    )
    data = bytearray((tmp_path / "step-00000002" / name).read_bytes())
    data[-1] ^= 1
    (tmp_path / "step-00000002" / name).write_bytes(data)

    def run(mesh: Mesh) -> tuple[int, list[float], list[str]]:
        told: list[str] = []
        into = {"m": torch.zeros(2)}
        found = load_newest(tmp_path, told.append, into=into, layout=layout, mesh=mesh)
        assert found is not None
        return found.meta["step"], into["m"].tolist(), told

    for step, values, told in on_two(run):
        assert (step, values) == (1, [1.0, 1.0])
        assert len(told) == 1
        assert f"rank {rank}: {name}: leaf 'm': its bytes do not match its checksum; trying step-00000001" in told[0]
    with pytest.raises(DamagedCheckpoint, match=f"rank {rank}: "):
        on_two(lambda mesh: load(tmp_path / "step-00000002", layout=layout, mesh=mesh))


def test_rank_0_says_which_checkpoints_there_are(tmp_path: Path) -> None:
    """A listing may be stale on another node: were each to choose for itself, they would load different steps."""
    for step in (1, 2):
        on_two(lambda mesh, step=step: write(tmp_path, step, mesh))
    stale = [Files(), Files(names=lambda path: ["step-00000001"])]

    def run(mesh: Mesh) -> Any:
        return load_newest(tmp_path, quiet, layout=LAYOUT, mesh=mesh, files=stale[mesh.dp.index])

    assert [found.meta["step"] for found in on_two(run)] == [2, 2]


def test_a_leaf_that_no_rank_takes_is_told(tmp_path: Path) -> None:
    save(tmp_path, 1, {"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(4)}, {})
    layouts = [{"a": Placement(owner=0)}, {"b": Placement(owner=1)}]  # as `state_layout` of each rank's own state is
    trees = [{"a": torch.zeros(4)}, {"b": torch.zeros(4)}]

    def run(mesh: Mesh) -> Any:
        mine = mesh.dp.index
        return load(tmp_path / "step-00000001", into=trees[mine], layout=layouts[mine], mesh=mesh)

    with pytest.raises(ValueError, match="does not fit the tree:\n  not in the tree that it is loaded into: c"):
        on_two(run)
    save(tmp_path, 1, {"a": torch.ones(4), "b": torch.ones(4)}, {})
    assert [sum(x.sum() for x in tree.leaves(found)) for found, _ in on_two(run)] == [4, 4]


def test_a_share_that_does_not_divide_is_refused_by_name(tmp_path: Path) -> None:
    path = save(tmp_path, 1, {"w": torch.ones(3, 4)}, {})
    with pytest.raises(ValueError, match="w has 3 along dimension 0, which 2 ranks of dp cannot share"):
        on_two(lambda mesh: load(path, layout={"w": cut("dp", 0)}, mesh=mesh))


def test_the_death_of_a_rank_is_a_mesh_error_and_leaves_nothing_half_visible(tmp_path: Path) -> None:
    on_two(lambda mesh: write(tmp_path, 1, mesh))

    def run(mesh: Mesh) -> Any:
        if mesh.dp.index == 1:
            return write(tmp_path, 2, mesh, failing(2, Unplugged()))
        found = outcome(lambda: write(tmp_path, 2, mesh))
        assert isinstance(found, MeshError)
        return None

    with pytest.raises(Unplugged):
        on_two(run)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert is_intact(tmp_path / "step-00000001")


@pytest.mark.parametrize("chunk", [16, 40, 96])
def test_boxes_are_read_in_chunks_whatever_their_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(write_module, "CHUNK", chunk)
    leaves = {"a": torch.randn(4, 6, 10, dtype=torch.float64), "b": torch.randn(1, 8, 4), "c": torch.randn(48)}
    path = save(tmp_path, 1, leaves, {})
    layout = {"a": Placement((("dp", 1), ("tp", 2))), "b": Placement((("tp", 2), ("dp", 1))), "c": cut("dp", 0)}

    def run(mesh: Mesh) -> None:
        right = shard(leaves, layout, mesh)
        into = {"a": torch.zeros(5, 3, 4, dtype=torch.float64).permute(2, 1, 0), "b": torch.zeros(1, 4, 2)}
        into["c"] = torch.zeros(24)
        for found in (load(path, layout=layout, mesh=mesh)[0], load(path, into=into, layout=layout, mesh=mesh)[0]):
            assert all(torch.equal(found[p], right[p]) for p in right)  # type: ignore[arg-type]

    fake.run(run, dp=2, tp=2, timeout=20)


MEMORY = """
import resource, sys, torch
from pathlib import Path
from ironfn.checkpoint import load, save
from ironfn.layout.table import cut
from ironfn.mesh.axis import Axis, Mesh
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
path = Path(sys.argv[1])
if sys.argv[2] == "save":
    save(path, 1, {"a": torch.zeros(4096, 16384)}, {})
else:
    mesh = Mesh(tp=Axis("tp", 16, 5))
    begin = peak()
    share = load(path / "step-00000001", layout={"a": cut("tp", int(sys.argv[2]))}, mesh=mesh)[0]["a"]
    print(peak() - begin, share.nbytes)
"""


@pytest.mark.parametrize("dim", ["0", "1"])
def test_a_rank_never_holds_a_whole_leaf_of_which_it_wants_a_share(tmp_path: Path, dim: str) -> None:
    for argument in ("save", dim):
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, tmp_path, argument], capture_output=True, text=True, check=True
        )
    used, share = map(int, done.stdout.split())
    assert share == 16 << 20
    assert used < share + (24 << 20)  # where the whole leaf has 256 MiB
