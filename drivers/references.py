"""Compute once what a reference gives every completion: all ranks together, each its rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from attrs import evolve

from ironfn.data.dataset import Dataset, eval_batches
from ironfn.data.pairs import PairStore
from ironfn.data.references import keep_reference, with_reference
from ironfn.loss.log_probs import asked_places
from ironfn.loss.pairs import Reference
from ironfn.mesh.agree import together
from ironfn.mesh.axis import Mesh, sum_over_rows
from ironfn.types import Batch

Say = Callable[[str], None]


def referenced(
    data: Dataset,
    identity: str,
    load: Callable[[], Reference],
    here: Callable[[Batch], Batch],
    rows: int,
    mesh: Mesh,
    device: torch.device,
    say: Say,
) -> Dataset:
    """Return a dataset whose stores know the reference: read from beside them, or computed and kept there.

    identity: of the reference. load: makes it ready to compute. here: brings a batch to the device. rows: at a time.
    All ranks call this together.
    """
    stores = [store for store in data.stores if isinstance(store, PairStore)]
    assert len(stores) == len(data.stores), "laid out as pairs"
    found = [_known(store, identity, mesh, device) for store in stores]
    missing = [store for store, known in zip(stores, found, strict=True) if isinstance(known, str)]
    reference = load() if missing else None
    done: list[PairStore] = []
    for store, known in zip(stores, found, strict=True):
        if isinstance(known, PairStore):
            done.append(known)
            continue
        assert reference is not None
        say(f"{store.path.stem}: computing what the reference gives {len(store.texts):,} pairs ({known})")
        one = evolve(data, names=("one",), stores=(store,), shares=(1.0,))
        done.append(evolve(store, reference=_computed(one, store, reference, here, rows, mesh, device)))
        if mesh.world.index == 0:
            keep_reference(done[-1], identity)
    return evolve(data, stores=tuple(done))


def _known(store: PairStore, identity: str, mesh: Mesh, device: torch.device) -> PairStore | str:
    """Return the store with its reference, or why there is none: the same on every rank."""

    def look() -> PairStore | str:
        try:
            return with_reference(store, identity)
        except ValueError as error:
            return str(error)

    found = together(mesh, look, device=device)
    missing = torch.tensor([float(isinstance(found, str))], device=device)
    if mesh.world.size > 1 and mesh.world.backend.all_reduce(missing).item() and not isinstance(found, str):
        return "another rank has none"
    return found


def _computed(
    data: Dataset,
    store: PairStore,
    reference: Reference,
    here: Callable[[Batch], Batch],
    rows: int,
    mesh: Mesh,
    device: torch.device,
) -> np.ndarray:
    """Return the log-probabilities of every pair's completions, float32 [pairs, 2]."""
    values = torch.zeros(len(store.texts), 2, dtype=torch.float64)
    for batch in eval_batches(data, rows, None, mesh.share, mesh.shares):
        there = here(batch)
        places = asked_places(there)
        sums = places.sums(reference({}, there, mesh, places)).double().cpu().view(-1, 2)
        windows = batch["row"][(places.keys // batch["weight"].shape[1]).cpu()].tolist()[::2]
        starts = {window: int(store.packs.offsets[window]) for window in dict.fromkeys(windows)}
        for window, both in zip(windows, sums, strict=True):
            values[int(store.packs.texts[starts[window]])] = both
            starts[window] += 1
    return sum_over_rows(values.to(device), mesh).float().cpu().numpy()
