"""Export a model: the family that can say all of it, its config.json, and its tensors, one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from attrs import frozen
from torch import Tensor

from ironfn.hf.config import Family, read_spec, write_config
from ironfn.hf.families import FAMILIES
from ironfn.hf.links import PADDED, Link, links
from ironfn.hf.rope import shortest
from ironfn.hf.scorers import SCORERS
from ironfn.hf.tensors import Planned, write
from ironfn.model.arch import Arch, complete
from ironfn.types import Flat

FILE_BYTES = 5_000_000_000
"""A file holds at most this much, as `save_pretrained` has it."""

_TRAINING_ONLY = ("dropout", "init_std", "rows")


@frozen
class Exportable:
    """Hold what a model is called there: its family and its keys of config.json."""

    family: Family
    config: dict[str, Any]


def exportable(arch: Arch, architecture: str | None, bias: bool = False) -> Exportable:
    """Return how `transformers` writes this model: in this architecture, or else in the first that can.

    bias: whether its routers have a bias on the choice. A family can say a model if its config, read again, describes
    the same mathematics. ValueError, with the fields that cannot be said, where none can.
    """
    families = SCORERS if arch.score else FAMILIES
    # a model that was given another ending stays of its kind
    kind = next((f.model_type for f in (*FAMILIES, *SCORERS) if f.architecture == architecture), None)
    tried = [f for f in families if architecture is None or f.model_type == kind]
    if not tried:
        known = ", ".join(f.architecture for f in families)
        raise ValueError(f"there is no architecture {architecture!r}; known are {known}")
    faults: dict[str, list[str]] = {}
    hopeless: dict[str, list[str]] = {}
    for family in tried:
        try:
            config = write_config(arch, family)
            again = complete(read_spec(config, family), 1)
        except ValueError as error:
            hopeless[family.architecture] = [str(error)]
            continue
        faults[family.architecture] = differences(arch, again)
        if bias and not family.bias:
            faults[family.architecture].append("a bias on the routers' choice")
        if not faults[family.architecture]:
            return Exportable(family, config)
    faults = faults or hopeless
    nearest = min(faults, key=lambda name: len(faults[name]))
    raise ValueError(
        f"{'no architecture of transformers' if architecture is None else architecture} can say this model; "
        f"{nearest} cannot say: " + "; ".join(faults[nearest])
    )


def differences(a: Arch, b: Arch) -> list[str]:
    ours, theirs = essence(a), essence(b)
    return [f"{name} {ours.get(name)!r}" for name in ours | theirs if not _same(ours.get(name), theirs.get(name))]


def _same(a: Any, b: Any) -> bool:
    if type(a) is float and type(b) is float:
        return abs(a - b) <= 1e-12 * abs(a)
    return a == b


def essence(arch: Arch) -> dict[str, Any]:
    """Return what decides the numbers that a model computes, by name, said in one way only."""
    found = attrs.asdict(arch, recurse=False)
    for name in (*_TRAINING_ONLY, "moe", "rope"):
        del found[name]
    found["attention_out_bias"] = arch.out_bias
    found["attention_scale"] = arch.head_dim**-0.5 if arch.attention_scale is None else arch.attention_scale
    found["windows"] = shortest([arch.window(layer) for layer in range(arch.layers)])
    if not any(found["windows"]):
        found["rope_local_theta"] = None
    if arch.positions == "rotary":
        found["rotary_dim"] = arch.rotary_dim
        found |= {f"rope.{name}": value for name, value in attrs.asdict(arch.rope).items()}
        found["rope.original_context"] = arch.rope.original_context or arch.context
        if arch.rope.kind == "none":
            found = {name: value for name, value in found.items() if not name.startswith("rope.")}
    else:
        found = {name: value for name, value in found.items() if not name.startswith("rope_")}
    found.pop("rope_fraction", None)
    return found | (_experts(arch) if arch.moe is not None else {})


def _experts(arch: Arch) -> dict[str, Any]:
    moe = arch.moe
    assert moe is not None
    found: dict[str, Any] = {
        f"moe.{name}": getattr(moe, name) for name in ("experts", "top_k", "ffn", "shared", "capacity", "scale")
    }
    found["moe.layers"] = [layer for layer in range(arch.layers) if arch.has_experts(layer)]
    chosen = moe.score == "softmax_chosen"  # the same as all, renormalized
    found["moe.score"] = "softmax" if chosen else moe.score
    found["moe.renormalize"] = chosen or moe.renormalize
    found["moe.groups"] = (moe.groups, moe.group_top_k) if moe.groups > 1 else (1, 1)
    if moe.shared:
        found |= {"moe.shared_ffn": moe.shared * (moe.shared_ffn or 0), "moe.shared_gate": moe.shared_gate}
        found["moe.shared"] = True  # several are one as wide as all
    if all(arch.has_experts(layer) for layer in range(arch.layers)):
        found["ffn"] = None  # no block has a dense one
    return found


def write_weights(
    directory: Path,
    family: Family,
    arch: Arch,
    leaves: Flat,
    *,
    dtype: torch.dtype | None = None,
    file_bytes: int = FILE_BYTES,
) -> list[str]:
    """Write a model's tensors as safetensors files into a directory and return the files' names.

    leaves: every leaf, whole, by path, and the routers' biases where the family has them. dtype: None keeps theirs.
    Rows of the vocabulary's table that no id has are left out. One tensor besides the leaves is in memory at a time.
    """
    fixed = tuple(path for path in leaves if path.endswith("/router/bias"))
    owners: dict[str, Any] = {}
    planned: dict[str, Planned] = {}
    for link in links(family.naming, arch, fixed):
        if all(owners.setdefault(path, link.row) is link.row for path in link.paths):
            planned[link.tensor] = plan(link, arch, leaves, dtype)
    assert owners.keys() == leaves.keys(), f"no tensor holds {sorted(leaves.keys() - owners.keys())}"
    return write(directory, planned, file_bytes)


def plan(link: Link, arch: Arch, leaves: Mapping[str, Tensor], dtype: torch.dtype | None) -> Planned:
    kinds = {leaves[path].dtype for path in link.paths} if dtype is None else {dtype}
    if len(kinds) > 1:
        raise ValueError(f"the parts of {link.tensor} are {sorted(map(str, kinds))}; choose a dtype")
    (kind,) = kinds
    if any(path.endswith("/router/bias") for path in link.paths):
        kind = torch.float32  # a router's bias is a sum of small steps

    def make() -> Tensor:
        tensor = torch.empty(link.shape, dtype=kind)
        for path, part in zip(link.paths, link.parts(tensor), strict=True):
            leaf = leaves[path].detach() if link.expert is None else leaves[path].detach()[link.expert]
            leaf = leaf[: arch.vocab] if path in PADDED else leaf
            part.copy_(leaf.reshape(part.shape))
        return tensor

    return Planned(kind, link.shape, make)
