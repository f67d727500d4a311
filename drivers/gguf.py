"""Take a model out of a GGUF file as a run directory of ours, and write a run or a checkpoint as a GGUF file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import evolve

from ironfn import tree
from ironfn.data.tokenizer import EOS_NAMES
from ironfn.data.tokenizer import load as load_tokenizer
from ironfn.hf.gguf_load import GgufModel, load_weights, open_gguf
from ironfn.hf.gguf_save import Words, save_gguf
from ironfn.hf.gguf_tokenizer import tokenizer_of
from ironfn.hf.untrusted import parse_json, read_inside
from ironfn.hf.usage import GENERATION, TEMPLATE, TOKENIZER_CONFIG, chat_template
from ironfn.mesh.axis import SINGLE
from ironfn.model.arch import complete
from ironfn.model.tables import table

from .adapted import open_whole
from .imported import KEPT, keep_model


def import_gguf(source: Path, target: Path, dtype: torch.dtype | None = None, pad_vocab_to: int = 1) -> str:
    """Turn a GGUF file into a run directory and return what there is to say of it. dtype: None makes all float32."""
    model = open_gguf(source)
    spec = evolve(model.spec, pad_vocab_to=pad_vocab_to)
    arch = complete(spec, 1)
    tokenizer = tokenizer_of(model.file.metadata)
    kind = dtype or torch.float32
    params = load_weights(model, arch, table(False), SINGLE, dtype=kind)
    keep_model(
        target, spec, arch, params, kind, tokenizer=tokenizer.encode(), eos=end_of(model), carried=carried(model)
    )
    kinds = ", ".join(sorted({stored.type for stored in model.file.tensors.values()}))
    count = tree.count(params)
    return f"{target}: {model.family.name}, {len(model.file.tensors)} tensors of {kinds}, {count:,} parameters"


def _id(model: GgufModel, end: str) -> int | None:
    found = model.file.metadata.get(f"tokenizer.ggml.{end}_token_id")
    tokens = model.file.metadata.get("tokenizer.ggml.tokens", [])
    return found if type(found) is int and found < len(tokens) else None


def end_of(model: GgufModel) -> int | None:
    """Return the id that ends a document; None where one of the usual names tells."""
    tokens = model.file.metadata["tokenizer.ggml.tokens"]
    return None if any(name in tokens for name in EOS_NAMES) else _id(model, "eos")


def carried(model: GgufModel) -> dict[str, bytes]:
    """Return what a file says beside the model, as a Hugging Face directory says it."""
    ids = {end: number for end in ("bos", "eos") if (number := _id(model, end)) is not None}
    tokens = model.file.metadata["tokenizer.ggml.tokens"]
    names = {f"{end}_token": tokens[number] for end, number in ids.items()}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.spec.context, **names}
    found = {TOKENIZER_CONFIG: _json(config), GENERATION: _json({f"{end}_token_id": ids[end] for end in ids})}
    return found | ({} if model.chat_template is None else {TEMPLATE: model.chat_template.encode()})


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def export_gguf(source: Path, target: Path, kind: str, say: Callable[[str], None]) -> str:
    """Write the newest checkpoint of a run, or the one named, as a GGUF file, and return what there is to say of it."""
    found = open_whole(source, say)
    if found.tokenizer is None:
        raise ValueError(f"{source} has no tokenizer, which a GGUF file has to hold; put its tokenizer.json there")
    beside = found.path.parent.parent / KEPT
    there = set(os.listdir(beside)) if beside.is_dir() else set[str]()
    kept = {name: read_inside(beside, name) for name in (TEMPLATE, GENERATION, TOKENIZER_CONFIG) if name in there}
    eos = load_tokenizer(found.tokenizer, found.spec.data.tokenizer.eos).eos
    ids = {end: _kept_id(kept, end, eos) for end in ("bos", "eos")}
    words = Words(found.tokenizer.read_text(encoding="utf-8"), ids["bos"], ids["eos"], chat_template(kept))
    leaves = tree.flatten(found.params) | tree.flatten(found.fixed)
    name = save_gguf(target, leaves, found.arch, words, kind)
    return f"{target}: {name}, {kind}, {sum(x.numel() for x in leaves.values()):,} parameters"


def _kept_id(kept: Mapping[str, bytes], end: str, otherwise: int) -> int:
    told = parse_json(kept[GENERATION], GENERATION).get(f"{end}_token_id") if GENERATION in kept else None
    first = told[0] if isinstance(told, list) and told else told
    return first if type(first) is int else otherwise
