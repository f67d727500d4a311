"""Keep what a reference gives every completion of a split, beside its stores: computed once, and checked when read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import xxhash
from attrs import evolve

from ironfn.data.files import write_whole
from ironfn.data.pairs import PairStore

MAGIC = b"IFREFER1"
ENDING = ".reference"


def reference_path(store: PairStore) -> Path:
    """Return where the log-probabilities of a store's completions are kept."""
    return store.path.with_name(store.path.name + ENDING)


def keep_reference(store: PairStore, identity: str) -> None:
    """Write what the store says of the reference with this identity, a checksum of its weights and how they are read.

    The file is a line of JSON between a magic word and the numbers, float32 [pairs, 2], and is whole or not there.
    """
    assert store.reference is not None
    data = np.ascontiguousarray(store.reference, "<f4").tobytes()
    head = {
        "identity": identity,
        "data": f"{store.checksum:016x}",
        "pairs": len(store.texts),
        "checksum": xxhash.xxh3_128_hexdigest(data),
    }
    write_whole(reference_path(store), MAGIC + json.dumps(head, sort_keys=True).encode() + b"\n" + data)


def with_reference(store: PairStore, identity: str) -> PairStore:
    """Return a store with what a reference gave its completions.

    ValueError, with what is wrong, where the file is missing, damaged, of another model or of other data.
    """
    path = reference_path(store)
    try:
        line, _, data = path.read_bytes().partition(b"\n")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    try:
        head: Any = json.loads(line.removeprefix(MAGIC)) if line.startswith(MAGIC) else None
    except ValueError:
        head = None
    if not isinstance(head, dict):
        raise ValueError(f"{path} is not of this form")
    told = cast("dict[str, Any]", head)
    if told.get("identity") != identity:
        raise ValueError(f"{path} is of another reference")
    if told.get("data") != f"{store.checksum:016x}" or told.get("pairs") != len(store.texts):
        raise ValueError(f"{path} is of other data")
    if len(data) != 8 * len(store.texts) or xxhash.xxh3_128_hexdigest(data) != told.get("checksum"):
        raise ValueError(f"{path} is damaged")
    return evolve(store, reference=np.frombuffer(data, "<f4").reshape(-1, 2))
