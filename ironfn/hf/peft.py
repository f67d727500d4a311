"""Read and write adapters as `peft` keeps them: adapter_config.json and adapter_model.safetensors.

There lora_A is [r, in] and lora_B [out, r]. Where one module of theirs holds several matrices of ours side by side
(GPT-2's c_attn, Phi-3's qkv_proj), it has one lora_A for all. Ours each have their own: three copies when it is read;
one again where they are still equal when it is written, else all of them, stacked, and lora_B with zeros between.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from ironfn import tree
from ironfn.hf.config import Family
from ironfn.hf.links import Link, links
from ironfn.hf.peft_virtual import KINDS, NAME, read_virtual, write_virtual
from ironfn.hf.tensors import DTYPES, Entry, Planned, Source, listed, read_header, write_file
from ironfn.hf.untrusted import read_json
from ironfn.hf.whole import whole_directory
from ironfn.model.adapters import EMBEDDING, HEAD, SUFFIX, matrices
from ironfn.model.arch import Arch
from ironfn.spec.adapter_records import AdapterSpec
from ironfn.types import Flat, Params

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_OTHER_WAYS = (
    "alora_invocation_tokens", "layer_replication", "lora_bias", "target_parameters", "trainable_token_indices",
    "use_bdlora", "use_qalora",
)  # fmt: skip
"""Keys of a config that, where they say anything, mean a kind of adapter that is not ours."""


@frozen
class Loaded:
    """Hold an adapter that was read.

    spec: rank and alpha as the config has them; a module of another scale has it in its b. params: its leaves.
    replaced: leaves of the model that the adapter brings along whole, such as a resized embedding. arch: the model's,
    with a head of its own where the adapter brings one.
    """

    spec: AdapterSpec
    params: Params
    replaced: Flat
    arch: Arch


@frozen
class _Module:
    """Name one module of theirs that holds matrices of ours. link: those of its weight."""

    name: str
    link: Link

    @property
    def keys(self) -> tuple[str, str, str]:
        """Return the names of the factor that reads, the one that writes, and the lengths."""
        start, table = f"{_PREFIX}{self.name}.", self.link.paths == (EMBEDDING,)
        names = ("lora_embedding_A", "lora_embedding_B") if table else ("lora_A.weight", "lora_B.weight")
        return f"{start}{names[0]}", f"{start}{names[1]}", f"{start}lora_magnitude_vector"

    @property
    def shape(self) -> tuple[int, int]:
        """Return (outputs, inputs), of which an embedding's inputs are ids."""
        first, second = self.link.shape
        return (second, first) if not self.link.row.turned and self.link.paths != (HEAD,) else (first, second)

    def columns(self, tensor: Tensor) -> list[Tensor]:
        """View each leaf's outputs, of a tensor [outputs, r] or [outputs], last."""
        return evolve(self.link, row=evolve(self.link.row, turned=True)).parts(tensor)


def _modules(arch: Arch, family: Family) -> Iterator[_Module]:
    """Yield the modules that may have an adapter. The head is one, tied or not; experts are not."""
    own = evolve(arch, tied=False)
    may = {path for path in matrices(own) if "/experts/" not in path}
    for link in links(family.naming, own):
        if may.issuperset(link.paths) and link.tensor.endswith(".weight"):
            yield _Module(link.tensor.removesuffix(".weight"), link)


def load_adapter(path: Path, arch: Arch, family: Family) -> Loaded:
    """Read the adapter of a directory for this model. ValueError for anything that does not fit, or is not ours.

    Tensors are those of the file, bit for bit, unless rank_pattern or alpha_pattern gives a module another scale.
    """
    config = read_json(path, CONFIG)
    if WEIGHTS not in os.listdir(path):
        raise ValueError(f"{path} has no {WEIGHTS}; save the adapter with peft's `save_pretrained` (safetensors)")
    entries = read_header(path, WEIGHTS)
    if wrong := [name for name, entry in entries.items() if entry.dtype not in DTYPES]:
        raise ValueError(f"{path / WEIGHTS}: not numbers that are trained: {listed(wrong)}")
    source, left = Source(path), set(entries)

    def read(name: str, shape: tuple[int, ...]) -> Tensor:
        if (entry := entries.get(name)) is None:
            raise ValueError(f"{path / WEIGHTS} has no {name}")
        if entry.shape != shape:
            raise ValueError(f"{path / WEIGHTS}: {name} is {list(entry.shape)}, this model calls for {list(shape)}")
        left.discard(name)
        with source.tensor(entry) as tensor:
            return tensor.clone()

    if config.get("peft_type") in KINDS:
        return Loaded(*read_virtual(config, arch, read), {}, arch)
    found: Flat = {}
    replaced: Flat = {}
    spec = _spec(config, path)
    for module in _modules(arch, family):
        names = module.keys
        if not left.isdisjoint(names):
            rank = _rank(entries, names[0])
            (outputs, inputs), ratio = module.shape, _scale(config, module.name, rank, spec) / spec.scale
            a, b = read(names[0], (rank, inputs)), read(names[1], (outputs, rank))
            m = read(names[2], (outputs,)) if spec.dora else None
            found |= _ours(module, a, b if ratio == 1.0 else b * ratio, m, arch)
        for name in (f"{_PREFIX}{module.name}.base_layer.weight", f"{_PREFIX}{module.name}.weight"):
            if name in left and module.link.paths in ((EMBEDDING,), (HEAD,)):
                replaced[module.link.paths[0]] = _padded(read(name, module.link.shape), 0, arch)
    if left or not found:
        what = f"holds what this model has no place for: {listed(sorted(left))}" if left else "holds no adapter"
        raise ValueError(f"{path / WEIGHTS} {what}")
    spec = evolve(spec, targets=_patterns(found, arch))
    return Loaded(spec, tree.unflatten(found), replaced, evolve(arch, tied=arch.tied and HEAD not in replaced))


