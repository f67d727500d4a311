"""Take a run's first weights from a model that is there already, on any mesh."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import xxhash
from attrs import evolve

from ironfn import checkpoint, tree
from ironfn.checkpoint.manifest import NAME as MANIFEST
from ironfn.hf.directory import Described, describe, is_directory, load_model
from ironfn.hf.export import essence
from ironfn.layout.table import Placement, shard_leaf
from ironfn.mesh.agree import together
from ironfn.mesh.axis import Mesh
from ironfn.model.arch import Arch, complete
from ironfn.model.init import first_value
from ironfn.types import Params

from .saved import find_checkpoint, is_weights, records

ROUTER_BIAS = "/router/bias"
HEAD, SCORE = ("head/w", "head/b"), "score/w"


def first_weights(
    source: Path,
    arch: Arch,
    layout: Mapping[str, Placement],
    mesh: Mesh,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> tuple[Params, Params]:
    """Return this rank's shares of a model's leaves, cast to ``dtype``, and of its routers' biases, in float32.

    source: a run directory, a checkpoint or a Hugging Face directory. A model that ends in a reward may begin from one
    that has a head: its last matrix is drawn by ``seed``. All ranks call this together. ValueError, with what differs,
    where it holds another model than ``arch``.
    """
    if together(mesh, lambda: _is_hf(source), device=device):
        described, theirs = together(mesh, lambda: _described(source, arch), device=device)
        places = {path: Placement() for path in (*described.biases(arch), *HEAD)} | dict(layout)
        flat = tree.flatten(load_model(described, theirs, places, mesh, dtype=dtype, device=device))
    else:
        found, places = together(mesh, lambda: _saved(source, arch, layout), device=device)
        saved, _ = checkpoint.load(found, keep=lambda leaf: leaf in places, layout=places, mesh=mesh, device=device)
        flat = {_bare(path): leaf for path, leaf in tree.flatten(saved).items()}
    if arch.score:
        flat = {path: leaf for path, leaf in flat.items() if path not in HEAD}
        if SCORE not in flat:
            whole = first_value(SCORE, (arch.width, 1), arch, seed)
            flat[SCORE] = shard_leaf(whole, layout[SCORE], mesh, SCORE).to(device)
    fixed = {path: leaf.float() for path, leaf in flat.items() if path.endswith(ROUTER_BIAS)}
    params = {path: leaf.to(dtype) for path, leaf in flat.items() if path not in fixed}
    biased = {path for path in layout if path.endswith(ROUTER_BIAS)}
    if fixed and not biased:
        raise ValueError(f"model.init_from: the routers of {source} have biases; set model.moe.bias_rate above 0")
    zeros = {path: torch.zeros(arch.moe.experts, device=device) for path in biased if arch.moe is not None}
    return tree.unflatten(params), tree.unflatten(zeros | fixed)


def identity(source: Path) -> str:
    """Return a checksum of a model's weights: of the list of a checkpoint's checksums, of the bytes of other files."""
    files = sorted(source.glob("*.safetensors")) if _is_hf(source) else [find_checkpoint(source, _unsaid) / MANIFEST]
    digest = xxhash.xxh3_64()
    for file in files:
        with file.open("rb") as data:
            while part := data.read(1 << 24):
                digest.update(part)
    return digest.hexdigest()


def _unsaid(line: str) -> None:
    pass


def _is_hf(source: Path) -> bool:
    if source.is_file():
        raise ValueError(f"model.init_from: {source} is a file; `ironfn convert {source} NEW` makes a run of a GGUF")
    if not source.is_dir():
        raise ValueError(f"model.init_from: there is no directory {source}")
    return is_directory(source)


def _described(source: Path, arch: Arch) -> tuple[Described, Arch]:
    """Return what a directory says, and the model that it holds: ours, but for its ending."""
    described = describe(source)
    theirs = complete(described.spec, 1)
    _check_same(source, theirs, arch)
    return described, evolve(arch, score=theirs.score)


def _saved(source: Path, arch: Arch, layout: Mapping[str, Placement]) -> tuple[Path, dict[str, Placement]]:
    """Find a checkpoint of this very model, and say where its leaves go."""
    found = find_checkpoint(source, _unsaid)
    manifest = checkpoint.read_manifest(found)
    spec, theirs = records(manifest.meta, found)
    if spec.adapter.kind != "none":
        raise ValueError(
            f"model.init_from: {source} holds an adapter ({spec.adapter.kind}) alone; `ironfn merge {source} NEW` "
            "makes a model of it and what it was trained beside"
        )
    _check_same(source, theirs, arch)
    if theirs.rows != arch.rows:
        raise ValueError(
            f"model.init_from: {source} has {theirs.rows} rows in its vocabulary's table, and model.pad_vocab_to makes "
            f"{arch.rows} here; make it the same"
        )
    paths = [path for path in manifest.leaves if is_weights(path) and not (arch.score and _bare(path) in HEAD)]
    return found, {path: layout.get(_bare(path), Placement()) for path in paths}


def _bare(path: str) -> str:
    return path.removeprefix("params/").removeprefix("extra/fixed/")


def _check_same(source: Path, theirs: Arch, ours: Arch) -> None:
    """Refuse another model; how long its texts may be is free, where no leaf depends on it."""
    a, b = essence(theirs), essence(ours)
    if ours.score:  # a reward may begin from a model that has a head, tied or not
        a, b = ({**each, "score": True, "head_bias": False, "logit_softcap": None, "tied": True} for each in (a, b))
    if ours.positions != "learned":
        a, b = a | {"context": 0}, b | {"context": 0}
    wrong = [
        f"{name} is {a.get(name)!r} there and {b.get(name)!r} here" for name in a | b if a.get(name) != b.get(name)
    ]
    if wrong:
        raise ValueError(f"model.init_from: {source} holds another model: " + "; ".join(wrong))
