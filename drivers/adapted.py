"""Open what a run has saved as a model: an adapter together with the model that it was trained beside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from attrs import evolve

from ironfn import tree
from ironfn.layout.table import by_path
from ironfn.mesh.axis import SINGLE
from ironfn.model.adapters import frozen_base, frozen_paths, merge
from ironfn.model.tables import table
from ironfn.spec.adapter_records import AdapterSpec
from ironfn.types import Params

from .saved import Saved, open_saved
from .start import first_weights, identity


def open_whole(path: Path, say: Callable[[str], None], base: Path | None = None) -> Saved:
    """Open a run, or a checkpoint, as a model that needs no adapter.

    base: where the model under an adapter lies now; None takes the place that the run names. ValueError as `open_saved`
    and `adapters.merge`, and where that model is not there, or not the one.
    """
    saved = open_saved(path, say)
    return saved if saved.spec.adapter.kind == "none" else merged(saved, say, base)


def merged(saved: Saved, say: Callable[[str], None], base: Path | None = None) -> Saved:
    """Merge an adapter into its model: see `adapters.merge`."""
    adapter, source = saved.spec.adapter, found_base(saved, base)
    params, arch = merge(adapter, saved.arch, opened_base(saved, source), saved.params)
    if "score" in saved.params:  # trained whole, beside the adapter
        params = {**params, "score": saved.params["score"]}
    say(f"merged with {source}")
    model = evolve(saved.spec.model, tied=arch.tied)
    return evolve(
        saved, params=params, fixed={}, arch=arch, base="", spec=evolve(saved.spec, model=model, adapter=AdapterSpec())
    )


def found_base(saved: Saved, base: Path | None = None) -> Path:
    """Return where the model under an adapter lies. ValueError where it is gone, or another one is there."""
    source = base or Path(saved.spec.model.init_from or "")
    if not source.exists():
        raise ValueError(
            f"{saved.path} holds an adapter, and the model that it was trained beside is not at {source}; go where "
            "that path leads to it, or name it with --base"
        )
    if identity(source) != saved.base:
        raise ValueError(
            f"{saved.path} holds an adapter of another model than {source} is; name the right one by --base"
        )
    return source


def opened_base(saved: Saved, source: Path) -> Params:
    """Return the frozen model as the adapter was trained beside it."""
    spec, arch = saved.spec, saved.arch
    layout = by_path(table(False), frozen_paths(spec.adapter, arch))
    dtype = getattr(torch, spec.train.precision.params)
    params, fixed = first_weights(source, arch, layout, SINGLE, dtype, torch.device("cpu"))
    return frozen_base(spec.adapter, tree.merge(params, fixed), layout)