def _spec(config: Mapping[str, Any], path: Path) -> AdapterSpec:
    what = path / CONFIG
    if config.get("peft_type") != "LORA":
        known = ", ".join(KINDS)
        raise ValueError(f"{what}: peft_type {config.get('peft_type')!r} is not read; LORA, {known} are")
    if odd := [key for key in _OTHER_WAYS if config.get(key)]:
        raise ValueError(f"{what}: {', '.join(odd)} cannot be read; merge the adapter with peft first")
    if config.get("bias", "none") != "none":
        raise ValueError(f"{what}: trained biases (bias: {config['bias']!r}) are not read; merge with peft first")
    rank: Any = config.get("r")
    alpha: Any = config.get("lora_alpha")
    dropout: Any = config.get("lora_dropout", 0.0)
    if type(rank) is not int or not 0 < rank <= 1 << 20:
        raise ValueError(f"{what}: r {rank!r} is no rank")
    for name, value in (("lora_alpha", alpha), ("lora_dropout", dropout)):
        if type(value) not in (int, float) or value < 0:
            raise ValueError(f"{what}: {name} {value!r} is not a number that can be")
    rslora, dora = bool(config.get("use_rslora")), bool(config.get("use_dora"))
    return AdapterSpec("lora", rank, float(alpha), float(dropout), rslora, dora)


def _rank(entries: Mapping[str, Entry], name: str) -> int:
    return entries[name].shape[0] if name in entries and entries[name].shape else 0


def _scale(config: Mapping[str, Any], name: str, rank: int, spec: AdapterSpec) -> float:
    """Return what a module's product is multiplied by, as its patterns say (`peft.utils.other.get_pattern_key`)."""
    given = config.get("alpha_pattern") or {}
    if not isinstance(given, dict):
        raise ValueError(f"{CONFIG}: alpha_pattern {given!r} is no table of names")
    alpha = next((value for key, value in given.items() if _names(key, name)), spec.alpha)
    if type(alpha) not in (int, float) or not rank:
        raise ValueError(f"{CONFIG}: {name} has the alpha {alpha!r} and the rank {rank}")
    return evolve(spec, alpha=float(alpha), rank=rank).scale


def _names(key: str, name: str) -> bool:
    try:
        return re.match(rf"(.*\.)?({key})$", name) is not None
    except re.error:
        return False


def _padded(x: Tensor, dim: int, arch: Arch) -> Tensor:
    """Add the rows of the table that no id has."""
    more = arch.rows - x.shape[dim]
    return x if not more else torch.cat([x, x.new_zeros([more if d == dim else n for d, n in enumerate(x.shape)])], dim)


def _ours(module: _Module, a: Tensor, b: Tensor, m: Tensor | None, arch: Arch) -> Flat:
    paths = module.link.paths
    if paths == (HEAD,):
        found = {"a": _padded(b, 0, arch), "b": a} | ({} if m is None else {"m": _padded(m, 0, arch)})
        return {f"{HEAD}{SUFFIX}/{name}": x for name, x in found.items()}
    if paths == (EMBEDDING,):
        return {
            f"{EMBEDDING}{SUFFIX}/a": _padded(a.t(), 0, arch).contiguous(),
            f"{EMBEDDING}{SUFFIX}/b": b.t().contiguous(),
        }
    found: Flat = {}
    lengths = [None] * len(paths) if m is None else module.columns(m)
    for path, part, length in zip(paths, module.columns(b), lengths, strict=True):
        found[f"{path}{SUFFIX}/a"] = a.t().contiguous()
        found[f"{path}{SUFFIX}/b"] = part.reshape(part.shape[0], -1).contiguous()
        if length is not None:
            found[f"{path}{SUFFIX}/m"] = length.flatten().contiguous()
    return found


def _patterns(found: Flat, arch: Arch) -> list[str]:
    """Return regexes that name the matrices of these leaves and no others: by kind where all blocks have them."""
    have = {path.rsplit(SUFFIX, 1)[0] for path in found}
    kinds: dict[str, list[str]] = {}
    for path in matrices(arch):
        kinds.setdefault(re.sub(r"^blocks/\d+", "", path), []).append(path)
    whole = {kind: have.issuperset(paths) for kind, paths in kinds.items()}
    each = {kind: [f"^{path}$" for path in paths if path in have] for kind, paths in kinds.items()}
    return [p for kind in kinds for p in ([f"{kind}$"] if whole[kind] else each[kind])]


