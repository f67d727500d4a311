"""Write a run or a checkpoint of ours as a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from ironfn import tree
from ironfn.data.tokenizer import load
from ironfn.hf.directory import export_model

from .adapted import open_whole
from .imported import kept
from .rundir import RunDir


def export_run(
    source: Path,
    target: Path,
    dtype: torch.dtype | None,
    architecture: str | None,
    file_bytes: int,
    say: Callable[[str], None],
    base: Path | None = None,
) -> str:
    """Write the newest checkpoint of a run, or the one named, and return what there is to say of it.

    base: see `open_whole`.
    """
    found = open_whole(source, say, base)
    carried = kept(RunDir(found.path.parent.parent))
    leaves = tree.flatten(found.params) | tree.flatten(found.fixed)
    tokenizer, eos = None, None
    if found.tokenizer is not None:
        tokenizer = found.tokenizer.read_bytes()
        eos = load(found.tokenizer, found.spec.data.tokenizer.eos).eos
    out = export_model(
        target, found.arch, leaves, carried=carried, tokenizer=tokenizer, eos=eos,
        architecture=architecture, dtype=dtype, file_bytes=file_bytes,
    )  # fmt: skip
    count = sum(leaf.numel() for leaf in leaves.values())
    return f"{target}: {out.family.architecture}, {len(leaves)} leaves, {count:,} parameters"
