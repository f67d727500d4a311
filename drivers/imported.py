"""Keep a model that came from elsewhere as a run directory of ours: a checkpoint, a tokenizer, a spec to go on with."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from attrs import asdict, evolve

from ironfn import __version__, checkpoint, tree
from ironfn.checkpoint.files import DISK, make_directories, write_whole
from ironfn.data.tokenizer import load as load_tokenizer
from ironfn.hf.directory import Described, describe, load_model, stored, with_rows
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
    eos: int | None = None,
    carried: Mapping[str, bytes] | None = None,
) -> None:
    """Write a run directory of step 0, which has to be new: it is there whole or not at all.

    params: the leaves, and the routers' biases among them. dtype: of most. eos: the id that ends a text; None looks for
    a usual name in ``tokenizer``, a tokenizer.json. carried: files of the source, by name, for an export to put back.
    """
    if target.exists():
        raise ValueError(f"{target} is there already; give a new name, or remove it")
    flat = tree.flatten(params)
    fixed = {path: flat.pop(path) for path in list(flat) if path.endswith("/router/bias")}
    aside = target.with_name(f".tmp-{target.name}")
    shutil.rmtree(aside, ignore_errors=True)  # of a call that died
    make_directories(aside.absolute(), DISK)
    place = RunDir(aside)
    end: str | None = None
    if tokenizer is not None:
        write_whole(place.tokenizer, tokenizer, DISK)
        end = _end(place.tokenizer, eos, arch)
    spec = _continued(target, evolve(model, init_from=str(target)), dtype, end)
    write_whole(place.spec, dump_spec(spec).encode(), DISK)
    if carried:
        (aside / KEPT).mkdir()
        for name, data in carried.items():
            write_whole(aside / KEPT / name, data, DISK)
    extra: Params = {"fixed": tree.unflatten(fixed)} if fixed else {}
    meta = {"ironfn": __version__, "spec": asdict(spec), "arch": asdict(arch), "data": "", "skipped": 0, "seconds": 0.0}
    checkpoint.save(place.checkpoints, 0, {"params": tree.unflatten(flat), "opt": {}, "extra": extra}, meta)
    os.rename(aside, target)


def _end(path: Path, eos: int | None, arch: Arch) -> str | None:
    """Return the name of the token that ends a text. ValueError for a tokenizer that does not fit the model."""
    ids = load_tokenizer(path, None).tokenizer if eos is None else None
    vocabulary = load_tokenizer(path, None if ids is not None else _name(path, eos))
    if vocabulary.size > arch.vocab:
        raise ValueError(
            f"the tokenizer has {vocabulary.size} ids, and the model's vocabulary {arch.vocab}; the files are not of "
            "one model"
        )
    return vocabulary.tokenizer.id_to_token(vocabulary.eos)


def _name(path: Path, eos: int | None) -> str | None:
    from tokenizers import Tokenizer

    return None if eos is None else Tokenizer.from_file(str(path)).id_to_token(eos)


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
