"""Bring adapters together with their models, and write them alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen

from ironfn import checkpoint, tree
from ironfn.data.tokenizer import load
from ironfn.hf.config import Family
from ironfn.hf.directory import CONFIG, describe, is_directory, load_model
from ironfn.hf.export import exportable
from ironfn.hf.peft import CONFIG as PEFT_CONFIG
from ironfn.hf.peft import load_adapter, save_adapter
from ironfn.hf.untrusted import parse_json, read_json
from ironfn.mesh.axis import SINGLE
from ironfn.model.adapters import merge
from ironfn.model.arch import Arch, complete
from ironfn.model.tables import table
from ironfn.spec.records import ModelSpec
from ironfn.types import Params

from .adapted import found_base, merged, open_whole
from .imported import keep_model, kept
from .rundir import RunDir
from .saved import Saved, find_checkpoint, open_saved, records

Say = Callable[[str], None]


@frozen
class _Model:
    """Hold a model and all that a run directory of it needs."""

    spec: ModelSpec
    arch: Arch
    params: Params
    tokenizer: bytes | None
    eos: int | None
    carried: dict[str, bytes]
    family: Family


def has_adapter(source: Path) -> bool:
    """Tell whether what a run saved is an adapter alone."""
    found = find_checkpoint(source, lambda line: None)
    return records(checkpoint.read_manifest(found).meta, found)[0].adapter.kind != "none"


def merge_run(source: Path, target: Path, base: Path | None, say: Say) -> str:
    """Merge the adapter of a run's newest checkpoint, or of the one named; return what there is to say of it."""
    saved = open_saved(source, say)
    if saved.spec.adapter.kind == "none":
        raise ValueError(f"{source} has no adapter: it is a model as it stands")
    return _keep(target, _of_saved(merged(saved, say, base)))


def merge_peft(source: Path, target: Path, base: Path | None, say: Say) -> str:
    """Merge an adapter of peft's into a run of ours or a Hugging Face directory."""
    place = base or Path(str(read_json(source, PEFT_CONFIG).get("base_model_name_or_path") or ""))
    if not place.is_dir() or place == Path():
        raise ValueError(f"{source} is an adapter, and its model is not at {str(place)!r}; name it with --base")
    model = _of_directory(place) if is_directory(place) else _of_saved(open_whole(place, say))
    loaded = load_adapter(source, model.arch, model.family)
    under = tree.unflatten(tree.flatten(model.params) | loaded.replaced)
    params, arch = merge(loaded.spec, loaded.arch, under, loaded.params)
    return _keep(target, evolve(model, params=params, arch=arch, spec=evolve(model.spec, tied=arch.tied)))


def export_adapter(source: Path, target: Path, base: Path | None, say: Say) -> str:
    """Write the adapter of a run's newest checkpoint, or of the one named, as peft keeps them."""
    saved = open_saved(source, say)
    under = found_base(saved, base)
    carried = kept(RunDir(saved.path.parent.parent))
    named = str(under.resolve()) if is_directory(under) else None
    save_adapter(target, saved.spec.adapter, saved.arch, saved.params, _family(saved.arch, carried), named)
    count = tree.count(saved.params)
    told = "" if named else f"; peft wants its model as a Hugging Face directory: `ironfn export {under} NEW`"
    return f"{target}: {saved.spec.adapter.kind} of {under}, {count:,} parameters{told}"


def _keep(target: Path, model: _Model) -> str:
    dtype = max(tree.leaves(model.params), key=torch.Tensor.numel).dtype
    keep_model(
        target, model.spec, model.arch, model.params, dtype,
        tokenizer=model.tokenizer, eos=model.eos, carried=model.carried,
    )  # fmt: skip
    return f"{target}: {model.family.architecture}, {tree.count(model.params):,} parameters"


def _of_saved(saved: Saved) -> _Model:
    carried = kept(RunDir(saved.path.parent.parent))
    tokenizer, eos = None, None
    if saved.tokenizer is not None:
        tokenizer, eos = saved.tokenizer.read_bytes(), load(saved.tokenizer, saved.spec.data.tokenizer.eos).eos
    params, family = tree.merge(saved.params, saved.fixed), _family(saved.arch, carried)
    model = evolve(saved.spec.model, vocab_size=saved.arch.vocab)
    return _Model(model, saved.arch, params, tokenizer, eos, carried, family)


def _of_directory(path: Path) -> _Model:
    described = describe(path)
    arch = complete(described.spec, 1)
    params = load_model(described, arch, table(False), SINGLE)
    eos, carried = described.eos, described.carried
    return _Model(described.spec, arch, params, described.tokenizer, eos, carried, described.family)


def _family(arch: Arch, carried: dict[str, bytes]) -> Family:
    """Return the family that names a model's modules: the one that it came from, or the first that can say it."""
    before: dict[str, Any] = parse_json(carried[CONFIG], CONFIG) if CONFIG in carried else {}
    wanted = next(iter(before.get("architectures") or []), None)
    biased = arch.moe is not None and arch.moe.bias_rate > 0
    return exportable(arch, wanted, biased).family
