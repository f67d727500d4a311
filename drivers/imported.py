"""Keep a model that came from elsewhere as a run directory of ours: a checkpoint, a tokenizer, a spec to go on with."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from attrs import asdict, evolve
from tokenizers import Tokenizer

from ironfn import __version__, checkpoint, tree
from ironfn.data.tokenizer import Vocabulary, parse
from ironfn.hf.directory import CARRIED, Described, describe, is_directory, load_model, stored, with_rows
from ironfn.hf.untrusted import read_inside
from ironfn.hf.whole import whole_directory
from ironfn.mesh.axis import SINGLE
from ironfn.model.arch import Arch, complete
from ironfn.model.tables import table
from ironfn.spec.dump import dump_spec
from ironfn.spec.records import (
    DataSpec,
    ModelSpec,
    OptimSpec,
    PrecisionSpec,
    RunSpec,
    TokenizerSpec,
    TrainSpec,
)
from ironfn.types import Params

from .rundir import RunDir

KEPT = "hf"
"""Where in a run's directory the files lie that an export puts back as they were."""


def import_directory(
    source: Path, target: Path, dtype: torch.dtype | None, pad_vocab_to: int, *, stored: bool, bare: bool
) -> str:
    """Turn a Hugging Face directory into a run directory and return what there is to say of it.

    stored: the vocabulary is as large as the table that is stored. bare: go on without a tokenizer.
    """
    described = describe(source)
    spec, kind, size = _spec(described, stored)
    arch = complete(evolve(spec, pad_vocab_to=pad_vocab_to), 1)
    if described.tokenizer is None and not bare:
        raise ValueError(
            f"{source} has no tokenizer.json; write one (in transformers: AutoTokenizer.from_pretrained(…)"
            ".save_pretrained(…)), or give --no-tokenizer"
        )
    params = load_model(described, arch, table(False), SINGLE, dtype=dtype)
    keep_model(
        target, evolve(spec, pad_vocab_to=pad_vocab_to), arch, params, dtype or kind,
        tokenizer=described.tokenizer, eos=described.eos, carried=described.carried,
    )  # fmt: skip
    count = tree.count(params)
    what = f"{size} tensors, {count:,} parameters, {tree.nbytes(params):,} bytes"
    return f"{target}: {described.family.architecture}, {what}"


def _spec(described: Described, as_stored: bool) -> tuple[ModelSpec, torch.dtype, int]:
    entries, kind = stored(described.path)
    spec = with_rows(described.spec, described, entries) if as_stored else described.spec
    return spec, kind, len(entries)


def keep_model(
    target: Path,
    model: ModelSpec,
    arch: Arch,
    params: Params,
    dtype: torch.dtype,
    *,
    tokenizer: bytes | None,
    eos: int | None,
    carried: Mapping[str, bytes],
) -> None:
    """Write a run directory of step 0, which has to be new: it is there whole or not at all.

    params: the leaves, and the routers' biases among them. dtype: of most. eos: the id that ends a text; None looks for
    a usual name in ``tokenizer``, a tokenizer.json. carried: files of the source, by name, for an export to put back.
    """
    flat = tree.flatten(params)
    fixed = {path: flat.pop(path) for path in list(flat) if path.endswith("/router/bias")}
    with whole_directory(target) as aside:
        place = RunDir(aside)
        end: str | None = None
        if tokenizer is not None:
            place.tokenizer.write_bytes(tokenizer)
            vocabulary = vocabulary_of(tokenizer, Path(place.tokenizer.name), eos, arch)
            end = vocabulary.tokenizer.id_to_token(vocabulary.eos)
        spec = _continued(target, evolve(model, init_from=str(target)), dtype, end)
        place.spec.write_text(dump_spec(spec), encoding="utf-8")
        _keep(place, carried)
        extra: Params = {"fixed": tree.unflatten(fixed)} if fixed else {}
        meta = {"ironfn": __version__, "spec": asdict(spec), "arch": asdict(arch)}
        meta |= {"data": "", "skipped": 0, "seconds": 0.0}
        checkpoint.save(place.checkpoints, 0, {"params": tree.unflatten(flat), "opt": {}, "extra": extra}, meta)


def _keep(place: RunDir, carried: Mapping[str, bytes]) -> None:
    """Put a source's small files where an export looks for them."""
    if carried:
        (place.path / KEPT).mkdir()
        for name, data in carried.items():
            (place.path / KEPT / name).write_bytes(data)


def kept(place: RunDir) -> dict[str, bytes]:
    """Return the small files of the source that a run's directory keeps, by name."""
    folder = place.path / KEPT
    names = set(os.listdir(folder)) if folder.is_dir() else set[str]()
    return {name: read_inside(folder, name) for name in CARRIED if name in names}


def keep_along(source: str | None, place: RunDir) -> None:
    """Keep the small files of the model that a run begins from, once, if the run has the same tokenizer."""
    path = None if source is None else Path(source)
    if path is None or not path.is_dir() or (place.path / KEPT).exists():
        return
    if is_directory(path):
        described = describe(path)
        tokenizer, carried = described.tokenizer, described.carried
    else:
        beside = RunDir(path)
        tokenizer = beside.tokenizer.read_bytes() if beside.tokenizer.exists() else None
        carried = kept(beside)
    if tokenizer == place.tokenizer.read_bytes():
        _keep(place, carried)


def vocabulary_of(tokenizer: bytes, path: Path, eos: int | None, arch: Arch) -> Vocabulary:
    """Make a vocabulary of a model's tokenizer.json, read from ``path``, whose texts end with ``eos``.

    eos: None looks for a usual name. ValueError where it does not fit the model.
    """
    vocabulary = parse(tokenizer, path, _name(tokenizer, eos))
    if vocabulary.size > arch.vocab:
        raise ValueError(
            f"the tokenizer has {vocabulary.size} ids, and the model's vocabulary {arch.vocab}; the files are not of "
            "one model"
        )
    return vocabulary


def _name(tokenizer: bytes, token: int | None) -> str | None:
    """Return how a tokenizer writes an id; None leaves the choice, or the complaint, to who parses it."""
    try:
        return None if token is None else Tokenizer.from_buffer(tokenizer).id_to_token(token)
    except Exception:  # the library raises bare Exception for what it cannot read
        return None


def _continued(target: Path, model: ModelSpec, dtype: torch.dtype, eos: str | None) -> RunSpec:
    """Return a spec that goes on with the model: low rates, its own tokenizer, rows that are not too long."""
    precision = "bfloat16" if dtype == torch.bfloat16 else "float32"
    return RunSpec(
        name=f"{target.name}-continued",
        model=model,
        data=DataSpec(
            dir=f"data/{target.name}",
            tokenizer=TokenizerSpec(file=str(RunDir(target).tokenizer), eos=eos),
            length=min(model.context, 1024),
        ),
        optim=OptimSpec(lr=2e-5),
        train=TrainSpec(precision=PrecisionSpec(params=precision, compute=precision)),
    )
