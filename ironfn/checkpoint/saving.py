"""Save a tree of tensors: written aside by all ranks, brought to the disk, renamed last, so that a death loses nothing.

Every save has three acts, whether the caller waits or not. *Begin*: the ranks agree on what is saved, and rank 0 makes
the directory. *Write*: each rank writes its files, asking nobody. *Publish*: once all have told that theirs are on the
disk, rank 0 writes the manifest and renames. An error in any act is raised on every rank, and rank 0 removes what there
is of the checkpoint. The nodes of a run have to share the file system.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from ironfn.checkpoint.files import DISK, Files, make_directories, write_whole
from ironfn.checkpoint.keep import ASIDE, OUTGOING, remove, tidy
from ironfn.checkpoint.manifest import NAME, FileRecord, Leaf, Manifest, Piece, file_name
from ironfn.checkpoint.plan import Part, Plan, nodes, plan
from ironfn.checkpoint.sealed import seal
from ironfn.checkpoint.shards import step_name
from ironfn.checkpoint.write import Sources, Written, bytes_needed, chunks, deal, write_files
from ironfn.layout.table import WHOLE_TABLE, Table
from ironfn.mesh.agree import agree, each, gather_ints, on_first, together
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.types import Params

FILE_BYTES = 2 << 30
"""A file holds at most this much, unless a single leaf is larger."""


def save(
    directory: Path,
    step: int,
    tree: Params,
    meta: Mapping[str, object],
    *,
    layout: Table = WHOLE_TABLE,
    mesh: Mesh = SINGLE,
    file_bytes: int = FILE_BYTES,
    files: Files = DISK,
) -> Path:
    """Write the checkpoint ``directory/step-…`` of a tree and return its path; it is there whole or not at all.

    tree: on a mesh, this rank's part of it, as ``layout`` places its leaves. All ranks call this together.
    meta: what else a run needs (its spec, its seed), of str, int, float, bool, None, list and dict with str keys; a
    tuple comes back as a list; rank 0's is kept. file_bytes: a file holds at most this much, unless a single part is
    larger. Leaves that are the same tensor are stored once. Only one run may save into a directory at a time.

    ValueError for a tree or meta that cannot be stored. OSError where the disk is full or fails; then what was there
    before is untouched. Both on every rank, whichever had it. A checkpoint of the same step is replaced.
    """
    under_way = begin(directory, step, tree, meta, layout, mesh, file_bytes, files)
    error, written = None, None
    try:
        written = under_way.write({path: chunks(part.tensor) for path, part in under_way.plan.parts.items()})
    except Exception as caught:
        error = caught
    except BaseException:
        under_way.give_up()
        raise
    return under_way.publish(written, error)


@frozen
class UnderWay:
    """Be a save that has begun: what this rank writes, into which files, on which mesh."""

    directory: Path
    step: int
    meta: Mapping[str, object]
    plan: Plan
    groups: dict[str, dict[str, Part]]
    mesh: Mesh
    device: torch.device
    files: Files

    @property
    def aside(self) -> Path:
        """Where the checkpoint is written."""
        return self.directory / (ASIDE + step_name(self.step))

    def write(self, sources: Sources) -> Written:
        """Write this rank's files and bring them to the disk. No other rank is asked: a thread may do it."""
        written = write_files(self.aside, self.groups, sources, self.files)
        if self.mesh.world.index > 0:  # rank 0 does it once the manifest is there
            self.files.sync_directory(self.aside)
        return written

    def publish(self, written: Written | None, error: Exception | None) -> Path:
        """Make the checkpoint visible if all ranks have written, or raise on all. Return its path."""
        final = self.directory / step_name(self.step)
        try:
            agree(self.mesh, error, device=self.device)
            assert written is not None
            told = self._collect(written)
            on_first(self.mesh, lambda: self._finish(told, final), device=self.device)
        except BaseException:
            self.give_up()
            raise
        return final

    def give_up(self) -> None:
        """Put all back as it was, if that is possible: the first error is the one to tell."""
        if self.mesh.world.index == 0:
            with suppress(OSError):
                tidy(self.directory, self.files)

    def _collect(self, written: Written) -> list[dict[str, Any]]:
        """Return what each rank has written, on rank 0; the others tell theirs."""
        pieces = {
            path: (dtype, whole, piece.file, piece.offset, piece.shape, piece.checksum.hex())
            for path, (dtype, whole, piece) in written.pieces.items()
        }
        mine = {
            "files": {name: (record.size, record.checksum.hex()) for name, record in written.files.items()},
            "pieces": pieces,
            "stored": {path: other for path, other in self.plan.stored.items() if other in pieces},
            "empty": self.plan.empty,
        }
        told = each(self.mesh, json.dumps(mine).encode(), self.device)
        return [json.loads(text) for text in told if self.mesh.world.index == 0]

    def _finish(self, told: list[dict[str, Any]], final: Path) -> None:
        manifest = _join(self.step, self.meta, self.plan.shared, told)
        for name in manifest.files.keys() - self.groups.keys():
            if name not in self.files.names(self.aside):
                raise OSError(
                    errno.ENOENT,
                    f"{name}, which another rank wrote, is not there for rank 0: "
                    "the ranks have to share the file system that checkpoints go to",
                    str(self.aside),
                )
        write_whole(self.aside / NAME, seal(manifest), self.files)
        self.files.sync_directory(self.aside)
        _rename(self.aside, final, self.files)


