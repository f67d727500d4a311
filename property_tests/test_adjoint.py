"""The backward of every differentiable pair is its transpose: ⟨f x, y⟩ = ⟨x, fᵀ y⟩, the products summed over ranks.

A function on a mesh maps the tuple of every rank's x to the tuple of every rank's y; its backward maps a tuple of
cotangents back. A replicated value (what `copy` takes, what `reduce` returns) is one vector of its space however many
ranks hold it: it is counted once.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ironfn.mesh import fake, pairs
from ironfn.mesh.axis import Mesh
from tests import gloo

RANKS = st.integers(1, 4)


@frozen
class Case:
    """A function on the tp axis with this rank's input shape, and whether its two sides are replicated."""

    function: Callable[[Tensor, Mesh], Tensor]
    shapes: tuple[tuple[int, ...], ...]
    one_input: bool = False
    one_output: bool = False
    sequence_parallel: bool = False


def noise(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def both_ways(case: Case, mesh: Mesh) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, f x, y and fᵀ y on this rank."""
    rank = mesh.tp.index
    x = noise(case.shapes[rank], 0 if case.one_input else rank).requires_grad_()
    out = case.function(x, mesh)
    y = noise(tuple(out.shape), 99 if case.one_output else 100 + rank)
    (back,) = torch.autograd.grad(out, x, y)
    return x.detach(), out.detach(), y, back


def holds(case: Case, ranks: list[tuple[Tensor, Tensor, Tensor, Tensor]]) -> None:
    forward = [float((out * y).sum()) for _, out, y, _ in ranks]
    backward = [float((x * back).sum()) for x, _, _, back in ranks]
    left = forward[0] if case.one_output else sum(forward)
    right = backward[0] if case.one_input else sum(backward)
    assert left == pytest.approx(right, rel=1e-12, abs=1e-12)
    if case.one_input:
        assert all(torch.equal(back, ranks[0][3]) for *_, back in ranks), "one value has one gradient"
    if case.one_output:
        assert all(torch.equal(out, ranks[0][1]) for _, out, _, _ in ranks), "one value is the same everywhere"


def on_fake(case: Case) -> None:
    holds(case, fake.run(lambda m: both_ways(case, m), tp=len(case.shapes), sequence_parallel=case.sequence_parallel))


def along(data: st.DataObject, ranks: int, cut: bool) -> tuple[int, tuple[int, ...]]:
    """Draw a dimension and a shape, empty ones too; ``cut``: the ranks can share that dimension."""
    shape = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4), "shape")
    dim = data.draw(st.integers(-len(shape), len(shape) - 1), "dim")
    shape[dim] *= ranks if cut else 1
    return dim, tuple(shape)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), ranks=RANKS)
def test_copy_and_reduce_are_transposes(data: st.DataObject, ranks: int) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 3), max_size=4), "shape"))
    on_fake(Case(lambda x, mesh: pairs.copy(x, mesh.tp), (shape,) * ranks, one_input=True))
    on_fake(Case(lambda x, mesh: pairs.reduce(x, mesh.tp), (shape,) * ranks, one_output=True))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), ranks=RANKS)
def test_gather_and_scatter_are_transposes(data: st.DataObject, ranks: int) -> None:
    dim, shape = along(data, ranks, cut=False)
    on_fake(Case(lambda x, mesh: pairs.gather(x, mesh.tp, dim), (shape,) * ranks))
    dim, shape = along(data, ranks, cut=True)
    on_fake(Case(lambda x, mesh: pairs.scatter(x, mesh.tp, dim), (shape,) * ranks))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), ranks=RANKS, width=st.integers(0, 3))
def test_exchange_is_its_own_transpose(data: st.DataObject, ranks: int, width: int) -> None:
    sizes = [[data.draw(st.integers(0, 3)) for _ in range(ranks)] for _ in range(ranks)]

    def swap(x: Tensor, mesh: Mesh) -> Tensor:
        return pairs.exchange(x, mesh.tp, sizes[mesh.tp.index], [row[mesh.tp.index] for row in sizes])

    on_fake(Case(swap, tuple((sum(row), width) for row in sizes)))


@settings(max_examples=40, deadline=None)
@given(data=st.data(), ranks=RANKS, sequence_parallel=st.booleans())
def test_enter_and_leave_are_transposes(data: st.DataObject, ranks: int, sequence_parallel: bool) -> None:
    rows, length, width = (data.draw(st.integers(0, 2)) for _ in range(3))
    whole = ((rows, length * ranks, width),) * ranks
    share = ((rows, length, width),) * ranks
    on_fake(Case(pairs.enter, share if sequence_parallel else whole, not sequence_parallel, False, sequence_parallel))
    on_fake(Case(pairs.leave, whole, False, not sequence_parallel, sequence_parallel))


def cases(ranks: int) -> list[Case]:
    sizes = [[(r + q) % 3 for q in range(ranks)] for r in range(ranks)]

    def swap(x: Tensor, mesh: Mesh) -> Tensor:
        return pairs.exchange(x, mesh.tp, sizes[mesh.tp.index], [row[mesh.tp.index] for row in sizes])

    whole, share = ((2, 3 * ranks, 2),) * ranks, ((2, 3, 2),) * ranks
    return [
        Case(lambda x, mesh: pairs.copy(x, mesh.tp), whole, one_input=True),
        Case(lambda x, mesh: pairs.reduce(x, mesh.tp), whole, one_output=True),
        *(Case(lambda x, mesh, d=dim: pairs.gather(x, mesh.tp, d), share) for dim in range(3)),
        Case(lambda x, mesh: pairs.scatter(x, mesh.tp, 1), whole),
        Case(swap, tuple((sum(row), 2) for row in sizes)),
        Case(pairs.enter, share, sequence_parallel=True),
        Case(pairs.leave, whole, sequence_parallel=True),
        Case(pairs.enter, whole, one_input=True),
        Case(pairs.leave, whole, one_output=True),
    ]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_pairs_are_transposes_between_processes(ranks: int) -> None:
    made = cases(ranks)

    def all_of_them(sequence_parallel: bool) -> list[list[tuple[Tensor, ...]]]:
        mine = [case for case in made if case.sequence_parallel == sequence_parallel]
        return gloo.world(
            ranks, lambda m: [both_ways(case, m) for case in mine], tp=ranks, sequence_parallel=sequence_parallel
        )

    found = {flag: all_of_them(flag) for flag in (False, True)}
    for flag, by_rank in found.items():
        for case, results in zip(
            [c for c in made if c.sequence_parallel == flag], zip(*by_rank, strict=True), strict=True
        ):
            holds(case, list(results))  # type: ignore[arg-type]


def test_a_wrong_transpose_would_be_seen() -> None:
    """A reduce whose gradient is summed again, the commonest slip, breaks the identity."""

    def twice(x: Tensor, mesh: Mesh) -> Tensor:
        return pairs.copy(pairs.reduce(x, mesh.tp), mesh.tp)

    with pytest.raises(AssertionError):
        on_fake(Case(twice, ((2, 3),) * 3, one_output=True))
