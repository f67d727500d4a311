"""Turn what went wrong into a line that a person reads: once, however many ranks met it."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
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
        less = "lower train.batch (grpo.prompts) or set train.micro_batch, or choose a smaller model"
        return f"not enough memory ({first}): {less}"
    return None


def _is_of_the_mesh(error: BaseException) -> bool:
    if not isinstance(error, RuntimeError):
        return False
    from ironfn.mesh.call import MeshError

    return isinstance(error, MeshError)


class _Told(Exception):
    """Be an error of one rank in the words that all ranks hear."""


def together(mesh: Mesh, device: torch.device, work: Callable[[], T]) -> T:
    """Do on every rank what may fail on some, and fail on all where it did on any. Every rank has to call it.

    What failed on one rank alone is told by rank 0 with the number of that rank; what failed on all alike, once.
    """
    from ironfn.mesh import agree

    if mesh.world.size == 1:
        return work()

    def worded() -> T:
        try:
            return work()
        except Exception as error:
            raise _Told(_told(error, mesh.world.index)) from error

    try:
        return agree.together(mesh, worded, (_Told,), device)
    except _Told as told:
        raise Failure(str(told), speaks=mesh.world.index == 0) from told.__cause__


@contextmanager
def one_voice(mesh: Mesh) -> Generator[None]:
    """Let rank 0 alone tell what all ranks raise alike. What only some raise needs `together`."""
    try:
        yield
    except Exception as error:
        line = in_a_line(error)
        if mesh.world.size == 1 or line is None or _is_of_the_mesh(error):  # of the mesh, each knows something else
            raise
        raise Failure(line, speaks=mesh.world.index == 0) from error


def _told(error: Exception, rank: int) -> str:
    line = in_a_line(error)
    if line is None:  # a fault of ours: the place in the code matters, and only this rank knows it
        sys.stderr.write(f"rank {rank}:\n{''.join(traceback.format_exception(error))}")
        line = f"{type(error).__name__}: {error}"
    return line


def alike(mesh: Mesh, device: torch.device, what: str, value: int) -> None:
    """Fail on all ranks where they do not hold the same checksum: files that should be shared may not be."""
    from ironfn.mesh.agree import gather_ints, in_words

    half = 1 << 32  # an unsigned number of 64 bits is sent as two
    values = [high * half + low for high, low in gather_ints(mesh, divmod(value, half), device)]
    others = [rank for rank, each in enumerate(values) if each != values[0]]
    if others:
        told = f"{what} of {in_words(others)} ({values[others[0]]:016x}) is not that of rank 0 ({values[0]:016x})"
        raise Failure(f"{told}: all ranks have to see the same files", speaks=mesh.world.index == 0)
