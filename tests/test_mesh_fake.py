"""The fake mesh moves what torch's own operations move, and tells at once where its ranks part ways."""

from __future__ import annotations

import contextlib
import threading
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


def test_a_rank_that_raises_is_the_one_heard_and_the_others_stop() -> None:
    ends: list[str] = []

    def rank(mesh: Mesh) -> Tensor:
        if mesh.dp.index == 1 and mesh.tp.index == 0:
            raise KeyError("my own fault")
        try:
            return mesh.tp.backend.all_reduce(mesh.dp.backend.all_reduce(torch.ones(1)))
        except fake.MeshError as error:
            ends.append(str(error))
            raise

    with pytest.raises(KeyError, match="my own fault"):
        fake.run(rank, dp=2, tp=2)
    assert len(ends) == 3
    assert ends[0] == (
        "rank 2 (dp 1, tp 0) raised: rank 0 (dp 0, tp 0) waits in all_reduce of float32 [1] on dp; rank 1 (dp 0, tp 1) "
        "waits in all_reduce of float32 [1] on dp; rank 2 (dp 1, tp 0) raised KeyError: 'my own fault'; "
        "rank 3 (dp 1, tp 1) computes"
    )


def test_a_rank_that_leaves_early_is_told_at_once() -> None:
    """Whether it leaves before or after the other comes."""
    for early in (0, 1):

        def rank(mesh: Mesh, early: int = early) -> None:
            if mesh.dp.index != early:
                mesh.dp.backend.all_reduce(torch.ones(1))

        told = rf"rank {1 - early} \(dp {1 - early}\) waits in all_reduce of float32 \[1\] on dp"
        with pytest.raises(fake.MeshError, match=told) as raised:
            fake.run(rank, dp=2, timeout=600)
        assert f"rank {early} (dp {early}) has returned" in str(raised.value)


def test_ranks_that_wait_on_different_axes_are_told_at_once() -> None:
    def rank(mesh: Mesh) -> Tensor:
        axis = mesh.dp if mesh.world.index in (0, 3) else mesh.tp  # 0 for 2, 1 for 0, 2 for 3, 3 for 1
        return axis.backend.all_reduce(torch.ones(2))

    with pytest.raises(fake.MeshError, match=r"every rank waits.*rank 0 .* on dp; .*rank 2 \(dp 1, tp 0\).* on tp"):
        fake.run(rank, dp=2, tp=2, timeout=600)
    with pytest.raises(fake.MeshError, match=r"every rank waits.* on dp; .* on world"):
        fake.run(lambda mesh: [mesh.dp, mesh.world][mesh.dp.index].backend.all_reduce(torch.ones(1)), dp=2, timeout=600)


def test_a_mesh_that_is_broken_stays_so() -> None:
    def rank(mesh: Mesh) -> Tensor:
        with contextlib.suppress(fake.MeshError):
            mesh.dp.backend.all_reduce(torch.ones(1 + mesh.dp.index))
        return mesh.dp.backend.all_reduce(torch.ones(1))

    with pytest.raises(fake.MeshError, match=r"different calls.*float32 \[1\].*float32 \[2\]"):
        fake.run(rank, dp=2)


def test_a_failure_inside_a_backward_pass_is_told_too() -> None:
    def rank(mesh: Mesh) -> None:
        x = torch.ones(2 + mesh.tp.index, requires_grad=True)
        pairs.copy(x, mesh.tp).sum().backward()

    with pytest.raises(fake.MeshError, match=r"all_reduce of float32 \[2\].*all_reduce of float32 \[3\]"):
        fake.run(rank, tp=2)


def test_a_rank_that_never_comes_is_left_behind() -> None:
    stop = threading.Event()
    with pytest.raises(fake.MeshError, match=r"no collective for 0.1 s: .*rank 1 \(dp 1\) computes"):
        fake.run(lambda m: stop.wait(60) if m.dp.index else m.dp.backend.all_reduce(torch.ones(1)), dp=2, timeout=0.1)
    stop.set()


