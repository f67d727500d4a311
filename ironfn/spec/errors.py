"""Say what is wrong with a spec and where."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen


@frozen(order=True)
class Place:
    """Point into a file, or at an override. ``order`` is the source's turn on the command line; line 0 is the whole."""

    order: int
    source: str
    line: int = 0
    col: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.col}" if self.line else self.source


@frozen(order=True)
class Fault:
    """One thing that is wrong: at which place, with which field of the spec, and what to do about it."""

    place: Place
    path: str
    what: str

    def __str__(self) -> str:
        return f"{self.place} {self.path}: {self.what}" if self.path else f"{self.place}: {self.what}"


class SpecError(ValueError):
    """Hold every fault of a spec, in the order of the files and their lines."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(sorted(set(faults)))
        super().__init__("\n".join(map(str, self.faults)))
