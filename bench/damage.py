"""Damage a real checkpoint in every way that disks and people do, and count how often that is noticed."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from bench.figure import Figure
from ironfn import checkpoint
from ironfn.checkpoint import DamagedCheckpoint
from ironfn.types import Params

Harm = Callable[[Path, random.Random], str]
"""Damages the newest checkpoint of a directory and says how."""


def figures() -> Iterator[Figure]:
    """Yield the share of 200 flipped bits, truncations, deleted and swapped files each that is detected."""
    noticed: dict[str, list[bool]] = {}
    with tempfile.TemporaryDirectory() as room:
        pristine = Path(room) / "pristine"
        for step in (100, 200):
            checkpoint.save(pristine, step, a_state(step, width=64), {"seed": 0}, file_bytes=1 << 18)
        for kind, harm in HARMS.items():
            noticed[kind] = [is_noticed(pristine, harm, seed) is None for seed in range(200)]
    counts = ", ".join(f"{kind} {sum(seen)}/{len(seen)}" for kind, seen in noticed.items())
    every = [seen for kind in noticed.values() for seen in kind]
    yield Figure("damage_detected", sum(every) / len(every), "== 1.0", counts)


def a_state(step: int, width: int) -> Params:
    """Make the parameters and the AdamW moments of a small model, with the dtypes that a run has."""
    generator = torch.Generator().manual_seed(step)
    shapes = {"embed": (8 * width, width), "norm": (width,), "up": (4 * width, width), "down": (width, 4 * width)}
    master: Params = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {
        "params": {name: leaf.to(torch.bfloat16) for name, leaf in master.items() if isinstance(leaf, torch.Tensor)},
        "opt": {"master": master, "count": torch.tensor(step), "empty": torch.empty(0)},
        "extra": {"seen": torch.tensor([True, False]), "bytes": torch.arange(255, dtype=torch.uint8)},
    }


def is_noticed(pristine: Path, harm: Harm, seed: int) -> str | None:
    """Harm a copy of a directory of two checkpoints; return what went unnoticed, or None where nothing did.

    Noticed means: `verify` names it, `load` refuses it, and `newest` tells of it and takes the one before.
    """
    with tempfile.TemporaryDirectory(dir=pristine.parent) as room:
        copy = Path(room) / "checkpoints"
        shutil.copytree(pristine, copy)
        older, newer = checkpoint.steps(copy).values()
        done = harm(newer, random.Random(seed))
        told: list[str] = []
        if not checkpoint.verify(newer):
            return f"verify finds nothing after {done}"
        try:
            checkpoint.load(newer)
            return f"load takes it after {done}"
        except DamagedCheckpoint:
            pass
        if checkpoint.newest(copy, told.append) != older or len(told) != 1:
            return f"newest takes it after {done}"
    return None


def _files(path: Path) -> list[Path]:
    return sorted(path.iterdir())


def flip(path: Path, draw: random.Random) -> str:
    """Flip one bit of one file, each byte of the checkpoint being as likely as any other in half of the draws."""
    files = _files(path)
    weights = [file.stat().st_size for file in files] if draw.random() < 0.5 else None
    file = draw.choices(files, weights)[0]
    data = bytearray(file.read_bytes())
    bit = draw.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)
    return f"bit {bit} of {file.name}"


def truncate(path: Path, draw: random.Random) -> str:
    """Cut a file short: by one byte, to nothing, or anywhere."""
    file = draw.choice(_files(path))
    size = file.stat().st_size
    left = draw.choice([size - 1, 0, draw.randrange(size)])
    with open(file, "r+b") as opened:
        opened.truncate(left)
    return f"{file.name} cut from {size} to {left} bytes"


def blank(path: Path, draw: random.Random) -> str:
    """Write zeros over a block, as a disk does that lost a write."""
    file = draw.choice(_files(path))
    data = bytearray(file.read_bytes())
    begin = draw.randrange(len(data))
    end = min(len(data), begin + draw.choice([1, 512, 4096]))
    if not any(data[begin:end]):
        return flip(path, draw)  # there were only zeros: nothing was lost
    data[begin:end] = bytes(end - begin)
    file.write_bytes(data)
    return f"bytes {begin} to {end} of {file.name} set to 0"


def delete(path: Path, draw: random.Random) -> str:
    """Delete one file."""
    file = draw.choice(_files(path))
    file.unlink()
    return f"{file.name} deleted"


def swap(path: Path, draw: random.Random) -> str:
    """Exchange two files of the checkpoint, or put a file of the older checkpoint in the place of its own."""
    files = _files(path)
    if draw.random() < 0.5:
        one, other = draw.sample(files, 2)
        one_bytes, other_bytes = one.read_bytes(), other.read_bytes()
        one.write_bytes(other_bytes)
        other.write_bytes(one_bytes)
        return f"{one.name} and {other.name} exchanged"
    file = draw.choice(files)
    older = min(p for p in path.parent.iterdir() if p != path)
    file.write_bytes((older / file.name).read_bytes())
    return f"{file.name} taken from {older.name}"


HARMS: Mapping[str, Harm] = {"flip": flip, "truncate": truncate, "blank": blank, "delete": delete, "swap": swap}
