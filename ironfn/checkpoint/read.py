"""Load a checkpoint, every byte held to its checksum: the whole tree, or what a rank of any mesh needs of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import define, frozen
from torch import Tensor

from ironfn import tree
from ironfn.checkpoint.files import DISK, Files
from ironfn.checkpoint.keep import first_whole, steps
from ironfn.checkpoint.manifest import ITEM_BYTES, DamagedCheckpoint, Leaf, Manifest, entries_of
from ironfn.checkpoint.plan import DTYPES
from ironfn.checkpoint.shards import open_shard, read_manifest, step_name
from ironfn.checkpoint.write import blocks, bytes_of
from ironfn.layout.table import WHOLE_TABLE, Box, Table, held, placement, share_of
from ironfn.mesh.agree import each, together
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.types import Flat, Params

_KINDS = (DamagedCheckpoint, ValueError)
_TORCH: Mapping[str, torch.dtype] = {name: dtype for dtype, name in DTYPES.items()}


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
    layout: Table = WHOLE_TABLE,
    mesh: Mesh = SINGLE,
    files: Files = DISK,
) -> tuple[Params, dict[str, Any]]:
    """Return the tree that was saved at ``path`` and its meta, in which ``step`` is the step.

    layout, mesh: return this rank's part of the tree, whatever mesh it was saved on; all ranks call this together. Of
    each leaf only this rank's share is ever in memory, though every piece that it touches is read whole, for its
    checksum. into: fill this tree's tensors in place, whose paths, shapes and dtypes must be those saved; ValueError
    names every leaf that differs, before any is changed. keep: take only the leaves whose path satisfies it. Leaves
    that were one tensor when they were saved are one tensor again. DamagedCheckpoint, naming file and leaf, for any
    byte that is not as it was written, on every rank if one has met it; ``into`` may then be half filled.
    """
    here = torch.device(device)
    flat = None if into is None else tree.flatten(into)

    def look() -> tuple[Manifest, dict[str, Box]]:
        manifest = read_manifest(path, files)
        return manifest, _boxes(path, manifest, flat, keep, layout, mesh)

    def read() -> Params:
        found = _fill(path, manifest, _slots(manifest, boxes, flat, here), files)
        return _grow(manifest, {p: found[p] for p in boxes}, keep) if into is None else into

    manifest, boxes = together(mesh, look, _KINDS, here)
    if into is not None:
        wanted = [p for p in manifest.leaves if keep is None or keep(p)]
        mine = torch.tensor([p in boxes for p in wanted], dtype=torch.int32, device=here)
        held_by = mesh.world.backend.all_reduce(mine)
        if left := [p for p, count in zip(wanted, held_by.tolist(), strict=True) if not count]:
            raise _misfit(path, [f"not in the tree that it is loaded into: {p}" for p in left])
    return together(mesh, read, _KINDS, here), {**manifest.meta, "step": manifest.step}


def load_newest(
    directory: Path,
    warn: Callable[[str], None],
    *,
    restart: bool = False,
    device: torch.device | str = "cpu",
    into: Params | None = None,
    layout: Table = WHOLE_TABLE,
    mesh: Mesh = SINGLE,
    files: Files = DISK,
) -> Loaded | None:
    """Load the newest checkpoint that is whole, in one pass over its bytes; None where there is none at all.

    ``newest`` tells what ``warn`` hears and when DamagedCheckpoint is raised, ``load`` the rest. On a mesh rank 0 says
    which checkpoints there are, and one that any rank finds damaged is given up by all: ``warn`` hears it on each.
    """

    def attempt(path: Path) -> Loaded:
        return Loaded(path, *load(path, device=device, into=into, layout=layout, mesh=mesh, files=files))

    there = together(mesh, lambda: ",".join(map(str, steps(directory, files))), _KINDS, device)
    first, *_ = each(mesh, there.encode(), device)
    candidates = [directory / step_name(int(step)) for step in first.decode().split(",") if step]
    return first_whole(directory, candidates, attempt, warn, restart)


def _boxes(
    path: Path,
    manifest: Manifest,
    into: Flat | None,
    keep: Callable[[str], bool] | None,
    layout: Table,
    mesh: Mesh,
) -> dict[str, Box]:
    """Say which box of which leaf this rank needs. ValueError, naming every leaf, where ``into`` is of others."""
    boxes: dict[str, Box] = {}
    wrong: list[str] = []
    for p, leaf in manifest.leaves.items():
        if keep is not None and not keep(p):
            continue
        if into is not None and p not in into and isinstance(layout, Mapping) and p not in layout:
            continue  # another rank's, perhaps
        if not held(place := placement(layout, p), mesh):
            continue
        boxes[p] = share_of(leaf.shape, place, mesh, p)
        if into is not None and p not in into:
            wrong.append(f"not in the tree that it is loaded into: {p}")
        elif into is not None:
            here, saved = (tuple(into[p].shape), into[p].dtype), (boxes[p].shape, _TORCH[leaf.dtype])
            wrong += [f"different: {p} is {saved} in the checkpoint, {here} in the tree"] if here != saved else []
    wrong += [f"missing in the checkpoint: {p}" for p in into or () if p not in boxes]
    if wrong:
        raise _misfit(path, wrong)
    return boxes


def _misfit(path: Path, wrong: list[str]) -> ValueError:
    return ValueError(f"checkpoint {path} does not fit the tree:\n  " + "\n  ".join(wrong))


@define
class _Slot:
    """Be one tensor that is filled: a box of a saved leaf, for the paths at which the tree has it."""

    leaf: Leaf
    box: Box
    device: torch.device
    paths: list[str]
    found: Tensor | None

    def tensor(self) -> Tensor:
        """Return it, made when its first bytes come: nothing is allocated for a checkpoint that is refused."""
        if self.found is None:
            self.found = torch.empty(self.box.shape, dtype=_TORCH[self.leaf.dtype], device=self.device)
        return self.found

    def part(self, box: Box) -> Tensor:
        """View a box, given in the leaf's coordinates."""
        return self.tensor()[_within(box, self.box)]


