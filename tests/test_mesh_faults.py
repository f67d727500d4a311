"""Where processes part ways, die or stop, every other one is told who, and what each was doing; nobody hangs.

No test asserts a time, but each has its limit, after which a rank that still runs is a failure, and the mesh's own
timeout lies far beyond that limit unless the test is about a rank that is stopped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ironfn.mesh import pairs
from ironfn.mesh.axis import Mesh
from ironfn.mesh.call import MeshError
from ironfn.mesh.processes import connect, tcp_store
from tests import gloo

SOON = 20.0  # seconds, on a machine that is busy with other things; a death is told after 3.5
FOREVER = 600.0
BRIEF = 4.0  # the signs of life are waited for a quarter of it


def told(outcome: object) -> str:
    """Return the last line of a rank's traceback: what it was told."""
    assert isinstance(outcome, str)
    return [line for line in outcome.splitlines() if line][-1]


def loop(fate: Callable[[], Any], *victims: int) -> Callable[[Mesh], None]:
    """Go through collectives on every axis, and let the victims meet their fate in the midst of it."""

    def rank(mesh: Mesh) -> None:
        for step in range(1000):
            if step == 5 and mesh.world.index in victims:
                fate()
            for axis in (mesh.dp, mesh.tp):
                if axis.size > 1:
                    axis.backend.all_reduce(torch.ones(3))

    return rank


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_is_named_by_all_others() -> None:
    first, second, third = gloo.world(3, loop(die, 1), timeout=SOON, mesh_timeout=FOREVER, errors=True)
    assert "signal 9" in second
    for rank, outcome in ((0, first), (2, third)):
        assert f"MeshError: rank {rank} (dp {rank}) lost contact in all_reduce of float32 [3] on dp" in told(outcome)
        assert "rank 1 (dp 1) is dead or stopped, silent for 3.0 s" in told(outcome)
        assert f"rank {2 - rank} (dp {2 - rank}) lost contact in all_reduce" in told(outcome), "alive, and says so"


@pytest.mark.parametrize("victims", ["3", "2 3"])
def test_the_dead_are_named_by_ranks_that_share_no_axis_with_them(victims: str) -> None:
    """On 2 x 2 ranks, rank 0 hears of rank 3 by the fall of rank 1 or 2."""
    dead = [int(rank) for rank in victims.split()]
    outcomes = gloo.world(4, loop(die, *dead), dp=2, tp=2, timeout=SOON, mesh_timeout=BRIEF, errors=True)
    for outcome in outcomes[: dead[0]]:
        for rank in dead:
            assert f"rank {rank} (dp 1, tp {rank - 2}) is dead" in told(outcome)


def test_a_stopped_rank_is_named_within_the_timeout() -> None:
    stopped = loop(lambda: os.kill(os.getpid(), signal.SIGSTOP), 1)
    first, second, third = gloo.world(3, stopped, timeout=SOON, mesh_timeout=3.0, errors=True)
    assert second == "is stopped"
    for outcome in (first, third):
        assert "lost contact in all_reduce" in told(outcome)
        assert "rank 1 (dp 1) is dead or stopped, silent for 0.8 s" in told(outcome)


def test_a_rank_that_raises_tells_the_others_why() -> None:
    def fate() -> None:
        raise KeyError("my own fault")

    outcomes = gloo.world(3, loop(fate, 2), timeout=SOON, mesh_timeout=FOREVER, errors=True)
    assert told(outcomes[2]) == "KeyError: 'my own fault'"
    for outcome in outcomes[:2]:
        assert "rank 2 (dp 2) raised KeyError: 'my own fault'" in told(outcome)
        assert "is dead" not in told(outcome), "all are accounted for"


def test_a_rank_that_has_left_is_named() -> None:
    def rank(mesh: Mesh) -> None:
        if mesh.tp.index == 0:
            mesh.tp.backend.broadcast(torch.ones(2), 0)

    first, second = gloo.world(2, rank, tp=2, timeout=SOON, mesh_timeout=FOREVER, errors=True)
    assert "lost contact in broadcast(0) of float32 [2] on tp" in told(first)
    assert "rank 1 (tp 1) has left" in told(first)
    assert second is None