def save_adapter(
    path: Path, spec: AdapterSpec, arch: Arch, adapter: Params, family: Family, base: str | None = None
) -> None:
    """Write an adapter into a new directory, there whole or not at all. base: where its model is, for whoever loads it.

    adapter: its leaves, whole. ValueError for what `peft` cannot say: experts, and DoRA of a part of a module.
    """
    if spec.kind == "lora":
        config, tensors = _lora(spec, arch, tree.flatten(adapter), family, base)
    else:
        config, tensor = write_virtual(spec, arch, adapter, base)
        tensors = {NAME: tensor}
    with whole_directory(path) as aside:
        planned = {n: Planned(x.dtype, tuple(x.shape), lambda x=x: x.detach()) for n, x in sorted(tensors.items())}
        write_file(aside / WEIGHTS, planned)
        (aside / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _lora(spec: AdapterSpec, arch: Arch, leaves: Flat, family: Family, base: str | None) -> tuple[dict[str, Any], Flat]:
    have = {path.rsplit(SUFFIX, 1)[0] for path in leaves}
    if experts := sorted(path for path in have if "/experts/" in path):
        raise ValueError(f"adapters of experts are not written for peft: {listed(experts)}; merge them instead")
    tensors: Flat = {}
    ranks: dict[str, int] = {}
    modules = list(_modules(arch, family))
    for module in modules:
        if not have.isdisjoint(module.link.paths):
            a, b, m = _theirs(module, leaves, arch)
            ranks[module.name] = a.shape[0]
            reads, writes, lengths = module.keys
            tensors |= {reads: a, writes: b} | ({} if m is None else {lengths: m})
    lost = have.difference(*(module.link.paths for module in modules))
    assert not lost, f"no module holds {sorted(lost)}"
    return _config(spec, modules, ranks, base), tensors


def _theirs(module: _Module, leaves: Flat, arch: Arch) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return lora_A, lora_B and the lengths of a module."""
    paths = module.link.paths
    factors = [tuple(leaves.get(f"{path}{SUFFIX}/{name}") for name in "abm") for path in paths]
    if paths == (HEAD,):
        ((a, b, m),) = factors
        assert a is not None
        assert b is not None
        return b, a[: arch.vocab].contiguous(), None if m is None else m[: arch.vocab].contiguous()
    if paths == (EMBEDDING,):
        ((a, b, _),) = factors
        assert a is not None
        assert b is not None
        return a[: arch.vocab].t().contiguous(), b.t().contiguous(), None
    there = [(a, b) for a, b, _ in factors if a is not None and b is not None]
    shared = len(there) == len(factors) and all(torch.equal(a, there[0][0]) for a, _ in there)
    reading = there[0][0].t() if shared else torch.cat([a.t() for a, _ in there])
    writing = reading.new_zeros(module.shape[0], len(reading))
    begin = 0
    for (a, b, _), part in zip(factors, module.columns(writing), strict=True):
        if a is not None and b is not None:
            rows = part if shared else part[begin : begin + len(b)]
            rows.copy_(b.view(rows.shape))
            begin += len(b)
    lengths = [m for _, _, m in factors if m is not None]
    if not lengths:
        return reading.contiguous(), writing, None
    if len(lengths) < len(factors):
        raise ValueError(
            f"peft keeps the lengths of {module.name} together; DoRA has to take all of {', '.join(paths)}"
        )
    whole = reading.new_zeros(module.shape[0])
    for length, part in zip(lengths, module.columns(whole), strict=True):
        part.copy_(length.view(part.shape))
    return reading.contiguous(), writing, whole


def _config(spec: AdapterSpec, modules: list[_Module], ranks: dict[str, int], base: str | None) -> dict[str, Any]:
    """Return the keys of adapter_config.json; a module of another rank keeps the scale by an alpha of its own."""
    kinds: dict[str, list[str]] = {}
    for module in modules:
        kinds.setdefault(module.link.row.theirs.removesuffix(".weight"), []).append(module.name)
    names: list[str] = []
    for kind, all_of in kinds.items():
        mine = [name for name in all_of if name in ranks]
        names += [kind] if len(mine) == len(all_of) > 1 else mine
    turned = all(module.link.row.turned for module in modules if module.link.paths not in ((EMBEDDING,), (HEAD,)))
    others = {name: rank for name, rank in ranks.items() if rank != spec.rank}
    scale = spec.scale
    alphas = {name: scale * (math.sqrt(rank) if spec.rslora else rank) for name, rank in others.items()}
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": spec.rank, "lora_alpha": int(spec.alpha) if spec.alpha.is_integer() else spec.alpha,
        "lora_dropout": spec.dropout, "use_rslora": spec.rslora, "use_dora": spec.dora, "bias": "none",
        "fan_in_fan_out": not turned, "target_modules": names, "modules_to_save": None, "init_lora_weights": True,
        "rank_pattern": {re.escape(name): rank for name, rank in others.items()},
        "alpha_pattern": {re.escape(name): alpha for name, alpha in alphas.items()},
    }  # fmt: skip
