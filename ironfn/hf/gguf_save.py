"""Write a model as a GGUF file, one tensor at a time, with nothing lost or the file not begun."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from attrs import frozen

from ironfn.hf.config import write_config
from ironfn.hf.export import differences, plan
from ironfn.hf.gguf_families import FAMILIES, GgufFamily
from ironfn.hf.gguf_file import TYPES, package
from ironfn.hf.gguf_load import TOLD, spec_of, straight
from ironfn.hf.gguf_rope import FACTORS
from ironfn.hf.gguf_tokenizer import metadata_of
from ironfn.hf.links import Link, links
from ironfn.hf.whole import whole_file
from ironfn.model.arch import Arch, complete
from ironfn.types import Flat

FILE_TYPES: Mapping[str, int] = MappingProxyType({"F32": 0, "F16": 1, "Q8_0": 7})
"""What the matrices may be written as, with the number that ``general.file_type`` has for it."""


@frozen
class Words:
    """Hold the text side of a model: its tokenizer.json, the ids that begin and end a text, its chat template."""

    tokenizer: str
    bos: int | None
    eos: int | None
    chat_template: str | None = None


def save_gguf(path: Path, leaves: Flat, arch: Arch, words: Words, kind: str = "F16") -> str:
    """Write a whole model as a GGUF file that llama.cpp reads, and return the architecture's name there.

    leaves: every leaf, whole, by path. kind: what matrices are written as, a key of `FILE_TYPES`; vectors, positions
    and routers stay float32, and what Q8_0's blocks of 32 do not divide becomes float16. ValueError, before anything
    is written, for a model that no architecture of GGUF holds, and for a tokenizer that it has no name for.
    """
    if kind not in FILE_TYPES:
        raise ValueError(f"GGUF files are written as {', '.join(FILE_TYPES)}, not {kind}")
    family, keys = family_of(arch)
    if biases := sorted(path for path in leaves if path.endswith("router/bias")):
        raise ValueError(f"GGUF's {family.name} has no tensor for {biases[0]}; export a Hugging Face directory")
    metadata = _metadata(family, keys, arch, words, kind)
    with whole_file(path) as place:
        _write(place, family, keys, metadata, leaves, arch, kind)
    return family.name


def _write(
    place: Path,
    family: GgufFamily,
    keys: Mapping[str, Any],
    metadata: Mapping[str, Any],
    leaves: Flat,
    arch: Arch,
    kind: str,
) -> None:
    gguf = package()
    types, quantize = gguf.GGMLQuantizationType, gguf.quants.quantize
    writer = gguf.GGUFWriter(place, family.name)
    for key, value in metadata.items():
        writer.add_key_value(key, value, _type_of(gguf, value))
    factors = {name: np.array(keys[name], np.float32) for name in FACTORS if name in keys}
    for name, values in factors.items():
        writer.add_tensor_info(f"{name}.weight", values.shape, None, values.nbytes, types.F32)
    found = [(link, _kind_of(link, kind)) for link in links(family.family.naming, arch) if link.expert is None]
    for link, as_kind in found:
        _, block, size = TYPES[as_kind]
        shape = _shape_of(link)
        writer.add_tensor_info(link.tensor, shape, None, math.prod(shape) // block * size, types[as_kind])
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for values in factors.values():
            writer.write_tensor_data(values)
        for link, as_kind in found:
            numbers = straight(link.tensor, plan(link, arch, leaves, torch.float32).make(), family, arch, back=True)
            writer.write_tensor_data(quantize(numbers.reshape(_shape_of(link)).contiguous().numpy(), types[as_kind]))
    finally:
        writer.close()


def _metadata(family: GgufFamily, keys: Mapping[str, Any], arch: Arch, words: Words, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {"general.file_type": FILE_TYPES[kind]}
    found |= {f"{family.name}.{key}": value for key, value in keys.items() if key not in FACTORS}
    ids = {"bos": words.bos, "eos": words.eos, "padding": words.eos}
    found |= {f"tokenizer.ggml.{end}_token_id": number for end, number in ids.items() if number is not None}
    found |= {f"{family.name}.vocab_size": arch.vocab, **metadata_of(words.tokenizer, arch.vocab)}
    found |= {"general.quantization_version": 2} if kind == "Q8_0" else {}
    return found | ({} if words.chat_template is None else {"tokenizer.chat_template": words.chat_template})


def _shape_of(link: Link) -> tuple[int, ...]:
    return link.shape[1:] if link.tensor.endswith("_inp_shexp.weight") else link.shape


def _kind_of(link: Link, kind: str) -> str:
    shape = _shape_of(link)
    if len(shape) == 1 or "ffn_gate_inp" in link.tensor or link.tensor.startswith("position_embd"):
        return "F32"
    return "F16" if kind == "Q8_0" and shape[-1] % TYPES[kind][1] else kind


def _type_of(gguf: Any, value: Any) -> Any:
    kinds = gguf.GGUFValueType
    return kinds.UINT32 if type(value) is int else kinds.get_type(value)


def family_of(arch: Arch) -> tuple[GgufFamily, dict[str, Any]]:
    """Return the architecture of GGUF that holds this model, and its keys: reading them again gives this model.

    ValueError, with what the nearest one would lose, where there is none.
    """
    told = {
        "rows": arch.vocab,
        "tied": arch.tied,
        "attn_q.bias": arch.attention_bias,
        "attn_output.bias": arch.out_bias,
    }
    faults: dict[str, list[str]] = {}
    for family in FAMILIES:
        keys = {name: value for name, value in write_config(arch, family.family).items() if value is not None}
        keys = {name: value for name, value in keys.items() if name not in ("architectures", "model_type", *TOLD)}
        try:
            faults[family.name] = differences(arch, complete(spec_of(keys | told, family), 1))
        except ValueError as error:
            faults[family.name] = [str(error)]
        if not faults[family.name]:
            return family, keys
    nearest = min(faults, key=lambda name: len(faults[name]))
    raise ValueError(
        f"no architecture of GGUF holds this model; the nearest, {nearest}, would lose: {'; '.join(faults[nearest])}. "
        "Export it as a Hugging Face directory"
    )
