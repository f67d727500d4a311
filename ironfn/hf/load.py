"""Import a model's weights, tensor by tensor, straight into its place on any mesh."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from attrs import define, field
from torch import Tensor

from ironfn import tree
from ironfn.hf.links import EMBEDDING, PADDED, Link, head_name, match
from ironfn.hf.names import Naming
from ironfn.hf.tensors import DTYPES, Entry, Source, find
from ironfn.layout.table import Box, Table, held, placement, share_of
from ironfn.mesh.agree import together
from ironfn.mesh.axis import Mesh
from ironfn.model.arch import Arch
from ironfn.model.init import Shapes, shapes
from ironfn.types import Flat, Params


def load_weights(
    directory: Path,
    naming: Naming,
    arch: Arch,
    layout: Table,
    mesh: Mesh,
    *,
    fixed: tuple[str, ...] = (),
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Params:
    """Return this rank's share of a model's leaves, read from a directory's safetensors files.

    Of each tensor only this rank's part is read, and one tensor at a time is in memory besides the leaves. fixed: paths
    of leaves beside the parameters. dtype: None keeps the files'. All ranks call this together. ValueError, on every
    rank, for files that do not fit; before any leaf is made.
    """

    def look() -> list[tuple[Link, Entry]]:
        entries = find(directory)
        pairs = match(entries, naming, arch, fixed)
        _check_dtypes(pairs, dtype)
        if arch.tied and head_name(naming) in entries:
            _check_tied(directory, entries[head_name(naming)], pairs)
        return pairs

    def read() -> Params:
        loading = Loading(shapes(arch) | _fixed_shapes(arch, fixed), layout, mesh, torch.device(device), dtype)
        source = Source(directory)

        def take(pair: tuple[Link, Entry]) -> None:
            link, entry = pair
            with source.tensor(entry) as tensor:
                for path, part in zip(link.paths, link.parts(tensor), strict=True):
                    loading.fill(path, part, link.expert)

        # what takes the time is turning matrices and finding memory: neither holds the interpreter's lock
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for _ in pool.map(take, sorted(pairs, key=lambda pair: (pair[1].file, pair[1].begin))):
                pass
        return tree.unflatten({path: loading.leaves[path] for path in loading.shapes if path in loading.leaves})

    pairs = together(mesh, look, device=device)
    return together(mesh, read, device=device)


def _fixed_shapes(arch: Arch, fixed: tuple[str, ...]) -> Shapes:
    return dict.fromkeys(fixed, (0 if arch.moe is None else arch.moe.experts,))


def _check_dtypes(pairs: list[tuple[Link, Entry]], dtype: torch.dtype | None) -> None:
    """Refuse parts of one leaf in different dtypes, unless all are cast."""
    seen: dict[str, str] = {}
    for link, entry in pairs:
        for path in link.paths:
            if dtype is None and seen.setdefault(path, entry.dtype) != entry.dtype:
                raise ValueError(f"{link.tensor} is {entry.dtype}, other parts of {path} {seen[path]}; choose a dtype")


def _check_tied(directory: Path, head: Entry, pairs: list[tuple[Link, Entry]]) -> None:
    """Hold a head that is stored beside the embedding that it is tied to equal to it."""
    entry = next(entry for link, entry in pairs if link.paths == (EMBEDDING,))
    source = Source(directory)
    same = (head.dtype, head.shape) == (entry.dtype, entry.shape)
    if same and DTYPES.get(head.dtype) is not None:
        with source.tensor(entry) as a, source.tensor(head) as b:
            same = torch.equal(a, b)
    if not same:
        raise ValueError(
            "the config ties the head to the embedding, but the files hold a head that differs from it; set "
            "tie_word_embeddings to false in config.json if the head is the one that was trained"
        )


@define
class Loading:
    """Hold the leaves as they are filled; each is made when its first numbers come."""

    shapes: Shapes
    layout: Table
    mesh: Mesh
    device: torch.device
    dtype: torch.dtype | None
    leaves: Flat = field(factory=dict)
    lock: threading.Lock = field(factory=threading.Lock)

    def fill(self, path: str, part: Tensor, expert: int | None) -> None:
        """Copy this rank's share of a leaf, or of one expert's part of it, out of a view of the file."""
        whole, place = self.shapes[path], placement(self.layout, path)
        if not held(place, self.mesh):
            return
        box = share_of(whole, place, self.mesh, path)
        with self.lock:
            if path not in self.leaves:
                make = torch.zeros if path in PADDED else torch.empty
                self.leaves[path] = make(box.shape, dtype=self.dtype or part.dtype, device=self.device)
            target = self.leaves[path]
        if expert is not None:
            at = expert - box.offset[0]
            if not 0 <= at < box.shape[0]:
                return
            target, box = target[at], Box(box.offset[1:], box.shape[1:])
        _copy(target, part, box)


def _copy(target: Tensor, part: Tensor, box: Box) -> None:
    if part.dim() > len(box.shape):  # interleaved: [..., heads, head_dim]
        size = part.shape[-1]
        first, count = box.offset[-1] // size, box.shape[-1] // size
        assert box.offset[-1] % size == box.shape[-1] % size == 0
        box = Box((*box.offset[:-1], first, 0), (*box.shape[:-1], count, size))
        target = target.unflatten(-1, (count, size))
    if (there := max(0, min(box.shape[0], part.shape[0] - box.offset[0]))) < box.shape[0]:
        box, target = Box(box.offset, (there, *box.shape[1:])), target[:there]
    target.copy_(part[box.slices])


def dtype_of(entries: Mapping[str, Entry]) -> torch.dtype:
    """Return the dtype of most of a model's numbers."""
    count: dict[str, int] = {}
    for entry in entries.values():
        count[entry.dtype] = count.get(entry.dtype, 0) + entry.end - entry.begin
    return DTYPES.get(max(count, key=lambda name: count[name]), torch.float32) if count else torch.float32