def begin(
    directory: Path,
    step: int,
    tree: Params,
    meta: Mapping[str, object],
    layout: Table,
    mesh: Mesh,
    file_bytes: int,
    files: Files,
) -> UnderWay:
    """Agree on what is saved and make the directory that it is written into."""
    meta = {"step": step, **meta}

    def prepare() -> Plan:
        if meta["step"] != step:
            raise ValueError(f"meta says step {meta['step']!r}, but this is the checkpoint of step {step}")
        seal(Manifest(step, meta, {}, {}))  # refuses what cannot be stored before gigabytes are written
        return plan(tree, layout, mesh, step)

    device = device_of(tree)
    planned = together(mesh, prepare, device=device)
    groups = [group for group in deal(planned.parts, file_bytes) if group or mesh.world.size == 1]
    told = gather_ints(mesh, [planned.digest, bytes_needed(groups), len(groups)], device)
    if others := [rank for rank, (digest, _, _) in enumerate(told) if digest != told[0][0]]:
        raise ValueError(f"ranks {others} do not save the same leaves, of the same shapes and step, as rank 0")
    first, count = sum(n for _, _, n in told[: mesh.world.index]), sum(n for _, _, n in told)
    named = {file_name(first + index, count): group for index, group in enumerate(groups)}
    under_way = UnderWay(directory, step, meta, planned, named, mesh, device, files)

    def make() -> None:
        make_directories(directory, files)
        tidy(directory, files)
        _check_space(directory, sum(needed for _, needed, _ in told), files)
        files.mkdir(under_way.aside)

    on_first(mesh, make, device=device)
    return under_way


def device_of(tree: Params) -> torch.device:
    """Return where a tree's tensors are, but for counts on the CPU: there ranks exchange what they have to tell."""
    devices = (node.device for _, node in nodes(tree) if isinstance(node, torch.Tensor))
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _check_space(directory: Path, needed: int, files: Files) -> None:
    needed += 1 << 16
    free = files.free(directory)
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"the checkpoint needs {needed:,} bytes and {free:,} are free: free some, or set checkpoint.keep lower",
            str(directory),
        )


def _join(step: int, meta: Mapping[str, object], shared: Sequence[str], told: list[dict[str, Any]]) -> Manifest:
    """Form the manifest of what all ranks have written, its leaves in the order that the files have them in."""
    leaves: dict[str, Leaf] = {}
    files: dict[str, FileRecord] = {}
    stored: dict[str, str] = {}
    for rank in told:
        stored |= rank["stored"]
        for path, (dtype, whole, file, offset, shape, checksum) in rank["pieces"].items():
            piece = Piece(file, path, tuple(offset), tuple(shape), bytes.fromhex(checksum))
            before = leaves[path].pieces if path in leaves else ()
            leaves[path] = Leaf(dtype, tuple(whole), tuple(sorted((*before, piece), key=lambda p: p.offset)))
    files = {
        name: FileRecord(size, bytes.fromhex(sum_)) for rank in told for name, (size, sum_) in rank["files"].items()
    }
    # a branch that is empty on a rank may have leaves that others own
    empty = dict.fromkeys(path for rank in told for path in rank["empty"])
    through = {path[:place] for path in (*stored, *empty) for place, char in enumerate(path) if char == "/"}
    order = (*shared, *sorted(stored.keys() - set(shared)))
    named = {path: leaves[stored[path]] for path in order}
    return Manifest(step, dict(meta), named, files, tuple(path for path in empty if path not in through))


def _rename(aside: Path, final: Path, files: Files) -> None:
    outgoing = final.with_name(OUTGOING + final.name)
    replaces = final.name in files.names(final.parent)
    if replaces:
        files.rename(final, outgoing)
    files.rename(aside, final)
    files.sync_directory(final.parent)
    if replaces:
        remove(outgoing, files)
