"""The fake mesh moves what torch's own operations move, and tells at once where its ranks part ways."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ironfn.mesh import fake, pairs
from ironfn.mesh.axis import Alone, Axis, Mesh

RANKS = st.integers(2, 4)
SHAPE = st.lists(st.integers(1, 3), min_size=1, max_size=3)


def values(ranks: int, shape: list[int], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(ranks)]


def on_ranks(function: Callable[[Axis, Tensor], Tensor], given: list[Tensor]) -> list[Tensor]:
    return fake.run(lambda mesh: function(mesh.tp, given[mesh.tp.index]), tp=len(given))


@settings(max_examples=30)
@given(ranks=RANKS, shape=SHAPE, seed=st.integers(0, 99))
def test_all_reduce_is_the_sum_with_the_same_bits_on_every_rank(ranks: int, shape: list[int], seed: int) -> None:
    given = values(ranks, shape, seed)
    before = [x.clone() for x in given]
    found = on_ranks(lambda axis, x: axis.backend.all_reduce(x), given)
    torch.testing.assert_close(found[0], torch.stack(given).sum(0))
    assert all(torch.equal(x, found[0]) for x in found)
    assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True)), "nobody's own tensor changed"
    assert len({x.data_ptr() for x in found}) == ranks, "every rank holds its own"


@settings(max_examples=30)
@given(data=st.data(), ranks=RANKS, shape=SHAPE)
def test_all_gather_and_broadcast(data: st.DataObject, ranks: int, shape: list[int]) -> None:
    dim, source = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(0, ranks - 1))
    given = values(ranks, shape, 1)
    for found in on_ranks(lambda axis, x: axis.backend.all_gather(x, dim), given):
        assert torch.equal(found, torch.cat(given, dim))
    for found in on_ranks(lambda axis, x: axis.backend.broadcast(x, source), given):
        assert torch.equal(found, given[source])


@settings(max_examples=30)
@given(data=st.data(), ranks=RANKS, shape=SHAPE)
def test_reduce_scatter_gives_each_rank_its_share_of_the_sum(data: st.DataObject, ranks: int, shape: list[int]) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    shape[dim] *= ranks
    given = values(ranks, shape, 2)
    shares = torch.stack(given).sum(0).chunk(ranks, dim)
    for found, share in zip(on_ranks(lambda axis, x: axis.backend.reduce_scatter(x, dim), given), shares, strict=True):
        torch.testing.assert_close(found, share)


@settings(max_examples=30)
@given(data=st.data(), ranks=RANKS, width=st.integers(1, 3))
def test_all_to_all_sends_each_slice_where_it_belongs(data: st.DataObject, ranks: int, width: int) -> None:
    """Any sizes, empty ones too: rank r holds what the others cut for r, in rank order."""
    sizes = [[data.draw(st.integers(0, 3)) for _ in range(ranks)] for _ in range(ranks)]
    given = [values(1, [sum(row), width], seed)[0] for seed, row in enumerate(sizes)]

    def swap(axis: Axis, x: Tensor) -> Tensor:
        return axis.backend.all_to_all(x, sizes[axis.index], [row[axis.index] for row in sizes])

    found = on_ranks(swap, given)
    for r, mine in enumerate(found):
        assert torch.equal(mine, torch.cat([x.split(row)[r] for x, row in zip(given, sizes, strict=True)]))

    def swap_back(axis: Axis, x: Tensor) -> Tensor:
        return axis.backend.all_to_all(x, [row[axis.index] for row in sizes], sizes[axis.index])

    for mine, before in zip(on_ranks(swap_back, found), given, strict=True):
        assert torch.equal(mine, before), "all-to-all is its own transpose, and its own inverse"


def test_one_rank_is_the_identity() -> None:
    x, alone = torch.randn(4, 3), Alone()
    for same in (
        alone.all_reduce(x),
        alone.all_gather(x, 0),
        alone.reduce_scatter(x, 1),
        alone.all_to_all(x, [4], [4]),
        alone.broadcast(x, 0),
        *fake.run(lambda mesh: pairs.leave(pairs.enter(x, mesh), mesh)),
    ):
        assert same is x


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_region_split_over_ranks_has_the_gradients_of_the_whole(sequence_parallel: bool, ranks: int) -> None:
    """y = relu(x a) b with the columns of a and the rows of b split, between `enter` and `leave`."""
    x, a, b, y = values(1, [2, 4, 6], 0) + values(1, [6, 8], 1) + values(1, [8, 6], 2) + values(1, [2, 4, 6], 3)
    leaves = [t.clone().requires_grad_() for t in (x, a, b)]
    expected = torch.relu(leaves[0] @ leaves[1]) @ leaves[2]
    x_grad, a_grad, b_grad = torch.autograd.grad(expected, leaves, y)

    def rank(mesh: Mesh) -> tuple[Tensor, ...]:
        at = mesh.tp.index

        def share(t: Tensor, dim: int) -> Tensor:
            return t.chunk(ranks, dim)[at].clone()

        mine = share(x, 1) if sequence_parallel else x.clone()
        mine, a_part, b_part = (t.requires_grad_() for t in (mine, share(a, 1), share(b, 0)))
        out = pairs.leave(torch.relu(pairs.enter(mine, mesh) @ a_part) @ b_part, mesh)
        return out.detach(), *torch.autograd.grad(out, (mine, a_part, b_part), share(y, 1) if sequence_parallel else y)

    found = [
        torch.stack(parts) for parts in zip(*fake.run(rank, tp=ranks, sequence_parallel=sequence_parallel), strict=True)
    ]
    for parts, whole in ((found[0], expected), (found[1], x_grad)):
        if sequence_parallel:
            torch.testing.assert_close(torch.cat(list(parts), 1), whole)
        else:
            assert all(torch.allclose(part, whole) for part in parts)
    torch.testing.assert_close(torch.cat(list(found[2]), 1), a_grad)
    torch.testing.assert_close(torch.cat(list(found[3]), 0), b_grad)


# Where ranks part ways.


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (lambda backend, x: backend.all_gather(x, 0), "all_gather"),
        (lambda backend, x: backend.all_reduce(x[:1]), r"\[1, 3\]"),
        (lambda backend, x: backend.all_reduce(x.double()), "float64"),
        (lambda backend, x: backend.broadcast(x, 1), "broadcast"),
    ],
)
def test_another_call_or_shape_or_dtype_is_told_with_the_rank(wrong: Callable, what: str) -> None:
    def rank(mesh: Mesh) -> Tensor:
        x = torch.ones(2, 3)
        return wrong(mesh.dp.backend, x) if mesh.dp.index == 2 else mesh.dp.backend.all_reduce(x)

    with pytest.raises(fake.MeshError, match=rf"of dp made.*rank 0 .* all_reduce.*rank 2 .*{what}"):
        fake.run(rank, dp=3)


def test_the_same_call_with_another_dim_or_source_is_told() -> None:
    x = torch.ones(2, 2)
    with pytest.raises(fake.MeshError, match=r"all_gather\(0\).*all_gather\(1\)"):
        fake.run(lambda mesh: mesh.dp.backend.all_gather(x, mesh.dp.index), dp=2)
    with pytest.raises(fake.MeshError, match=r"broadcast\(0\).*broadcast\(1\)"):
        fake.run(lambda mesh: mesh.dp.backend.broadcast(x, mesh.dp.index), dp=2)


def test_a_share_that_does_not_divide_is_told() -> None:
    with pytest.raises(fake.MeshError, match=r"\[5, 2\]: 5 does not divide by 2 along 0"):
        fake.run(lambda mesh: mesh.tp.backend.reduce_scatter(torch.ones(5, 2), 0), tp=2)


def test_a_rank_that_raises_wakes_the_others_and_is_the_one_heard() -> None:
    """The waiting ranks would wait for 60 s."""

    def rank(mesh: Mesh) -> Tensor:
        if mesh.dp.index == 1 and mesh.tp.index == 0:
            time.sleep(0.05)
            raise KeyError("my own fault")
        return mesh.tp.backend.all_reduce(mesh.dp.backend.all_reduce(torch.ones(1)))

    done = threading.Event()

    def watched() -> None:
        with pytest.raises(KeyError, match="my own fault"):
            fake.run(rank, dp=2, tp=2)
        done.set()

    thread = threading.Thread(target=watched, daemon=True)
    thread.start()
    assert done.wait(30)


def test_a_rank_that_leaves_early_is_told() -> None:
    def rank(mesh: Mesh) -> None:
        if mesh.dp.index == 0:
            mesh.dp.backend.all_reduce(torch.ones(1))

    with pytest.raises(fake.MeshError, match=r"rank 0 \(dp 0\) waits in all_reduce.*rank 1 \(dp 1\) has returned"):
        fake.run(rank, dp=2, timeout=0.2)


def test_every_rank_has_its_place_and_axes_of_one_rank_have_none_to_talk_to() -> None:
    def rank(mesh: Mesh) -> tuple[list[int], list[int]]:
        one = torch.tensor([mesh.dp.index * 10 + mesh.tp.index])
        return mesh.dp.backend.all_gather(one, 0).tolist(), mesh.tp.backend.all_gather(one, 0).tolist()

    assert fake.run(rank, dp=2, tp=3) == [
        ([t, 10 + t], [10 * d, 10 * d + 1, 10 * d + 2]) for d in (0, 1) for t in range(3)
    ]
    assert fake.run(lambda mesh: isinstance(mesh.ep.backend, Alone), dp=2) == [True, True]
