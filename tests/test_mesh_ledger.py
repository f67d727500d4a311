"""The ledger's bytes are those counted by hand, and the same for threads and processes."""

from __future__ import annotations

import pytest
import torch
from attrs import astuple

from ironfn.grad.remat import recompute
from ironfn.mesh import fake, pairs
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.mesh.ledger import Ledger, Sum
from tests import gloo


def calls(mesh: Mesh) -> list[tuple[object, ...]]:
    ledger = Ledger()
    b = ledger.watch(mesh).dp.backend
    x = torch.ones(4, 3)
    b.all_reduce(x)
    b.all_gather(x.bfloat16(), 1)
    b.reduce_scatter(x.double(), 0)
    b.all_to_all(x, [1, 3] if mesh.dp.index == 0 else [2, 2], [1, 2] if mesh.dp.index == 0 else [3, 2])
    b.all_to_all(x[:0], [0, 0], [0, 0])
    b.broadcast(x.int(), 1)
    ledger.watch(mesh).tp.backend.all_reduce(x)
    return [astuple(entry) for entry in ledger.entries]


def test_bytes_are_those_counted_by_hand() -> None:
    first, second = fake.run(calls, dp=2)
    here = "tests/test_mesh_ledger.py:calls"
    assert first == [
        ("dp", "all_reduce", "float32", (4, 3), 48, here),  # 2 x 1/2 of 4 x 3 x 4
        ("dp", "all_gather", "bfloat16", (4, 3), 24, here),  # its 4 x 3 x 2, once
        ("dp", "reduce_scatter", "float64", (4, 3), 48, here),  # half of 4 x 3 x 8
        ("dp", "all_to_all", "float32", (4, 3), 36, here),  # 3 slices of 3 x 4
        ("dp", "all_to_all", "float32", (0, 3), 0, here),
        ("dp", "broadcast", "int32", (4, 3), 0, here),  # rank 1 sends
    ]
    assert [entry[4] for entry in second] == [48, 24, 48, 24, 0, 48]


def test_more_ranks_send_more() -> None:
    def sent(mesh: Mesh) -> list[int]:
        ledger = Ledger()
        b = ledger.watch(mesh).dp.backend
        b.all_reduce(torch.ones(8))
        b.all_gather(torch.ones(8), 0)
        b.reduce_scatter(torch.ones(8), 0)
        return [entry.sent for entry in ledger.entries]

    # (N-1)/N of 32 bytes twice; 3 times its 32 bytes; (N-1)/N of 32 bytes
    assert fake.run(sent, dp=4) == [[48, 96, 24]] * 4


def test_processes_write_down_what_threads_do() -> None:
    assert gloo.world(2, calls) == fake.run(calls, dp=2)


def region(mesh: Mesh, remat: bool = False) -> Ledger:
    """Go through one tensor-parallel region, there and back."""
    ledger = Ledger()
    watched = ledger.watch(mesh)
    x = torch.ones(2, 4 // (mesh.tp.size if mesh.sequence_parallel else 1), 3, requires_grad=True)

    def block(x: torch.Tensor) -> torch.Tensor:
        return pairs.leave(pairs.enter(x, watched).sin(), watched)

    out = recompute(block, x) if remat else block(x)
    out.sum().backward()
    return ledger


@pytest.mark.parametrize("remat", [False, True])
def test_a_region_is_told_with_its_place_there_and_back(remat: bool) -> None:
    forward, backward = "tests/test_mesh_ledger.py:region.<locals>.block", "tests/test_mesh_ledger.py:region"
    again = int(remat)  # the recomputation stops once it has what the backward pass needs: before `leave`
    (plain, _) = fake.run(lambda mesh: region(mesh, remat), tp=2)
    assert plain.sums(lambda e: (e.op, e.place)) == {
        ("all_reduce", forward): Sum(1, 96),  # all of 2 x 4 x 3 x 4 bytes
        ("all_reduce", f"backward of copy, {backward}"): Sum(1, 96),
    }
    (sequence, _) = fake.run(lambda mesh: region(mesh, remat), tp=2, sequence_parallel=True)
    assert sequence.sums(lambda e: (e.op, e.place)) == {
        ("all_gather", forward): Sum(1 + again, 48 + 48 * again),
        ("reduce_scatter", forward): Sum(1, 48),
        ("all_gather", f"backward of scatter, {backward}"): Sum(1, 48),
        ("reduce_scatter", f"backward of gather, {backward}"): Sum(1, 48),
    }


def test_the_table_can_be_read() -> None:
    (first, _) = fake.run(region, tp=2)
    assert str(first).splitlines() == [
        "axis  op          place                                               calls  bytes sent",
        "tp    all_reduce  backward of copy, tests/test_mesh_ledger.py:region      1          96",
        "tp    all_reduce  tests/test_mesh_ledger.py:region.<locals>.block         1          96",
    ]


def test_one_rank_moves_nothing() -> None:
    ledger = Ledger()
    assert ledger.watch(SINGLE) == SINGLE
    assert calls(SINGLE) == []
