"""Import a model out of a GGUF file: its spec and its weights, straight into their places on any mesh."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from ironfn import tree
from ironfn.hf.config import Config, read_spec
from ironfn.hf.gguf_families import FAMILIES, GgufFamily
from ironfn.hf.gguf_file import GgufFile, Stored, read
from ironfn.hf.gguf_rope import FACTORS
from ironfn.hf.links import match
from ironfn.hf.load import Loading
from ironfn.hf.tensors import Entry
from ironfn.layout.table import Table
from ironfn.mesh.agree import together
from ironfn.mesh.axis import Mesh
from ironfn.model.arch import Arch
from ironfn.model.init import shapes
from ironfn.spec.records import ModelSpec
from ironfn.types import Params

TOLD = ("rows", "tied", "attn_q.bias", "attn_output.bias")
"""What a file's tensors tell, and no key of it."""


@frozen
class GgufModel:
    """Hold what a GGUF file is: which architecture of llama.cpp, and which model of ours."""

    file: GgufFile
    family: GgufFamily
    spec: ModelSpec

    @property
    def chat_template(self) -> str | None:
        """Return the Jinja text of the chat template, which nothing here renders."""
        found = self.file.metadata.get("tokenizer.chat_template")
        return found if isinstance(found, str) else None


def open_gguf(path: Path) -> GgufModel:
    """Read what a GGUF file says of itself. ValueError for a damaged file, or for a model that is not ours."""
    file = read(path)
    name = file.metadata.get("general.architecture")
    family = next((family for family in FAMILIES if family.name == name), None)
    if family is None:
        known = ", ".join(family.name for family in FAMILIES)
        raise ValueError(f"{path} is of the architecture {str(name)[:80]!r}; known are {known}")
    try:
        return GgufModel(file, family, spec_of(config_of(file), family))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def spec_of(config: Config, family: GgufFamily) -> ModelSpec:
    """Return the model that a file's keys describe. ValueError for what is missing, out of range, or not ours."""
    lacking = [
        name for name in ("embedding_length", "block_count", "attention.head_count") if not _natural(config, name)
    ]
    if lacking:
        raise ValueError(f"{family.name}.{lacking[0]} is missing, or no natural number")
    return read_spec(config, family.family)


def _natural(config: Config, name: str) -> bool:
    return type(config.get(name)) is int and config[name] > 0


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return the keys of a file's architecture without its name before them, and what its tensors tell."""
    prefix = f"{file.metadata['general.architecture']}."
    own = {name.removeprefix(prefix): value for name, value in file.metadata.items() if name.startswith(prefix)}
    # what may differ from layer to layer is one number where it does not
    own = {name: value[0] if _uniform(value) else value for name, value in own.items()}
    table = file.tensors.get("token_embd.weight")
    own |= {
        "rows": None if table is None else table.shape[0],
        "tied": "output.weight" not in file.tensors,
        "attn_q.bias": "blk.0.attn_q.bias" in file.tensors,
        "attn_output.bias": "blk.0.attn_output.bias" in file.tensors,
    }
    for name in FACTORS:
        if f"{name}.weight" in file.tensors:  # the shortest decimal numbers, as `gguf_file` has them of single ones
            own[name] = [float(str(x)) for x in file.tensor(f"{name}.weight").flatten().numpy()]
    return own


def _uniform(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(each == value[0] for each in value)


def load_weights(
    model: GgufModel,
    arch: Arch,
    layout: Table,
    mesh: Mesh,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Params:
    """Return this rank's share of a model's leaves; one tensor at a time is in memory besides them.

    All ranks call this together. ValueError, on every rank, where a tensor has no leaf or a leaf no tensor; before any
    leaf is made.
    """
    file, naming = model.file, model.family.family.naming

    def read_all() -> Params:
        loading = Loading(shapes(arch), layout, mesh, torch.device(device), dtype)
        for link, entry in sorted(pairs, key=lambda pair: pair[1].begin):
            tensor = straight(link.tensor, file.tensor(link.tensor).view(entry.shape), model.family, arch)
            for path, part in zip(link.paths, link.parts(tensor), strict=True):
                loading.fill(path, part, link.expert)
        return tree.unflatten({path: loading.leaves[path] for path in loading.shapes if path in loading.leaves})

    pairs = together(mesh, lambda: match(_entries(file.tensors), naming, arch), device=device)
    return together(mesh, read_all, device=device)


def _entries(tensors: Mapping[str, Stored]) -> dict[str, Entry]:
    """Describe the tensors as they are once they are numbers; a shared expert's gate is a matrix of one row."""
    shaped = {name: stored.shape for name, stored in tensors.items()}
    shaped |= {name: (1, *shape) for name, shape in shaped.items() if "_inp_shexp" in name and len(shape) == 1}
    return {name: Entry("", "F32", shaped[name], stored.begin, stored.end) for name, stored in tensors.items()}


def straight(name: str, tensor: Tensor, family: GgufFamily, arch: Arch, *, back: bool = False) -> Tensor:
    """Return a tensor of a file as the engine takes it; or, ``back``, one of the engine's as a file has it.

    llama.cpp turns Llama's pairs (2i, 2i + 1), so the rows of q and k lie in that order: `permute` in its
    `convert_hf_to_gguf.py`. It computes norms without Gemma's 1 +, so the 1 is in the file.
    """
    if arch.norm_offset and name.endswith("norm.weight"):
        return tensor + 1 if back else tensor - 1
    if family.turned and (".attn_q." in name or ".attn_k." in name):
        heads = tensor.unflatten(0, (-1, 2, arch.head_dim // 2) if back else (-1, arch.head_dim // 2, 2))
        return heads.transpose(1, 2).flatten(0, 2)
    return tensor
