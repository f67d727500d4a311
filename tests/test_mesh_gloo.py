"""Processes joined by gloo move what torch's own operations move, and what the fake group moves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ironfn.mesh import fake, processes
from ironfn.mesh.axis import Mesh
from tests import gloo

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
MOVED = (*DTYPES, torch.bool, torch.int16, torch.uint16, torch.complex64, torch.float8_e4m3fn)


def given(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return small whole numbers: their sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 5, shape, generator=generator).to(dtype)


def everything(mesh: Mesh) -> dict[str, Tensor]:
    """Make each collective with every dtype, along every dimension, with empty, 0-d and strided tensors."""
    rank, n, b = mesh.world.index, mesh.world.size, mesh.world.backend
    out: dict[str, Tensor] = {}
    for dtype in MOVED:
        x = given(rank, (2, 3, n), dtype)
        for dim in (0, 1, -1):
            out[f"gather {dim} {dtype}"] = b.all_gather(x, dim)
        out[f"broadcast {dtype}"] = b.broadcast(x, n - 1)
        send = [(rank + r) % 3 for r in range(n)]  # some are 0
        rows = given(rank, (sum(send), 2), dtype)
        out[f"exchange {dtype}"] = b.all_to_all(rows, send, [(rank + r) % 3 for r in range(n)])
    for dtype in DTYPES:
        x = given(rank, (2, 3, 2 * n), dtype)
        out[f"sum {dtype}"] = b.all_reduce(x)
        out[f"strided sum {dtype}"] = b.all_reduce(x.mT)
        out[f"long sum {dtype}"] = b.all_reduce(given(rank, (3, 30_000), dtype))
        out[f"donated {dtype}"] = b.all_reduce(x.clone(), donate=True)
        out[f"share {dtype}"] = b.reduce_scatter(x, -1)
        out[f"strided share {dtype}"] = b.reduce_scatter(x.movedim(-1, 0), 0)
        out[f"0-d {dtype}"] = b.all_reduce(torch.ones((), dtype=dtype))
    none = torch.empty(0, 3)
    out["empty"] = torch.stack([b.all_reduce(none).sum(), b.all_gather(none, 0).sum(), b.broadcast(none, 1).sum()])
    out["empty exchange"] = b.all_to_all(none, [0] * n, [0] * n)
    out["empty share"] = b.reduce_scatter(none, 0)
    out["0-d broadcast"] = b.broadcast(torch.tensor(rank), 1)
    return out


@pytest.mark.parametrize(("n", "few"), [(2, 8), (3, 8), (3, 2), (4, 8)])
def test_every_collective_gives_what_the_fake_group_gives(n: int, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake group is held to torch's cat, sum and chunk in its own tests."""
    monkeypatch.setattr(processes, "FEW", few)  # how many ranks send each other small tensors directly
    for real, imitated in zip(gloo.world(n, everything), fake.run(everything, dp=n), strict=True):
        assert list(real) == list(imitated)
        for name in real:
            assert real[name].dtype == imitated[name].dtype, name
            assert real[name].shape == imitated[name].shape, name
            assert real[name].contiguous().flatten().view(torch.uint8).tolist() == (
                imitated[name].contiguous().flatten().view(torch.uint8).tolist()
            ), name


def test_ranks_stand_where_the_fake_ones_stand() -> None:
    def places(mesh: Mesh) -> list[list[int]]:
        me = torch.tensor([mesh.world.index])
        axes = [mesh.dp, mesh.ep, mesh.tp]
        return [[axis.index, *axis.backend.all_gather(me, 0).tolist()] for axis in axes]

    assert gloo.world(4, places, dp=2, tp=2) == fake.run(places, dp=2, tp=2)
    assert gloo.world(4, places, ep=2, tp=2) == fake.run(places, ep=2, tp=2)
    assert gloo.world(1, lambda mesh: (mesh.world.size, mesh.sequence_parallel), sequence_parallel=True) == [(1, True)]


def test_a_mesh_that_does_not_fit_the_world_is_refused() -> None:
    with pytest.raises(gloo.RankError, match=r"dp 2 x tp 2 x ep 1 has 4 ranks, and there are 2 processes: set mesh.dp"):
        gloo.world(2, lambda mesh: None, dp=2, tp=2)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_sum_has_the_same_bits_on_every_rank(n: int) -> None:
    """What is replicated stays so, whatever order gloo adds in. Short sums and shares are added in rank order."""

    def rank(mesh: Mesh) -> list[Tensor]:
        given = [torch.randn(k, generator=torch.Generator().manual_seed(mesh.dp.index)) for k in (1, 7, 24_000)]
        return [mesh.dp.backend.all_reduce(x) for x in given] + [mesh.dp.backend.reduce_scatter(given[2], 0)]

    found = gloo.world(n, rank)
    imitated = fake.run(rank, dp=n)
    for mine, theirs in zip(found, imitated, strict=True):
        for x, first, other in zip(mine[:3], found[0], theirs, strict=False):
            assert torch.equal(x, first)
            torch.testing.assert_close(x, other)
        assert all(torch.equal(mine[i], theirs[i]) for i in (0, 1, 3))


def test_a_rank_may_write_at_once_into_what_it_handed_over_and_into_what_it_got() -> None:
    def rank(mesh: Mesh) -> list[Tensor]:
        b, out = mesh.dp.backend, []
        for op in (
            b.all_reduce,
            lambda x: b.all_gather(x, 0),
            lambda x: b.reduce_scatter(x, 0),
            lambda x: b.all_to_all(x, [1, 1, 1], [1, 1, 1]),
            lambda x: b.broadcast(x, 1),
        ):
            x = torch.arange(3.0) + mesh.dp.index
            y = op(x)
            out.append(y.clone())
            x += 100
            assert torch.equal(y, out[-1])
            y -= 1000
            assert torch.equal(x, torch.arange(3.0) + mesh.dp.index + 100)
        return out

    for mine, theirs in zip(gloo.world(3, rank), fake.run(rank, dp=3), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(mine, theirs, strict=True))


def test_a_donated_buffer_holds_the_sum() -> None:
    def rank(mesh: Mesh) -> tuple[bool, float]:
        x = torch.ones(50_000)
        return mesh.dp.backend.all_reduce(x, donate=True).data_ptr() == x.data_ptr(), float(x.sum())

    assert gloo.world(2, rank) == fake.run(rank, dp=2) == [(True, 100_000.0)] * 2


def test_nothing_of_torch_distributed_is_set_up_for_the_process() -> None:
    """A program that has process groups of its own keeps them, and needs none."""
    assert gloo.world(2, lambda mesh: torch.distributed.is_initialized()) == [False, False]


def test_without_the_comparison_the_results_are_the_same() -> None:
    def rank(mesh: Mesh) -> Tensor:
        return mesh.dp.backend.all_gather(mesh.dp.backend.all_reduce(torch.ones(2)), 0)

    assert torch.equal(gloo.world(2, rank, check=False)[0], torch.full((4,), 2.0))