def test_an_error_inside_a_backward_pass_is_told_and_told_again() -> None:
    def rank(mesh: Mesh) -> list[str]:
        x = torch.ones(3, requires_grad=True)
        y = pairs.copy(x, mesh.tp).sum()
        if mesh.tp.index == 1:
            die()
        with pytest.raises(MeshError) as first:
            y.backward()
        with pytest.raises(MeshError) as again:
            mesh.world.backend.all_gather(torch.ones(3), 0)
        return [str(first.value), str(again.value)]

    first, _ = gloo.world(2, rank, tp=2, timeout=SOON, mesh_timeout=BRIEF, errors=True)
    assert "rank 0 (tp 0) lost contact in all_reduce of float32 [3] on tp" in first[0]
    assert "rank 1 (tp 1) is dead" in first[0]
    assert first[1] == first[0], "a mesh that has failed stays so"


MISMATCHES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "op": (lambda b: b.all_gather(torch.ones(2, 2), 0), r"all_gather(0) of float32 [2, 2]"),
    "shape": (lambda b: b.all_reduce(torch.ones(4)), r"all_reduce of float32 [4]"),
    "longer": (lambda b: b.all_reduce(torch.ones(2**20)), r"all_reduce of float32 [1048576]"),
    "dtype": (lambda b: b.all_reduce(torch.ones(2, 2).int()), r"all_reduce of int32 [2, 2]"),
    "empty": (lambda b: b.all_reduce(torch.ones(0, 2)), r"all_reduce of float32 [0, 2]"),
    "source": (lambda b: b.broadcast(torch.ones(2, 2), 1), r"broadcast(1) of float32 [2, 2]"),
    "sizes": (
        lambda b: b.all_to_all(torch.ones(2, 2), [1, 1, 0], [1, 1, 0]),
        r"all_to_all(send [1, 1, 0], receive [1, 1, 0]) of float32 [2, 2]",
    ),
}


@pytest.mark.parametrize("against", ["all_reduce", "all_to_all"])
def test_calls_that_differ_are_told_at_once_on_every_rank(against: str) -> None:
    """Without the comparison gloo hangs, crashes, or adds up the wrong bytes. The mesh goes on afterwards."""

    def right(b: Any) -> Any:
        x = torch.ones(2, 2)
        return b.all_reduce(x) if against == "all_reduce" else b.all_to_all(x, [0, 1, 1], [0, 1, 1])

    def rank(mesh: Mesh) -> tuple[list[str], float]:
        b, errors = mesh.dp.backend, []
        for call, _ in MISMATCHES.values():
            try:
                call(b) if mesh.dp.index == 1 else right(b)
            except MeshError as error:
                errors.append(str(error))
        return errors, float(b.all_reduce(torch.ones(())))

    for errors, after in gloo.world(3, rank, timeout=SOON, mesh_timeout=FOREVER):
        assert after == 3.0
        assert len(errors) == len(MISMATCHES)
        for error, (_, call) in zip(errors, MISMATCHES.values(), strict=True):
            assert error.startswith(f"the ranks of dp made different calls: rank 0 (dp 0) {against}"), error
            assert f"rank 1 (dp 1) {call}; rank 2 (dp 2) {against}" in error


def test_ranks_that_wait_on_different_axes_are_told_within_the_timeout() -> None:
    def rank(mesh: Mesh) -> None:
        (mesh.dp if mesh.world.index in (0, 3) else mesh.tp).backend.all_reduce(torch.ones(2))

    for outcome in gloo.world(4, rank, dp=2, tp=2, timeout=SOON, mesh_timeout=2.0, errors=True):
        assert "rank 0 (dp 0, tp 0) lost contact in all_reduce of float32 [2] on dp" in told(outcome)
        assert "rank 1 (dp 0, tp 1) lost contact in all_reduce of float32 [2] on tp" in told(outcome)


