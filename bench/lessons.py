"""Turn rows into packed texts: how full the rows are, and how quickly beside the bare tokenizer."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.figure import Figure
from bench.finetuning import DOLLY, NAME
from bench.tuners import lesson
from drivers.exported import export_run
from drivers.fetch import WHEELS, fetch
from ironfn.data.lesson import Lesson
from ironfn.data.opening import open_dataset
from ironfn.data.packed import PackedStore
from ironfn.data.preparation import prepare
from ironfn.spec.records import DataSpec

LENGTH, COPIES, ROUNDS = 1024, 100, 3


def figures() -> Iterator[Figure]:
    """Yield how full dolly's rows of 1024 are, and how quickly 100,000 rows like its own are checked and packed.

    The tokenizer is given all texts in memory, prompt and answer as one; here the rows are read, parsed, compared,
    encoded with what is trained of them, written to the disk, opened and laid into rows.
    """
    rows: list[dict[str, str]] = [json.loads(line) for line in DOLLY.read_text(encoding="utf-8").splitlines()]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fetch(WHEELS[NAME], Path("models") / NAME, lambda _: None)
        export_run(Path("models") / NAME, folder / "hf", None, None, 5 << 30, lambda _: None)
        spec, how = lesson(folder, LENGTH)
        _write(folder, rows)
        store = packed(spec, how)
        note = f"{store.documents} texts, {store.tokens} tokens in {store.packs.rows} rows of {LENGTH}"
        yield Figure("packing_efficiency", store.packs.efficiency, ">= 0.97", note)
        many = [row | {"response": f"{copy} {row['response']}"} for copy in range(COPIES) for row in rows]
        _write(folder, many)
        yield _speed(spec, how, many)


def packed(spec: DataSpec, how: Lesson) -> PackedStore:
    """Prepare the rows anew, and open them."""
    prepare(spec, lesson=how, force=True)
    (store,) = open_dataset(spec, "train", how).stores
    assert isinstance(store, PackedStore)
    return store


def _speed(spec: DataSpec, how: Lesson, many: list[dict[str, str]]) -> Figure:
    tokenizer: Any = how.teaching.vocabulary.tokenizer
    texts = [row["prompt"] + row["response"] for row in many]

    def bare() -> None:
        for first in range(0, len(texts), 1000):
            tokenizer.encode_batch_fast(texts[first : first + 1000], add_special_tokens=False)

    spent: dict[str, list[tuple[float, float]]] = {"ours": [], "tokenizer": []}
    for _ in range(ROUNDS):
        for name, call in (("ours", lambda: packed(spec, how)), ("tokenizer", bare)):
            start = time.perf_counter(), time.process_time()
            call()
            spent[name].append((time.perf_counter() - start[0], time.process_time() - start[1]))
    (wall, cpu), (their_wall, their_cpu) = (min(each) for each in spent.values())
    note = f"ironfn {wall:.1f} s ({cpu:.1f} s of processor), the tokenizer alone {their_wall:.1f} s ({their_cpu:.1f} s)"
    return Figure("checked_and_packed_ratio", their_wall / wall, ">= 0.8", f"{len(many)} rows; {note}")


def _write(folder: Path, rows: list[dict[str, str]]) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