def test_a_rank_may_write_at_once_into_what_it_handed_over_and_into_what_it_got() -> None:
    def rank(mesh: Mesh) -> list[Tensor]:
        b, out = mesh.dp.backend, []
        for op in (
            b.all_reduce,
            lambda x: b.all_gather(x, 0),
            lambda x: b.reduce_scatter(x, 0),
            lambda x: b.all_to_all(x, [1, 1, 1], [1, 1, 1]),
            lambda x: b.broadcast(x, 1),
            lambda x: b.all_reduce(x.clone(), donate=True),
        ):
            x = torch.arange(3.0) + mesh.dp.index
            y = op(x)
            out.append(y.clone())
            x += 100
            assert torch.equal(y, out[-1])
            y -= 1000
            assert torch.equal(x, torch.arange(3.0) + mesh.dp.index + 100)
        return out

    first, second, third = fake.run(rank, dp=3)
    assert first[0].tolist() == [3, 6, 9]
    assert first[1].tolist() == [0, 1, 2, 1, 2, 3, 2, 3, 4]
    assert [r[2].tolist() for r in (first, second, third)] == [[3], [6], [9]]
    assert [r[3].tolist() for r in (first, second, third)] == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
    assert first[4].tolist() == [1, 2, 3]
    assert third[5].tolist() == [3, 6, 9]


def test_a_donated_buffer_is_written() -> None:
    """As a real back end does: a caller that reads it again is found out here."""

    def rank(mesh: Mesh) -> float:
        x = torch.ones(1)
        mesh.dp.backend.all_reduce(x, donate=True)
        return float(x)

    assert fake.run(rank, dp=2) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda b: b.all_gather(torch.ones(2), 1), r"there is no dimension 1"),
        (lambda b: b.all_gather(torch.ones(()), 0), r"there is no dimension 0"),
        (lambda b: b.broadcast(torch.ones(2), 2), r"there is no rank 2 among 2"),
        (lambda b: b.all_to_all(torch.ones(2), [1, 2], [1, 1]), r"sizes to send add up to 3 slices"),
        (lambda b: b.all_to_all(torch.ones(2), [2], [1, 1]), r"send and receive need 2 sizes"),
        (lambda b: b.all_to_all(torch.ones(2), [3, -1], [1, 1]), r"send and receive need 2 sizes"),
        (lambda b: b.all_reduce(torch.ones(2, dtype=torch.bool)), r"all_reduce of bool \[2\]: this dtype has no sum"),
        (lambda b: b.all_reduce(torch.ones((1,) * 9)), r"at most 8 dimensions"),
    ],
    ids=["dim", "0-d", "source", "sum", "count", "negative", "bool", "dims"],
)
def test_a_call_that_is_wrong_by_itself_is_refused(call: Callable, why: str) -> None:
    with pytest.raises(fake.MeshError, match=why):
        fake.run(lambda mesh: call(mesh.dp.backend), dp=2)


def test_sizes_that_do_not_pair_up_are_told() -> None:
    with pytest.raises(fake.MeshError, match=r"all_to_all\(send \[1, 1\], receive \[1, 1\]\).*send \[2, 0\]"):
        fake.run(
            lambda m: m.dp.backend.all_to_all(torch.ones(2), [[1, 1], [2, 0]][m.dp.index], [1, 1]),
            dp=2,
        )


def test_every_rank_has_its_place_and_axes_of_one_rank_have_none_to_talk_to() -> None:
    def rank(mesh: Mesh) -> tuple[list[int], list[int]]:
        one = torch.tensor([mesh.dp.index * 10 + mesh.tp.index])
        return mesh.dp.backend.all_gather(one, 0).tolist(), mesh.tp.backend.all_gather(one, 0).tolist()

    assert fake.run(rank, dp=2, tp=3) == [
        ([t, 10 + t], [10 * d, 10 * d + 1, 10 * d + 2]) for d in (0, 1) for t in range(3)
    ]
    assert fake.run(lambda mesh: isinstance(mesh.ep.backend, Alone), dp=2) == [True, True]