def free_port() -> int:
    with contextlib.closing(socket.socket()) as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_a_rank_that_never_comes_is_named() -> None:
    port = free_port()

    def rank(outer: Mesh) -> None:
        store = tcp_store("127.0.0.1", port, serve=outer.dp.index == 0)
        outer.dp.backend.all_reduce(torch.ones(1))  # on a busy machine one may start when another has given up
        if outer.dp.index == 1:
            outer.dp.backend.all_reduce(torch.ones(1))  # wait until the others have failed
        else:
            try:
                with connect(store, outer.dp.index, 3, dp=3, timeout=2.0):
                    pass
            finally:
                outer.dp.backend.all_reduce(torch.ones(1))

    first, _, third = gloo.world(3, rank, timeout=SOON, errors=True)
    for outcome in (first, third):
        assert "could not connect dp" in told(outcome)
        assert "rank 1 (dp 1) never came" in told(outcome)


@pytest.mark.parametrize("fate", ["killed", "stopped"])
def test_a_store_that_dies_or_stops_with_its_rank_is_told(fate: str) -> None:
    port = free_port()
    number = signal.SIGKILL if fate == "killed" else signal.SIGSTOP

    def rank(outer: Mesh) -> None:
        store = tcp_store("127.0.0.1", port, serve=outer.dp.index == 0)
        with connect(store, outer.dp.index, 3, dp=3, timeout=FOREVER if fate == "killed" else 2.0) as mesh:
            loop(lambda: os.kill(os.getpid(), number), 0)(mesh)

    _, second, third = gloo.world(3, rank, timeout=SOON, mesh_timeout=FOREVER, errors=True)
    said = (
        "the store is gone, and with it the process that holds it" if fate == "killed" else "the store does not answer"
    )
    for outcome in (second, third):
        assert "lost contact in all_reduce" in told(outcome)
        assert said in told(outcome)


def test_a_port_where_nobody_listens_is_given_up_within_the_timeout() -> None:
    """torch would try it a second time, for as long again."""
    with pytest.raises(TimeoutError, match=r"no answer within 1.0 s"):
        tcp_store("127.0.0.1", free_port(), timeout=1.0)


def test_a_store_that_stops_before_all_have_met_is_told() -> None:
    """torch waits without end for a stopped store's leave to give up."""
    port = free_port()

    def rank(outer: Mesh) -> None:
        store = tcp_store("127.0.0.1", port, serve=outer.dp.index == 0)
        outer.dp.backend.all_reduce(torch.ones(1))
        if outer.dp.index == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        with connect(store, outer.dp.index, 2, dp=2, timeout=2.0):
            pass

    _, second = gloo.world(2, rank, timeout=SOON, mesh_timeout=FOREVER, errors=True)
    assert "rank 1 (dp 1) could not connect" in told(second)
    assert "the store does not answer: the process that holds it is gone or stopped" in told(second)


def test_a_restart_finds_nothing_of_the_start_before_it() -> None:
    """Under a launcher the store outlives its processes; two starts in it must not meet."""
    port = free_port()

    def rank(outer: Mesh) -> list[float]:
        found = []
        for attempt in range(2):
            store = tcp_store("127.0.0.1", port, serve=outer.dp.index == 0 and attempt == 0, attempt=attempt)
            with connect(store, outer.dp.index, 2, dp=2, timeout=SOON) as mesh:
                found.append(float(mesh.dp.backend.all_reduce(torch.tensor(attempt + 1.0))))
            with pytest.raises(MeshError, match="this mesh is closed"):
                mesh.dp.backend.all_reduce(torch.ones(1))
            kept.append(store)
        outer.dp.backend.all_reduce(torch.ones(1))
        return found

    kept: list[Any] = []
    assert gloo.world(2, rank, timeout=SOON) == [[2.0, 4.0]] * 2
