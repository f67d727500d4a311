"""Choose among the checkpoints of a run: list them, take the newest whole one, delete the old ones, tidy up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ironfn.checkpoint.files import DISK, Files
from ironfn.checkpoint.manifest import DamagedCheckpoint
from ironfn.checkpoint.shards import read_manifest, step_name, step_of, verify

Found = TypeVar("Found")

ASIDE = ".tmp-"
"""Begins the name of what is being written or deleted: nobody reads it, and the next save removes it."""
OUTGOING = ".old-"
"""Begins the name of a checkpoint that another of the same step is about to replace."""


def steps(directory: Path, files: Files = DISK) -> dict[int, Path]:
    """Return the checkpoints in a directory, whole or not, by step, oldest first."""
    found = ((step_of(name), directory / name) for name in _names(directory, files))
    return dict(sorted((step, path) for step, path in found if step is not None))


def newest(directory: Path, warn: Callable[[str], None], *, restart: bool = False, files: Files = DISK) -> Path | None:
    """Return the newest checkpoint of which every byte is as it was written, or None where there is none at all.

    Each damaged one before it is told to ``warn``. DamagedCheckpoint where there are some and none is whole, since
    that run would begin again unnoticed; with ``restart`` that is what is wanted, and the answer is None.
    """

    def whole(path: Path) -> Path:
        if problems := verify(path, files):
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise DamagedCheckpoint(f"{problems[0]}{more}")
        return path

    return first_whole(directory, list(steps(directory, files).values()), whole, warn, restart)


def first_whole(
    directory: Path,
    candidates: list[Path],
    attempt: Callable[[Path], Found],
    warn: Callable[[str], None],
    restart: bool,
) -> Found | None:
    """Return what ``attempt`` makes of the last candidate that does not make it raise DamagedCheckpoint."""
    candidates = candidates[::-1]
    for place, path in enumerate(candidates):
        try:
            return attempt(path)
        except DamagedCheckpoint as error:
            before = candidates[place + 1 :]
            then = f"trying {before[0].name}" if before else "there is none before it"
            warn(f"checkpoint {path} is damaged: {error}; {then}")
    if candidates and not restart:
        raise DamagedCheckpoint(
            f"none of the {len(candidates)} checkpoints in {directory} is whole: restore one, "
            "or move them away to begin again at step 0 (`ironfn pretrain --restart` does not ask)"
        )
    return None


def prune(directory: Path, keep: int, keep_every: int | None = None, files: Files = DISK) -> list[Path]:
    """Delete all but the newest ``keep`` checkpoints and those at multiples of ``keep_every``; return the deleted.

    A checkpoint that is evidently not whole (its manifest damaged, a file missing or of the wrong size) takes no place
    among the newest, so that it never pushes a good one out.
    """
    if keep < 1:
        raise ValueError(f"cannot keep the newest {keep} checkpoints: a run needs at least 1 to resume from")
    deleted: list[Path] = []
    kept = 0
    for step, path in reversed(steps(directory, files).items()):
        if kept < keep:
            kept += _seems_whole(path, files)
        elif keep_every is None or step % keep_every:
            _delete(path, files)
            deleted.append(path)
    return deleted


def tidy(directory: Path, files: Files = DISK) -> None:
    """Remove what a death in the middle of a save or of a deletion left behind. Only for the one who may save here."""
    names = _names(directory, files)
    for name in names:
        if name.startswith(ASIDE) and step_of(name.removeprefix(ASIDE)) is not None:
            remove(directory / name, files)
        step = step_of(name.removeprefix(OUTGOING)) if name.startswith(OUTGOING) else None
        if step is not None and step_name(step) in names:
            files.sync_directory(directory)  # its successor may not be on the disk yet
            remove(directory / name, files)
        elif step is not None:  # died between the two renames: the old one is still the checkpoint of its step
            files.rename(directory / name, directory / step_name(step))


def _names(directory: Path, files: Files) -> list[str]:
    try:
        return files.names(directory)
    except FileNotFoundError:
        return []


def remove(path: Path, files: Files) -> None:
    """Delete a directory of files."""
    for name in files.names(path):
        files.unlink(path / name)
    files.rmdir(path)


def _delete(path: Path, files: Files) -> None:
    aside = path.with_name(ASIDE + path.name)  # first out of sight: a half deleted checkpoint would look damaged
    files.rename(path, aside)
    files.sync_directory(path.parent)
    remove(aside, files)


def _seems_whole(path: Path, files: Files) -> bool:
    try:
        manifest = read_manifest(path, files)
        return all(files.size(path / name) == record.size for name, record in manifest.files.items())
    except (DamagedCheckpoint, FileNotFoundError):
        return False
