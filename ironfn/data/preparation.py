"""Turn the sources of a spec into a tokenizer and token stores: all that ``ironfn prepare`` does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import xxhash
from attrs import frozen

from ironfn.data import tokenizer as tokenizers
from ironfn.data.admit import admit
from ironfn.data.files import alone, sync_folder, write_whole
from ironfn.data.lesson import Lesson, check_lesson, write_examples
from ironfn.data.packed import BIT_IDS, TRAINED, PackedWriter
from ironfn.data.settings import check, differences, recipe
from ironfn.data.sources import Source, find, fingerprint
from ironfn.data.store import StoreWriter, open_store, verify
from ironfn.data.tally import SPLITS, Tally, describe, from_json, to_json
from ironfn.data.tokenizer import Vocabulary
from ironfn.data.write import write
from ironfn.spec.records import DataSpec

FORMAT = 1
MANIFEST = "prepared.json"
TOKENIZER = "tokenizer.json"
BESIDE = ".preparing"
"""Where new files wait, in the data directory, until all of them are whole."""

Say = Callable[[str], None]


@frozen
class Prepared:
    """Say what a preparation left in ``dir``, whether it was there already, and what became of each set."""

    dir: Path
    reused: bool
    vocab_size: int
    eos: int
    sets: dict[str, Tally]


def prepare(
    spec: DataSpec,
    *,
    seed: int = 0,
    say: Say = lambda line: None,
    force: bool = False,
    lesson: Lesson | None = None,
) -> Prepared:
    """Write ``spec.dir`` with tokenizer.json, ``<set>/<split>.tokens`` and prepared.json, unless they are there.

    They are taken as they are where settings, sources (by content), tokenizer and, with FIM, the seed are the same and
    every checksum holds; ``force`` writes them anew all the same. seed: keys the FIM draws. say: is given each line
    for people. lesson: how examples are taught, where the sources hold those and not documents; of each split there is
    then ``<set>/<split>.trained.tokens`` as well. ValueError for whatever a user can put right.
    """
    check(spec)
    folder = Path(spec.dir)
    sources = {name: find(one.sources) for name, one in spec.sets.items()}
    if lesson is not None:
        check_lesson(spec, lesson, sources)
    with alone(folder, say):
        wanted = _wanted(spec, sources, seed, lesson)
        manifest = None if force else _reusable(folder, wanted, say)
        reused = manifest is not None
        if manifest is None:
            manifest = _write(spec, sources, wanted, seed, say, lesson)
    sets = {name: from_json(values) for name, values in manifest["sets"].items()}
    prepared = Prepared(folder, reused, manifest["vocab_size"], manifest["eos"], sets)
    _report(prepared, say)
    return prepared


def _write(
    spec: DataSpec,
    sources: dict[str, list[Source]],
    wanted: dict[str, Any],
    seed: int,
    say: Say,
    lesson: Lesson | None,
) -> dict[str, Any]:
    """Write tokenizer and stores beside what is there, move them to their places, and write the manifest last.

    What fails in the text or in the spec fails before anything that was there is touched. Return the manifest.
    """
    folder = Path(spec.dir)
    beside = folder / BESIDE
    shutil.rmtree(beside, ignore_errors=True)  # a death may have left it
    beside.mkdir()
    try:
        vocabulary = _tokenizer(spec, sources, beside, say, lesson)
        code = xxhash.xxh3_64_intdigest(_dump(wanted | {"tokenizer_checksum": vocabulary.checksum}))
        sets: dict[str, Tally] = {}
        stores: dict[str, int] = {}
        for name in spec.sets:
            sets[name] = _write_set(spec, name, sources[name], vocabulary, code, seed, beside, stores, say, lesson)
        _require_text(spec, sets, say)
        (folder / MANIFEST).unlink(missing_ok=True)  # so that no mixture of old and new files is ever taken for whole
        sync_folder(folder)
        for moved in (TOKENIZER, *(f"{name}.tokens" for name in stores)):
            (folder / moved).parent.mkdir(exist_ok=True)
            (beside / moved).replace(folder / moved)
            sync_folder((folder / moved).parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    manifest = wanted | {
        "tokenizer_checksum": vocabulary.checksum,
        "recipe_code": code,
        "vocab_size": vocabulary.size,
        "eos": vocabulary.eos,
        "sets": {name: to_json(tally) for name, tally in sets.items()},
        "stores": stores,
    }
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
    return manifest


def _wanted(spec: DataSpec, sources: dict[str, list[Source]], seed: int, lesson: Lesson | None) -> dict[str, Any]:
    """Return what has to be equal for stores to be taken as they are."""
    fim = any(one.fim.rate > 0 for one in spec.sets.values())
    file = spec.tokenizer.file
    return {
        "format": FORMAT,
        "recipe": recipe(spec),
        "lesson": None if lesson is None else lesson.settings,
        "bad_lines": spec.bad_lines,
        "seed": seed if fim else None,
        "sources": {name: fingerprint(files) for name, files in sources.items()},
        "tokenizer_file": None if file is None else xxhash.xxh3_64_intdigest(_read(Path(file))),
    }


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}; correct data.tokenizer.file") from error


def _reusable(folder: Path, wanted: dict[str, Any], say: Say) -> dict[str, Any] | None:
    """Return the manifest of a whole preparation that fits, or None after saying why there is none."""
    if not (folder / MANIFEST).is_file():
        return None
    try:
        manifest = read_manifest(folder)
        changed = [name for name, value in wanted.items() if name != "recipe" and manifest.get(name) != value]
        changed += differences(manifest["recipe"], wanted["recipe"])
        if changed:
            say(f"{folder}: prepared anew, as these changed: {'; '.join(changed)}")
            return None
        if xxhash.xxh3_64_intdigest(_read(folder / TOKENIZER)) != manifest["tokenizer_checksum"]:
            raise ValueError(f"{folder / TOKENIZER} is not the file that the stores were made with")
        for name, checksum in manifest["stores"].items():
            store = open_store(store_path(folder, name), name)
            if store.checksum != checksum:
                raise ValueError(f"{store.path} is not the file that was prepared")
            verify(store)
    except (ValueError, KeyError, TypeError) as error:
        say(f"{folder}: prepared anew: {error}")
        return None
    return manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read prepared.json. ValueError where it is missing or damaged."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: no prepared data there; run `ironfn prepare` first") from error
    except ValueError as error:
        raise ValueError(f"{path}: damaged: {error}; run `ironfn prepare` again") from error
    if not isinstance(manifest, dict) or cast("dict[str, Any]", manifest).get("format") != FORMAT:
        raise ValueError(f"{path}: not of format {FORMAT}; run `ironfn prepare` again")
    return cast("dict[str, Any]", manifest)


def store_path(folder: Path, name: str) -> Path:
    """Return the path of the store ``set/split``."""
    return folder / f"{name}.tokens"


def _tokenizer(
    spec: DataSpec, sources: dict[str, list[Source]], folder: Path, say: Say, lesson: Lesson | None
) -> Vocabulary:
    """Take the tokenizer that the spec names or train one, and put it into ``folder``."""
    path, parsed = folder / TOKENIZER, tokenizers.parse if lesson is None else lesson.vocabulary
    if spec.tokenizer.file is not None:
        data = _read(Path(spec.tokenizer.file))
        vocabulary = parsed(data, spec.tokenizer.file, spec.tokenizer.eos)
    else:
        say(f"training a {spec.tokenizer.kind} tokenizer of {spec.tokenizer.vocab_size} ids on the training split")
        if spec.tokenizer.kind == "unigram":
            say("unigram training differs a little from run to run; for the same one elsewhere, take its file along")
        data = tokenizers.train(_training_texts(spec, sources), spec.tokenizer).encode()
        vocabulary = parsed(data, path, spec.tokenizer.eos)
    write_whole(path, data)
    if spec.tokenizer.file is None and vocabulary.size < spec.tokenizer.vocab_size:
        say(f"tokenizer: the text gave only {vocabulary.size} of the {spec.tokenizer.vocab_size} ids asked for")
    if any(one.fim.rate > 0 for one in spec.sets.values()):
        _require_fim(spec, vocabulary)
    return vocabulary


def _require_fim(spec: DataSpec, vocabulary: Vocabulary) -> None:
    remedy = "set every fim.rate to 0, or take another tokenizer"
    if vocabulary.fim is None:
        raise ValueError(f"{spec.tokenizer.file}: has no fill-in-the-middle tokens such as <|fim_prefix|>; {remedy}")
    if not vocabulary.joins:
        raise ValueError(
            f"{spec.tokenizer.file}: adds or drops a space where a text starts, so the parts of a cut document would "
            f"not join to its text; {remedy}"
        )


def _training_texts(spec: DataSpec, sources: dict[str, list[Source]]) -> Iterator[str]:
    for name, one in spec.sets.items():
        for document in admit(sources[name], one, spec.split, spec.bad_lines, Tally()):
            if document.split == "train":
                yield document.text


def _write_set(
    spec: DataSpec,
    name: str,
    sources: list[Source],
    vocabulary: Vocabulary,
    code: int,
    seed: int,
    folder: Path,
    stores: dict[str, int],
    say: Say,
    lesson: Lesson | None,
) -> Tally:
    """Write the stores of one set into ``folder`` and note their checksums in ``stores``."""
    tally, one = Tally(), spec.sets[name]
    with ExitStack() as stack:

        def open_writer(split: str, size: int = vocabulary.size, eos: int = vocabulary.eos) -> StoreWriter:
            path, full = store_path(folder, f"{name}/{split}"), f"{name}/{split}"
            writer = StoreWriter(path, full, vocab_size=size, eos=eos, tokenizer=vocabulary.checksum, recipe=code)
            return stack.enter_context(writer)

        writers = {split: open_writer(split) for split in SPLITS}
        if lesson is None:
            documents = admit(sources, one, spec.split, spec.bad_lines, tally)
            write(
                documents, writers, vocabulary, one.fim, seed, tally, lambda done: say(f"{name}: {done >> 20} MiB done")
            )
        else:
            bits = {split: open_writer(f"{split}{TRAINED}", *BIT_IDS) for split in SPLITS}
            pairs = {split: PackedWriter(writers[split], bits[split]) for split in SPLITS}
            write_examples(
                sources, one, spec.split, spec.bad_lines, lesson, pairs, tally,
                lambda done: say(f"{name}: {done:,} examples done"),
            )  # fmt: skip
            writers |= {f"{split}{TRAINED}": writer for split, writer in bits.items()}
        for split, writer in writers.items():
            stores[f"{name}/{split}"] = writer.close()
    return tally


def _require_text(spec: DataSpec, sets: dict[str, Tally], say: Say) -> None:
    for name, tally in sets.items():
        if tally.splits["train"].documents == 0:
            raise ValueError(
                f"data.sets.{name}: nothing to train on: {tally.documents} documents, {tally.empty} empty, {tally.bad} "
                f"bad, {tally.kept} in other splits; give more documents, or split_on to part a file into several"
            )
    shares = {"validation": spec.split.validation, "test": spec.split.test}
    for split, share in shares.items():
        if share > 0 and not any(tally.splits[split].documents for tally in sets.values()):
            say(
                f"the {split} split is empty: no document fell into its {share:.1%}; give more documents, a larger "
                f"data.split.{split}, or split_on to part a file into several"
            )


def _dump(values: dict[str, Any]) -> bytes:
    return json.dumps(values, sort_keys=True).encode()


def _report(prepared: Prepared, say: Say) -> None:
    for name, tally in prepared.sets.items():
        for line in describe(name, tally):
            say(line)
    state = "unchanged, taken as they are" if prepared.reused else "written"
    say(f"{prepared.dir}: tokenizer of {prepared.vocab_size} ids and {len(prepared.sets)} set(s) {state}")
