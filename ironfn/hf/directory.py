"""Read and write whole Hugging Face directories: the config, the weights, and what is carried along as it is."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen

from ironfn.hf.config import Family, family_of, read_spec
from ironfn.hf.export import FILE_BYTES, Exportable, exportable, write_weights
from ironfn.hf.families import FAMILIES
from ironfn.hf.load import dtype_of, load_weights
from ironfn.hf.scorers import SCORERS
from ironfn.hf.tensors import Entry, find
from ironfn.hf.untrusted import parse_json, read_inside, read_json
from ironfn.hf.usage import CONFIG, GENERATION, PROCESSOR, TEMPLATE, TOKENIZER_CONFIG, ends
from ironfn.hf.whole import whole_directory
from ironfn.layout.table import Table
from ironfn.mesh.axis import Mesh
from ironfn.model.arch import Arch
from ironfn.spec.records import ModelSpec
from ironfn.types import Flat, Params

TOKENIZER = "tokenizer.json"
BOTH = (*FAMILIES, *SCORERS)
CARRIED = (
    CONFIG, GENERATION, TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", TEMPLATE, PROCESSOR,
    "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model",
)  # fmt: skip
"""What goes in and out again byte for byte, config.json but for the keys that the model decides. Nothing runs it."""


@frozen
class Described:
    """Hold what a directory's small files say.

    carried: the bytes of those that an export puts back, by name. tokenizer: those of tokenizer.json, if it is there.
    """

    path: Path
    family: Family
    config: dict[str, Any]
    spec: ModelSpec
    carried: dict[str, bytes]
    tokenizer: bytes | None

    def biases(self, arch: Arch) -> tuple[str, ...]:
        """Return the paths of the routers' biases, where this family has them."""
        return _biases(self.family, arch)

    @property
    def eos(self) -> int | None:
        """The id that ends a text, where the files tell one."""
        return next(iter(ends(self.carried)), None)


def _biases(family: Family, arch: Arch) -> tuple[str, ...]:
    """Return the paths of the routers' biases of a family that has them."""
    layers = [layer for layer in range(arch.layers) if arch.has_experts(layer)] if family.bias else []
    return tuple(f"blocks/{layer}/mlp/router/bias" for layer in layers)


def is_directory(path: Path) -> bool:
    """Tell whether this looks like a Hugging Face directory."""
    return path.is_dir() and CONFIG in os.listdir(path)


def describe(path: Path) -> Described:
    """Read what a directory says of its model. ValueError for an unknown architecture or a config that cannot be."""
    config = read_json(path, CONFIG)
    family = family_of(config, BOTH)
    names = set(os.listdir(path))
    return Described(
        path,
        family,
        config,
        read_spec(config, family),
        {name: read_inside(path, name) for name in CARRIED if name in names},
        read_inside(path, TOKENIZER) if TOKENIZER in names else None,
    )


def load_model(
    described: Described,
    arch: Arch,
    layout: Table,
    mesh: Mesh,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Params:
    """Return this rank's share of the model's leaves and of its routers' biases: see `load.load_weights`."""
    naming, fixed = described.family.naming, described.biases(arch)
    return load_weights(described.path, naming, arch, layout, mesh, fixed=fixed, dtype=dtype, device=device)


def stored(path: Path) -> tuple[dict[str, Entry], torch.dtype]:
    """Return the tensors of a directory and the dtype of most of their numbers."""
    entries = find(path)
    return entries, dtype_of(entries)


def with_rows(spec: ModelSpec, described: Described, entries: Mapping[str, Entry]) -> ModelSpec:
    """Take the vocabulary's size from the table that is stored, whatever the config says of it."""
    row = next(row for row in described.family.naming.top if row.ours == ("embed/tokens",))
    base = described.family.naming.base
    entry = entries.get(row.theirs) or entries.get(row.theirs.removeprefix(base))
    return spec if entry is None or not entry.shape else evolve(spec, vocab_size=entry.shape[0])


def export_model(
    path: Path,
    arch: Arch,
    leaves: Flat,
    *,
    carried: Mapping[str, bytes],
    tokenizer: bytes | None,
    eos: int | None = None,
    architecture: str | None = None,
    dtype: torch.dtype | None = None,
    file_bytes: int = FILE_BYTES,
) -> Exportable:
    """Write a Hugging Face directory at ``path``, which has to be new. It is there whole or not at all.

    leaves: every leaf, and the routers' biases, whole, by path. carried: files to put beside, by name, as an import
    kept them. eos: the id that ends, and begins, a text, for a model that never had such files. ValueError where no
    architecture of `transformers` can say this model.
    """
    before = parse_json(carried[CONFIG], CONFIG) if CONFIG in carried else {}
    wanted = architecture or (family_of(before, BOTH).architecture if before else None)
    biased = any(name.endswith("/router/bias") for name in leaves)
    out = exportable(arch, wanted, biased)
    if arch.moe is not None:
        leaves = {name: torch.zeros(arch.moe.experts) for name in _biases(out.family, arch)} | leaves
    same = before.get("model_type") == out.family.model_type
    kind = dtype or max(leaves.values(), key=lambda x: x.numel()).dtype
    name = str(kind).removeprefix("torch.")
    config = (before if same else _ids(eos, carried)) | out.config | {"dtype": name, "torch_dtype": name}
    config.pop("_name_or_path", None)
    files = _made(tokenizer, eos, arch) | dict(carried) | {CONFIG: _json(config)}
    with whole_directory(path) as aside:
        write_weights(aside, out.family, arch, leaves, dtype=dtype, file_bytes=file_bytes)
        for each, data in files.items():
            (aside / each).write_bytes(data)
    return out


def _made(tokenizer: bytes | None, eos: int | None, arch: Arch) -> dict[str, bytes]:
    """Return the small files of a model that never had them."""
    ids = {} if eos is None else {GENERATION: _json({"bos_token_id": eos, "eos_token_id": eos})}
    if tokenizer is None:
        return ids
    return ids | {TOKENIZER: tokenizer, TOKENIZER_CONFIG: _json(_tokenizer_config(tokenizer, eos, arch))}


def _ids(eos: int | None, carried: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the ids of a config that is new; what the model came with, such as a GGUF's, counts first."""
    told = parse_json(carried[GENERATION], GENERATION) if GENERATION in carried else {}
    made = {"bos_token_id": eos, "eos_token_id": eos, "pad_token_id": None}
    return made | {name: told[name] for name in made if name in told}


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def _tokenizer_config(tokenizer: bytes, eos: int | None, arch: Arch) -> dict[str, Any]:
    added = parse_json(tokenizer, TOKENIZER).get("added_tokens") or []
    name = next((token["content"] for token in added if token["id"] == eos), None)
    special = {} if name is None else {"bos_token": name, "eos_token": name}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": arch.context, **special}
