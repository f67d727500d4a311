"""Turn what went wrong into a line that a person reads: once, however many ranks met it."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import click

if TYPE_CHECKING:
    import torch

    from ironfn.mesh.axis import Mesh

T = TypeVar("T")


class Failure(click.ClickException):
    """End the process with a code and a line. speaks: whether this rank says the line, or another does."""

    def __init__(self, message: str, *, speaks: bool = True) -> None:
        super().__init__(message)
        self.speaks = speaks

    def show(self, file: object = None) -> None:
        """Say the line on standard error, if this rank is the one to say it."""
        if self.speaks:
            super().show()


def in_a_line(error: BaseException) -> str | None:
    """Say in a line what the user or the machine did: a value, a file, memory, a rank. None for a fault of ours."""
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, ValueError) or _is_of_the_mesh(error):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename is not None else str(error.strerror or error)
    text = str(error)
    if isinstance(error, MemoryError) or any(word in text for word in ("allocate", "out of memory", "Storage size")):
        first = text.split("\n", 1)[0]
        return f"not enough memory ({first}): lower train.batch or set train.micro_batch, or choose a smaller model"
    return None


def _is_of_the_mesh(error: BaseException) -> bool:
    if not isinstance(error, RuntimeError):
        return False
    from ironfn.mesh.call import MeshError

    return isinstance(error, MeshError)


def together(mesh: Mesh, device: torch.device, work: Callable[[], T]) -> T:
    """Do on every rank what may fail on some, and fail on all where it did on any. Every rank has to call it.

    What failed on one rank alone is told by rank 0 with the number of that rank; what failed on all alike, once.
    """
    from ironfn.mesh.axis import any_rank

    if mesh.world.size == 1:
        return work()
    done: list[T] = []
    failed: Exception | None = None
    try:
        done.append(work())
    except Exception as error:
        failed = error
    if not any_rank(mesh, failed is not None, device):
        return done[0]
    said = _gather(mesh, device, "" if failed is None else _told(failed, mesh.world.index))
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(said):
        if text:
            ranks.setdefault(text, []).append(rank)
    lines = [text if len(on) == mesh.world.size else f"{ranks_in_words(on)}: {text}" for text, on in ranks.items()]
    raise Failure("\n".join(lines), speaks=mesh.world.index == 0) from failed


def ranks_in_words(ranks: list[int]) -> str:
    """Name ranks, the first of many.

    >>> ranks_in_words([3]), ranks_in_words([0, 1, 2]), ranks_in_words(list(range(9)))
    ('rank 3', 'ranks 0, 1, 2', 'ranks 0, 1, 2 and 6 more')
    """
    first = ", ".join(str(rank) for rank in ranks[:3])
    return f"rank{'s' if len(ranks) > 1 else ''} {first}" + (f" and {len(ranks) - 3} more" if len(ranks) > 3 else "")


def _told(error: Exception, rank: int) -> str:
    line = in_a_line(error)
    if line is None:  # a fault of ours: the place in the code matters, and only this rank knows it
        sys.stderr.write(f"rank {rank}:\n{''.join(traceback.format_exception(error))}")
        line = f"{type(error).__name__}: {error}"
    return line


def _gather(mesh: Mesh, device: torch.device, text: str) -> list[str]:
    """Return every rank's text, each cut to a size that is sent."""
    import torch

    size = 4000
    raw = text.encode()[:size].ljust(size, b"\0")
    mine = torch.frombuffer(bytearray(raw), dtype=torch.uint8)[None].to(device)
    rows = mesh.world.backend.all_gather(mine, 0).cpu()
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in rows]


def alike(mesh: Mesh, device: torch.device, what: str, value: str) -> None:
    """Fail on all ranks where they do not hold the same value: files that should be shared may not be."""
    if mesh.world.size == 1:
        return
    values = _gather(mesh, device, value)
    others = [rank for rank, each in enumerate(values) if each != values[0]]
    if others:
        told = f"{what} of {ranks_in_words(others)} ({values[others[0]]}) is not that of rank 0 ({values[0]})"
        raise Failure(f"{told}: all ranks have to see the same files", speaks=mesh.world.index == 0)
