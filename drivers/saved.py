"""Find and read what a run has saved: its newest checkpoint, the records and the weights in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import frozen

from ironfn import checkpoint, tree
from ironfn.checkpoint.manifest import NAME as MANIFEST
from ironfn.data.preparation import TOKENIZER
from ironfn.model.arch import Arch
from ironfn.spec.records import RunSpec
from ironfn.spec.structure import structure
from ironfn.types import Params


@frozen
class Saved:
    """Hold what a checkpoint says of a model.

    fixed: the leaves beside its parameters. tokenizer: its tokenizer.json, if there is one. base: the `start.identity`
    of the model that an adapter was trained beside, or "".
    """

    path: Path
    params: Params
    fixed: Params
    arch: Arch
    spec: RunSpec
    tokenizer: Path | None
    base: str = ""


def find_checkpoint(path: Path, say: Callable[[str], None]) -> Path:
    """Return a run directory's newest whole checkpoint, or the one that the path is. ValueError where there is none."""
    if path.is_file():
        raise ValueError(f"{path} is a file; a model here is a run's directory, which `ironfn convert` makes of a GGUF")
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = folder if (folder / MANIFEST).exists() else checkpoint.newest(folder, say)
    if found is None:
        raise ValueError(f"{path} holds no checkpoint; {_remedy(path)}")
    return found


def _remedy(path: Path) -> str:
    if (path / "config.json").exists():
        return f"it is a model of Hugging Face's form: `ironfn convert {path} NEW` makes a run of it"
    if (path / "adapter_config.json").exists():
        return "it is an adapter without its model: merge the two first (in peft: `merge_and_unload`)"
    return "train one with `ironfn pretrain`, or take one from elsewhere with `ironfn convert`"


def records(meta: dict[str, Any], found: Path) -> tuple[RunSpec, Arch]:
    """Return the spec and the architecture that a checkpoint was saved with. ValueError for another version's."""
    spec, arch = structure(meta["spec"], RunSpec), structure(meta["arch"], Arch)
    if isinstance(spec, list) or isinstance(arch, list):
        raise ValueError(f"{found} was written by ironfn {meta['ironfn']}, whose specs this version does not read")
    return spec, arch


def is_weights(leaf: str) -> bool:
    """Tell whether a leaf of a checkpoint is part of the model, not of the optimizer."""
    return leaf.startswith(("params/", "extra/fixed/"))


def open_saved(path: Path, say: Callable[[str], None]) -> Saved:
    """Open a run directory's newest whole checkpoint, or one checkpoint. ValueError where there is none."""
    found = find_checkpoint(path, say)
    saved, meta = checkpoint.load(found, keep=is_weights)
    spec, arch = records(meta, found)
    places = [found.parent.parent / TOKENIZER, Path(spec.data.dir) / TOKENIZER]
    tokenizer = next((place for place in places if place.exists()), None)
    say(f"{found}, step {meta['step']}")
    extra = tree.branch(saved, "extra") if "extra" in saved else {}
    fixed = tree.branch(extra, "fixed") if "fixed" in extra else {}
    return Saved(found, tree.branch(saved, "params"), fixed, arch, spec, tokenizer, meta.get("base", ""))
