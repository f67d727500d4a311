"""Fail at any chosen file operation, or pull the plug there and see what the worst disk has kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs

from ironfn.checkpoint import DISK, Files


def watched(before: Callable[[str, tuple], None], files: Files = DISK) -> Files:
    """Return the same operations, each calling ``before(name, arguments)`` first."""

    def wrap(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            before(name, arguments)
            return operation(*arguments)

        return call

    return Files(**{f.name: wrap(f.name, getattr(files, f.name)) for f in attrs.fields(Files)})


def recording(names: list[str], files: Files = DISK) -> Files:
    """Note the name of each operation."""
    return watched(lambda name, arguments: names.append(name), files)


def failing(at: int, error: BaseException, files: Files = DISK) -> Files:
    """Raise ``error`` in the place of operation number ``at``, a write having done half of its work.

    Where that is no OSError but a death, nothing that comes after has an effect either.
    """
    left = iter(range(at, -1, -1))

    def before(name: str, arguments: tuple) -> None:
        turn = next(left, -1)
        if turn == 0 or (turn < 0 and not isinstance(error, OSError)):
            if name == "write" and turn == 0:
                files.write(arguments[0], memoryview(arguments[1]).cast("B")[: len(arguments[1]) // 2])
            raise error

    return watched(before, files)


class Unplugged(BaseException):
    """Be the moment at which the power goes."""


class Node:
    """Be a file (bytes) or a directory (entries), in its present state and in the one that was last synced."""

    def __init__(self, now: bytes | dict[str, Node]) -> None:
        self.now: Any = now
        self.safe: Any = b"" if isinstance(now, bytes) else {}
        self.since: list[tuple[str | None, str | None, Node]] = []  # unsynced (old name, new name) of entries

    def move(self, old: str | None, new: str | None, node: Node) -> None:
        self.since.append((old, new, node))
        _apply(self.now, old, new, node)


def _apply(entries: dict[str, Node], old: str | None, new: str | None, node: Node) -> None:
    if new in entries or (old is not None and old not in entries):
        return  # without an earlier change that was lost, this one cannot be
    if old is not None:
        del entries[old]
    if new is not None:
        entries[new] = node


@attrs.define
class Handle:
    node: Node

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class MemoryDisk:
    """Be a disk in memory that knows what POSIX promises of it after a power cut: what was fsynced, and no more."""

    def __init__(self, root: Node | None = None) -> None:
        self.root = root or Node({})
        self.files = Files(
            mkdir=lambda path: self._make(path, Node({})) and None,
            create=lambda path: Handle(self._make(path, Node(b""))),  # type: ignore[arg-type, return-value]
            write=lambda handle, data: setattr(handle.node, "now", handle.node.now + bytes(data)),  # type: ignore[attr-defined]
            sync=lambda handle: setattr(handle.node, "safe", handle.node.now),  # type: ignore[attr-defined]
            sync_directory=self._sync_directory,
            rename=self._rename,
            unlink=lambda path: self._at(path.parent).move(path.name, None, self._at(path)),
            rmdir=self._rmdir,
            free=lambda path: 1 << 40,
            names=lambda path: list(self._at(path).now),
            size=lambda path: len(self._at(path).now),
            open=lambda path: Handle(self._at(path)),  # type: ignore[arg-type, return-value]
            read=self._read,  # type: ignore[arg-type]
        )

    def _at(self, path: Path) -> Node:
        node = self.root
        for name in path.parts[1:]:
            if name not in node.now:
                raise FileNotFoundError(path)
            node = node.now[name]
        return node

    def _make(self, path: Path, node: Node) -> Node:
        parent = self._at(path.parent)
        if path.name in parent.now:
            raise FileExistsError(path)
        parent.move(None, path.name, node)
        return node

    def _sync_directory(self, path: Path) -> None:
        node = self._at(path)
        node.safe, node.since = dict(node.now), []

    def _rename(self, old: Path, new: Path) -> None:
        assert old.parent == new.parent
        if new.name in self._at(new.parent).now:
            raise OSError(f"{new} is there already")
        self._at(old.parent).move(old.name, new.name, self._at(old))

    def _rmdir(self, path: Path) -> None:
        if self._at(path).now:
            raise OSError(f"{path} is not empty")
        self._at(path.parent).move(path.name, None, self._at(path))

    def _read(self, handle: Handle, data: Any, offset: int) -> int:
        found = handle.node.now[offset : offset + len(data)]
        memoryview(data).cast("B")[: len(found)] = found
        return len(found)

    def after_a_cut(self) -> Iterator[MemoryDisk]:
        """Yield the disks that may be found when the power is back.

        Bytes that were not synced are all there or gone; of the changes to entries that were not synced, any subset
        may have reached the disk.
        """
        pending = list(_pending(self.root))
        assert len(pending) < 12
        for kept in itertools.product((True, False), repeat=len(pending)):
            chosen = {id(change) for change, keep in zip(pending, kept, strict=True) if keep}
            for bytes_kept in (True, False):
                yield MemoryDisk(_surviving(self.root, chosen, bytes_kept))


def _pending(node: Node) -> Iterator[tuple]:
    if isinstance(node.now, dict):
        yield from node.since
        for child in {id(n): n for n in (*node.now.values(), *node.safe.values())}.values():
            yield from _pending(child)


def _surviving(node: Node, chosen: set[int], bytes_kept: bool) -> Node:
    if isinstance(node.now, bytes):
        left = Node(node.now if bytes_kept else node.safe)
    else:
        entries = dict(node.safe)
        for change in node.since:
            if id(change) in chosen:
                _apply(entries, *change)
        left = Node({name: _surviving(child, chosen, bytes_kept) for name, child in entries.items()})
    left.safe = dict(left.now) if isinstance(left.now, dict) else left.now
    return left