def _slots(manifest: Manifest, boxes: dict[str, Box], into: Flat | None, device: torch.device) -> list[_Slot]:
    """Make a slot for each tensor that is read: leaves that share their pieces, and of them the box, share it."""
    slots: dict[tuple[str, str, Box], _Slot] = {}
    for p, box in boxes.items():
        leaf = manifest.leaves[p]
        key = (leaf.pieces[0].file, leaf.pieces[0].tensor, box)
        found = None if into is None else into[p].detach()
        slots.setdefault(key, _Slot(leaf, box, device, [], found)).paths.append(p)
    if into is not None:  # here they may be separate tensors: each is filled
        rest = [_Slot(s.leaf, s.box, device, [p], into[p].detach()) for s in slots.values() for p in s.paths[1:]]
        return [*slots.values(), *rest]
    return list(slots.values())


def _fill(path: Path, manifest: Manifest, slots: list[_Slot], files: Files) -> Flat:
    """Read every tensor of every file of which a slot has a part, and return what the slots hold, by path."""
    users: dict[tuple[str, str], list[tuple[_Slot, Box]]] = {}
    for slot in slots:
        for piece in slot.leaf.pieces:
            box = Box(piece.offset, piece.shape)
            if _overlap(slot.box, box) is not None:
                users.setdefault((piece.file, piece.tensor), []).append((slot, box))
    for name, entries in entries_of(manifest).items():
        mine = [entry for entry in entries if (name, entry.tensor) in users or entry.begin == entry.end]
        if entries and not mine:
            continue
        with open_shard(path, name, entries, manifest.files[name], files) as shard:
            for entry in mine:
                shard.read(entry, _parts(users.get((name, entry.tensor), ())))
            if len(mine) == len(entries):
                shard.finish(manifest.files[name])
    return {p: slot.tensor() for slot in slots for p in slot.paths}


def _parts(users: Sequence[tuple[_Slot, Box]]) -> Iterator[memoryview]:
    """Yield the memory that a stored tensor is read into, block by block: the target's own where the block lies so."""
    if not users:
        return
    (slot, box), *_ = users
    dtype, item = _TORCH[slot.leaf.dtype], ITEM_BYTES[slot.leaf.dtype]
    scratch = torch.empty(0, dtype=torch.uint8)
    for block in blocks(box, item):
        hits = [(slot, common) for slot, _ in users if (common := _overlap(slot.box, block)) is not None]
        if len(hits) == 1 and hits[0][1] == block:
            direct = hits[0][0].part(block)
            if direct.device.type == "cpu" and direct.is_contiguous():
                yield bytes_of(direct)
                continue
        size = math.prod(block.shape) * item
        scratch = scratch if len(scratch) >= size else torch.empty(size, dtype=torch.uint8)
        part = scratch[:size].view(dtype).view(block.shape)
        yield bytes_of(part)
        for slot, common in hits:
            slot.part(common).copy_(part[_within(common, block)])


def _overlap(a: Box, b: Box) -> Box | None:
    begin = tuple(map(max, a.offset, b.offset))
    end = tuple(min(o + n, p + m) for o, n, p, m in zip(a.offset, a.shape, b.offset, b.shape, strict=True))
    shape = tuple(e - s for s, e in zip(begin, end, strict=True))
    return None if any(size <= 0 for size in shape) else Box(begin, shape)


def _within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the index that takes a box out of the tensor of another one around it."""
    return Box(tuple(o - p for o, p in zip(box.offset, outer.offset, strict=True)), box.shape).slices


def _grow(manifest: Manifest, flat: Flat, keep: Callable[[str], bool] | None) -> Params:
    empty: dict[str, Any] = {p: {} for p in manifest.empty if keep is None or keep(p)}
    return tree.unflatten({**flat, **empty})
