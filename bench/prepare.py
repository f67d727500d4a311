"""Measure ``prepare`` against the bare batch encoding of the `tokenizers` library, on the same text."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from bench.figure import Figure, alternate
from ironfn.data.admit import admit
from ironfn.data.preparation import prepare
from ironfn.data.sources import find
from ironfn.data.tally import Tally
from ironfn.data.tokenizer import train
from ironfn.spec.records import DataSpec, SetSpec, SplitSpec, TokenizerSpec

_ROUNDS = 3


def figures() -> Iterator[Figure]:
    """Yield prepare's throughput as a share of the library's, against both of its batch encodings.

    The text is the standard library's source. Both sides start from the same trained tokenizer; the library is given
    all the texts in memory, while prepare reads, fingerprints, deduplicates, splits, encodes and writes to the disk.
    """
    one = SetSpec(["stdlib:code"])
    texts = [document.text for document in admit(find(one.sources), one, SplitSpec(), "stop", Tally())]
    characters = sum(map(len, texts))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "given.json")
        file.write_text(train(texts, TokenizerSpec(vocab_size=4096)), encoding="utf-8")
        library = Tokenizer.from_file(str(file))
        spec = DataSpec(dir=f"{folder}/data", sets={"one": one}, tokenizer=TokenizerSpec(file=str(file)))
        seconds = alternate(
            {
                "prepare": lambda: prepare(spec, force=True),
                "encode_batch": lambda: library.encode_batch(texts, add_special_tokens=False),
                "encode_batch_fast": lambda: library.encode_batch_fast(texts, add_special_tokens=False),
            },
            rounds=_ROUNDS,
        )
    rates = ", ".join(f"{name} {characters / time / 1e6:.1f} M characters/s" for name, time in seconds.items())
    yield Figure("prepare_vs_tokenizers", seconds["encode_batch"] / seconds["prepare"], ">= 0.9", rates)
    yield Figure("prepare_vs_tokenizers_fast", seconds["encode_batch_fast"] / seconds["prepare"], ">= 0.9", rates)
