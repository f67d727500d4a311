"""Open what ``ironfn prepare`` wrote as a dataset."""

from __future__ import annotations

from pathlib import Path

import torch
import xxhash

from ironfn.data.dataset import Dataset
from ironfn.data.lesson import Lesson
from ironfn.data.order import shares
from ironfn.data.packed import TRAINED, lay
from ironfn.data.pairs import lay_pairs
from ironfn.data.preparation import TOKENIZER, read_manifest, store_path
from ironfn.data.settings import check, differences, recipe
from ironfn.data.store import TokenStore, open_store
from ironfn.data.tally import SPLITS
from ironfn.data.tokenizer import byte_lengths, parse, read
from ironfn.spec.records import DataSpec


def open_dataset(spec: DataSpec, split: str, lesson: Lesson | None = None) -> Dataset:
    """Open a split of all the sets: ``train`` mixes them by weight or temperature; validation and test hold them all.

    lesson: as it was prepared with. ValueError where the data are missing, damaged, empty, or were prepared with other
    settings than these.
    """
    check(spec)
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is unknown; there are {', '.join(SPLITS)}")
    folder = Path(spec.dir)
    manifest = read_manifest(folder)
    changed = differences(manifest["recipe"], recipe(spec))
    told, wanted = manifest.get("lesson") or {}, {} if lesson is None else lesson.settings
    changed += differences(told, wanted, "examples")
    if changed:
        raise ValueError(
            f"{folder} was prepared with other settings ({'; '.join(changed)}); run `ironfn prepare` again"
        )
    path = folder / TOKENIZER
    stores = {name: _open(folder, f"{name}/{split}", manifest) for name in spec.sets}
    if lesson is not None:
        for name, ids in stores.items():
            bits = _open(folder, f"{name}/{split}{TRAINED}", manifest)
            how = (spec.length, lesson.spec.overlong)
            paired = lesson.holds == "pairs"
            stores[name] = (
                lay(ids, bits, *how)
                if lesson.holds == "examples"
                else lay_pairs(ids, bits, *how, paired=paired, scored=lesson.scored)
            )
    parsed = parse if lesson is None else lesson.vocabulary
    vocabulary = parsed(read(path), path, spec.tokenizer.eos)
    if vocabulary.checksum != manifest["tokenizer_checksum"]:
        raise ValueError(f"{path} is not the tokenizer that the stores were made with; run `ironfn prepare` again")
    names = [n for n, store in stores.items() if store.tokens and (split != "train" or spec.sets[n].weight > 0)]
    if not names:
        raise ValueError(
            f"{folder}: the {split} split is empty; give more documents, a larger data.split.{split} (or 0 to do "
            "without), or split_on to part a file into several documents"
        )
    used = tuple(stores[name] for name in names)
    weights = [spec.sets[name].weight for name in names] if split == "train" else [1.0] * len(names)
    return Dataset(
        names=tuple(names),
        stores=used,
        shares=shares(weights, [store.tokens for store in used], spec.temperature),
        length=spec.length,
        attend=spec.attend,
        shuffle=spec.shuffle,
        vocab_size=vocabulary.size,
        eos=vocabulary.eos,
        byte_lengths=torch.from_numpy(byte_lengths(vocabulary)),
        tokenizer=path,
        checksum=xxhash.xxh3_64_intdigest(repr([vocabulary.checksum, *(store.checksum for store in used)]).encode()),
    )


def _open(folder: Path, name: str, manifest: dict[str, object]) -> TokenStore:
    store = open_store(store_path(folder, name), name)
    if store.recipe != manifest["recipe_code"] or store.tokenizer != manifest["tokenizer_checksum"]:
        raise ValueError(f"{store.path} belongs to another preparation than {folder}; run `ironfn prepare` again")
    return store
