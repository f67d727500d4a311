"""Make small token stores and datasets for tests, without a tokenizer."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import torch

from ironfn.data.dataset import Dataset
from ironfn.data.order import shares
from ironfn.data.packed import OnOverlong, PackedStore, lay
from ironfn.data.store import StoreWriter, TokenStore, id_dtype, open_store


def write_store(folder: Path, documents: list[list[int]], *, vocab_size: int = 10, name: str = "a/train") -> TokenStore:
    """Write documents (their last id is the end id, whatever it is) as ``folder/name.tokens`` and open it."""
    path = folder / f"{name}.tokens"
    with StoreWriter(path, name, vocab_size=vocab_size, eos=0, tokenizer=1, recipe=2) as writer:
        for document in documents:
            writer.append(array("I", document), [len(document)], len(document))
        writer.close()
    return open_store(path, name)


def hold_store(documents: list[list[int]], *, vocab_size: int) -> TokenStore:
    """Hold documents as ``write_store`` would map them, without a file."""
    ids = np.array([i for document in documents for i in document], id_dtype(vocab_size))
    offsets = np.cumsum([0, *map(len, documents)])
    return TokenStore(Path("none"), ids, offsets, vocab_size, 0, len(ids), 1, 2, 3)


def dataset(
    stores: tuple[TokenStore, ...],
    length: int,
    weights: tuple[float, ...] | None = None,
    shuffle: bool = True,
    attend: str = "document",
) -> Dataset:
    """Make a dataset of stores, by weight (all equal where none is given)."""
    return Dataset(
        names=tuple(str(i) for i in range(len(stores))),
        stores=stores,
        shares=shares(weights or [1.0] * len(stores), [s.tokens for s in stores], None),
        length=length,
        attend=attend,  # pyright: ignore[reportArgumentType]
        shuffle=shuffle,
        vocab_size=stores[0].vocab_size,
        eos=0,
        byte_lengths=torch.ones(stores[0].vocab_size if stores[0].vocab_size < 1 << 20 else 1, dtype=torch.int32),
        tokenizer=Path("tokenizer.json"),
        checksum=0,
    )


def hold_packed(
    texts: list[tuple[list[int], list[bool]]], length: int, overlong: OnOverlong, *, vocab_size: int
) -> PackedStore:
    """Hold supervised texts, each its ids and which are trained, laid into rows, without a file."""
    words: list[list[int]] = []
    for ids, trained in texts:
        bits = [
            sum(1 << k for k in range(16) if at + k < len(ids) and trained[at + k]) for at in range(0, len(ids), 16)
        ]
        words.append(bits)
    store = hold_store([ids for ids, _ in texts], vocab_size=vocab_size)
    return lay(store, hold_store(words, vocab_size=1 << 16), length, overlong)
