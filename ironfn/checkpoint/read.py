"""Load a checkpoint, every byte held to its checksum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from ironfn import tree
from ironfn.checkpoint.files import DISK, Files
from ironfn.checkpoint.keep import first_whole
from ironfn.checkpoint.manifest import Leaf, Manifest, Piece, entries_of
from ironfn.checkpoint.shards import open_shard, read_manifest
from ironfn.checkpoint.write import DTYPES, bytes_of
from ironfn.types import Flat, Params


@frozen
class Loaded:
    """Hold what a checkpoint gave: where it lies, the tree, and the meta that it was saved with and its ``step``."""

    path: Path
    tree: Params
    meta: dict[str, Any]


def load(
    path: Path,
    *,
    device: torch.device | str = "cpu",
    into: Params | None = None,
    keep: Callable[[str], bool] | None = None,
    files: Files = DISK,
) -> tuple[Params, dict[str, Any]]:
    """Return the tree that was saved at ``path`` and its meta, in which ``step`` is the step.

    into: fill this tree's tensors in place, whose paths, shapes and dtypes must be those saved; ValueError names every
    leaf that differs, before any is changed. keep: take only the leaves whose path satisfies it. Leaves that were one
    tensor when they were saved are one tensor again. DamagedCheckpoint, naming file and leaf, for any byte that is not
    as it was written; ``into`` may then be half filled.
    """
    manifest = read_manifest(path, files)
    wanted = {p: leaf for p, leaf in manifest.leaves.items() if keep is None or keep(p)}
    if into is not None:
        _compare(path, wanted, tree.flatten(into))
    target = _Target(torch.device(device), {} if into is None else tree.flatten(into))
    users: dict[tuple[str, str], list[tuple[str, Piece]]] = {}
    for leaf_path, leaf in wanted.items():
        for piece in leaf.pieces:
            users.setdefault((piece.file, piece.tensor), []).append((leaf_path, piece))
    for name, entries in entries_of(manifest).items():
        mine = [entry for entry in entries if (name, entry.tensor) in users]
        if not mine and keep is not None:
            continue
        with open_shard(path, name, entries, manifest.files[name], files) as shard:
            for entry in mine:
                target.fill(wanted, users[name, entry.tensor], lambda data, entry=entry: shard.read(entry, data))
            if len(mine) == len(entries):
                shard.finish(manifest.files[name])
    if into is None:
        into = _grow(manifest, {p: target.flat[p] for p in wanted}, keep)
    return into, {**manifest.meta, "step": manifest.step}


def load_newest(
    directory: Path,
    warn: Callable[[str], None],
    *,
    restart: bool = False,
    device: torch.device | str = "cpu",
    into: Params | None = None,
    files: Files = DISK,
) -> Loaded | None:
    """Load the newest checkpoint that is whole, in one pass over its bytes; None where there is none at all.

    ``newest`` tells what ``warn`` hears and when DamagedCheckpoint is raised, ``load`` the rest.
    """

    def attempt(path: Path) -> Loaded:
        return Loaded(path, *load(path, device=device, into=into, files=files))

    return first_whole(directory, attempt, warn, restart, files)


@frozen
class _Target:
    """Gather leaves: those of ``into`` are there from the start, others are made when their first bytes are read."""

    device: torch.device
    flat: Flat

    def fill(
        self, leaves: dict[str, Leaf], users: list[tuple[str, Piece]], read: Callable[[memoryview | None], None]
    ) -> None:
        """Read one stored tensor into the leaves that it belongs to."""
        (path, piece), *others = users
        leaf = leaves[path]
        if path not in self.flat:
            self.flat[path] = torch.empty(leaf.shape, dtype=_TORCH[leaf.dtype], device=self.device)
        whole = self.flat[path].detach()
        if whole.device.type == "cpu" and whole.is_contiguous() and piece.shape == leaf.shape:
            read(bytes_of(whole) if whole.numel() else None)
        else:
            part = torch.empty(piece.shape, dtype=whole.dtype)
            read(bytes_of(part) if part.numel() else None)
            box = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))
            whole[box].copy_(part)
        for other, _ in others:
            self.flat.setdefault(other, self.flat[path])
            if self.flat[other] is not self.flat[path]:
                self.flat[other].detach().copy_(whole)


_TORCH: Mapping[str, torch.dtype] = {name: dtype for dtype, name in DTYPES.items()}


def _compare(path: Path, leaves: dict[str, Leaf], into: Flat) -> None:
    wrong = [f"missing in the checkpoint: {p}" for p in into if p not in leaves]
    wrong += [f"not in the tree that it is loaded into: {p}" for p in leaves if p not in into]
    for p, leaf in leaves.items():
        if p in into:
            here = (tuple(into[p].shape), into[p].dtype)
            saved = (leaf.shape, _TORCH[leaf.dtype])
            wrong += [f"different: {p} is {saved} in the checkpoint, {here} in the tree"] if here != saved else []
    if wrong:
        raise ValueError(f"checkpoint {path} does not fit the tree:\n  " + "\n  ".join(wrong))


def _grow(manifest: Manifest, flat: Flat, keep: Callable[[str], bool] | None) -> Params:
    empty: dict[str, Any] = {p: {} for p in manifest.empty if keep is None or keep(p)}
    return tree.unflatten({**flat, **empty})
