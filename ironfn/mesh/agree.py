"""Let all ranks know, and decide, the same: what each has to tell, what rank 0 found, whose error it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from ironfn.mesh.axis import Mesh, any_rank

T = TypeVar("T")
Device = torch.device | str


def gather_ints(mesh: Mesh, values: Sequence[int], device: Device = "cpu") -> list[list[int]]:
    """Return every rank's numbers, as many on each, in rank order."""
    mine = torch.tensor([values], dtype=torch.int64, device=device)
    return mesh.world.backend.all_gather(mine, 0).tolist() if mesh.world.size > 1 else [list(values)]


def each(mesh: Mesh, data: bytes, device: Device = "cpu") -> Iterator[bytes]:
    """Yield every rank's bytes in rank order, one rank's at a time. All ranks have to take them all."""
    for rank, (size,) in enumerate(gather_ints(mesh, [len(data)], device)):
        if rank == mesh.world.index:
            x = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        else:
            x = torch.empty(size, dtype=torch.uint8)
        if mesh.world.size > 1 and size:
            x = mesh.world.backend.broadcast(x.to(device), rank)
        yield x.cpu().numpy().tobytes()


def agree(
    mesh: Mesh, error: Exception | None, kinds: Sequence[type[Exception]] = (ValueError,), device: Device = "cpu"
) -> None:
    """Raise on all ranks where there is an error on any, naming the ranks if not all; return where there is none.

    Alone, the error itself is raised. On a mesh it is one of the same kind: an OSError of the same number, the first of
    ``kinds`` that it is one of, or else a RuntimeError.
    """
    if mesh.world.size == 1:
        if error is not None:
            raise error
        return
    if not any_rank(mesh, error is not None, device):
        return
    mine = b"" if error is None else json.dumps((mesh.world.index, *_describe(error, kinds))).encode()
    told = [json.loads(text) for text in each(mesh, mine, device) if text]
    by_text: dict[str, list[int]] = {}
    for rank, _, _, text in told:
        by_text.setdefault(text, []).append(rank)
    text = "; ".join(_whose(ranks, mesh) + text for text, ranks in by_text.items())
    _, kind, number, _ = told[0]
    if kind == "OSError":
        raise OSError(number, text) if number else OSError(text)
    raise {cls.__name__: cls for cls in kinds}.get(kind, RuntimeError)(text) from error


def _whose(ranks: list[int], mesh: Mesh) -> str:
    """Name the ranks that have an error; what all have needs no name."""
    return "" if len(ranks) == mesh.world.size else f"{in_words(ranks)}: "


def in_words(ranks: list[int]) -> str:
    """Name ranks, the first of many.

    >>> in_words([3]), in_words([0, 1, 2]), in_words(list(range(9)))
    ('rank 3', 'ranks 0, 1, 2', 'ranks 0, 1, 2 and 6 more')
    """
    first = ", ".join(str(rank) for rank in ranks[:3])
    return f"rank{'s' if len(ranks) > 1 else ''} {first}" + (f" and {len(ranks) - 3} more" if len(ranks) > 3 else "")


def _describe(error: Exception, kinds: Sequence[type[Exception]]) -> tuple[str, int | None, str]:
    if isinstance(error, OSError):
        place = f": {error.filename}" if error.filename is not None else ""
        return "OSError", error.errno, f"{error.strerror}{place}" if error.errno else str(error)
    for kind in kinds:
        if isinstance(error, kind):
            return kind.__name__, None, str(error)
    return "", None, f"{type(error).__name__}: {error}"


def together(
    mesh: Mesh, work: Callable[[], T], kinds: Sequence[type[Exception]] = (ValueError,), device: Device = "cpu"
) -> T:
    """Do what needs no other rank, on every rank, and return what came of it here, or raise on all: see `agree`."""
    result, error = None, None
    try:
        result = work()
    except Exception as caught:
        error = caught
    agree(mesh, error, kinds, device)
    return result  # pyright: ignore[reportReturnType]: agree has raised where there is none


def on_first(
    mesh: Mesh, work: Callable[[], object], kinds: Sequence[type[Exception]] = (ValueError,), device: Device = "cpu"
) -> None:
    """Do what one process must do for all, on rank 0; the others wait for it. An error is raised on all."""
    together(mesh, work if mesh.world.index == 0 else lambda: None, kinds, device)
