"""Ranks that have to agree come to one result, or to one error."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest

from ironfn.mesh import fake
from ironfn.mesh.agree import each, gather_ints, on_first, together
from ironfn.mesh.axis import SINGLE, Mesh
from tests.gloo import world


class Special(ValueError):
    """Be a kind of error that the caller names."""


def fails(mesh: Mesh, errors: dict[int, BaseException], kinds: tuple[type[Exception], ...] = (ValueError,)) -> Any:
    def work() -> int:
        if mesh.world.index in errors:
            raise errors[mesh.world.index]
        return mesh.world.index

    try:
        return together(mesh, work, kinds)
    except Exception as error:
        return type(error), getattr(error, "errno", None), str(error)


RUNS: dict[str, Callable[[Callable[[Mesh], Any]], list[Any]]] = {
    "fake": lambda function: fake.run(function, dp=4, timeout=20),
    "gloo": lambda function: world(4, function, timeout=30),
}


@pytest.mark.parametrize("name", RUNS)
def test_everyone_hears_the_same(name: str) -> None:
    def run(mesh: Mesh) -> Any:
        me = mesh.world.index
        done = [0]
        on_first(mesh, lambda: done.append(1))
        data = bytes(range(me)) * 100
        return [gather_ints(mesh, [me, -(2**60) - me]), [len(x) for x in each(mesh, data)], sum(done)]

    found = RUNS[name](run)
    for me, (ints, sizes, done) in enumerate(found):
        assert ints == [[r, -(2**60) - r] for r in range(4)]
        assert sizes == [0, 100, 200, 300]
        assert done == (me == 0)


CASES: dict[str, tuple[dict[int, BaseException], tuple[type, int | None, str]]] = {
    "a full disk": ({2: OSError(errno.ENOSPC, "full", "/x")}, (OSError, errno.ENOSPC, "[Errno 28] rank 2: full: /x")),
    "a refusal": ({1: PermissionError(errno.EACCES, "no")}, (PermissionError, errno.EACCES, "[Errno 13] rank 1: no")),
    "an OSError of no number": ({3: OSError("odd")}, (OSError, None, "rank 3: odd")),
    "a value": ({1: ValueError("bad é")}, (ValueError, None, "rank 1: bad é")),
    "a named kind": ({1: Special("bad")}, (Special, None, "rank 1: bad")),
    "a fault of ours": ({3: KeyError("x")}, (RuntimeError, None, "rank 3: KeyError: 'x'")),
    "the same on some": ({1: ValueError("a"), 3: ValueError("a")}, (ValueError, None, "ranks 1, 3: a")),
    "different ones": ({2: ValueError("a"), 3: OSError("b")}, (ValueError, None, "rank 2: a; rank 3: b")),
    "the same on all": ({r: ValueError("a") for r in range(4)}, (ValueError, None, "a")),
}


@pytest.mark.parametrize("name", CASES)
def test_an_error_on_any_rank_is_the_same_on_all(name: str) -> None:
    errors, right = CASES[name]
    found = fake.run(lambda mesh: fails(mesh, errors, (Special, ValueError)), dp=4, timeout=20)
    assert found == [right] * 4


def test_without_an_error_each_has_its_own_result() -> None:
    assert fake.run(lambda mesh: fails(mesh, {}), dp=3, timeout=20) == [0, 1, 2]


def test_alone_the_error_is_itself() -> None:
    error = OSError(errno.EIO, "disk")
    with pytest.raises(OSError, match="disk") as caught:
        together(SINGLE, lambda: (_ for _ in ()).throw(error))
    assert caught.value is error
    assert list(each(SINGLE, b"x")) == [b"x"]
