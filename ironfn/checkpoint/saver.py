"""Save while the steps go on: a step pays for a copy of its tensors, a thread writes, a later step's edge publishes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from attrs import define, field, frozen

from ironfn.checkpoint.files import DISK, Files
from ironfn.checkpoint.saving import FILE_BYTES, UnderWay, begin, device_of, save
from ironfn.checkpoint.write import Sources, Written, copies
from ironfn.layout.table import WHOLE_TABLE, Table
from ironfn.mesh.agree import on_first, together
from ironfn.mesh.axis import SINGLE, Mesh, any_rank
from ironfn.types import Flat, Params

WAIT = 0.05
"""Seconds that a rank waits for its own writing before it asks the others how they stand."""


def _nothing(path: Path) -> None:
    pass


@frozen(eq=False)
class _Writing:
    """Be a thread that writes what a save has copied."""

    save: UnderWay
    thread: threading.Thread
    came_of_it: list[Written | BaseException]

    @staticmethod
    def start(save: UnderWay, sources: Sources) -> _Writing:
        came_of_it: list[Written | BaseException] = []

        def write() -> None:
            try:
                came_of_it.append(save.write(sources))
            except BaseException as error:  # it is raised where the thread is waited for
                came_of_it.append(error)

        # a daemon: a run that is ended by an error must not go on writing what will never be published
        thread = threading.Thread(target=write, name=f"save of step {save.step}", daemon=True)
        thread.start()
        return _Writing(save, thread, came_of_it)

    def publish(self) -> Path:
        self.thread.join()
        (found,) = self.came_of_it
        if isinstance(found, Written):
            return self.save.publish(found, None)
        if isinstance(found, Exception):
            return self.save.publish(None, found)
        self.save.give_up()
        raise found


@define(eq=False)
class Saver:
    """Save one checkpoint of a run after another into a directory, one at a time.

    Every method is called by all ranks together, between the same steps. What `save` promises holds for all of them:
    a death at any moment loses nothing, and an error on any rank is raised on every rank, at the next call. A run ends
    with `finish`. The memory of one copy of what this rank writes is kept from one `start` to the next.

    after: what rank 0 does once a checkpoint is visible, such as deleting old ones; its errors are everyone's too.
    """

    directory: Path
    layout: Table = WHOLE_TABLE
    mesh: Mesh = SINGLE
    after: Callable[[Path], object] = _nothing
    file_bytes: int = FILE_BYTES
    files: Files = DISK
    _writing: _Writing | None = field(default=None, init=False)
    _held: Flat = field(factory=dict, init=False)

    def save(self, step: int, tree: Params, meta: Mapping[str, object]) -> Path:
        """Write a checkpoint and wait until it is there; first for the one before."""
        self.finish()
        path = save(
            self.directory, step, tree, meta,
            layout=self.layout, mesh=self.mesh, file_bytes=self.file_bytes, files=self.files,
        )  # fmt: skip
        on_first(self.mesh, lambda: self.after(path), device=device_of(tree))
        return path

    def start(self, step: int, tree: Params, meta: Mapping[str, object]) -> None:
        """Copy a tree and begin to write it, once the save before is done; the tree may change as soon as this returns.

        On CUDA the copy lies in pinned memory of the host.
        """
        self.finish()
        under_way = begin(
            self.directory, step, tree, meta, self.layout, self.mesh, self.file_bytes, self.files
        )  # fmt: skip
        try:
            sources = together(self.mesh, lambda: copies(under_way.plan.parts, self._held), device=under_way.device)
        except BaseException:
            under_way.give_up()
            raise
        self._writing = _Writing.start(under_way, sources)

    def poll(self) -> Path | None:
        """Publish what is being saved if every rank has written its part, and return its path; else None, at once.

        To be called after every step: it costs one small exchange while a save is under way, and nothing while none is.
        """
        writing = self._writing
        if writing is None or any_rank(self.mesh, writing.thread.is_alive(), writing.save.device):
            return None
        self._writing = None
        path = writing.publish()
        on_first(self.mesh, lambda: self.after(path), device=writing.save.device)
        return path

    def finish(self) -> Path | None:
        """Wait for what is being saved, publish it and return its path; None where nothing is."""
        path = None
        while self._writing is not None and path is None:
            self._writing.thread.join(WAIT)  # no rank waits in an exchange for as long as another may write
            path = self.poll()
        return path
