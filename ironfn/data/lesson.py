"""Write the examples of a set into stores: what ``prepare`` does where a model is taught by examples."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash
from attrs import frozen

from ironfn.data import tokenizer as tokenizers
from ironfn.data.admit import count_bad, split_of
from ironfn.data.conversation import Example, Fault, parse
from ironfn.data.examples import UNREADABLE, Item, Parse, digest, examples, taught
from ironfn.data.packed import PackedWriter
from ironfn.data.preferences import Preference, form_of, parse_preference
from ironfn.data.readers import Bad, Blank, Row
from ironfn.data.sources import Source
from ironfn.data.supervise import Supervised, Teaching
from ironfn.data.tally import Tally
from ironfn.data.tokenizer import Vocabulary, byte_lengths
from ironfn.spec.records import DataSpec, SetSpec, SftSpec, SplitSpec

_SAY_EVERY = 10_000
_TOGETHER = 256


@frozen(eq=False)
class Lesson:
    """Say how examples are read, and how a model is taught them.

    holds: what the rows are: examples, pairs of which one text is preferred, or completions judged one by one.
    scored: whether texts are to be scored as a whole, see `pairs`.
    """

    spec: SftSpec
    teaching: Teaching
    holds: Literal["examples", "pairs", "judged"] = "examples"
    scored: bool = False

    @property
    def parse(self) -> Parse:
        """Return what reads a row. `Fault` for one that is not what the sources hold."""
        if self.holds == "examples":
            return _example
        judged, other = self.holds == "judged", {"judged": "pairs", "pairs": "judged completions"}[self.holds]

        def preference(row: Row, fields: Mapping[str, str]) -> Preference:
            found = parse_preference(row, fields)
            if judged != (found.rejected is None):
                what = f"{found.kind} does not go with an objective of {self.holds}"
                raise Fault(row.place, "other form", f"{what}; leave the row out, or choose an objective of {other}")
            return found

        return preference

    @property
    def settings(self) -> dict[str, Any]:
        """What the stores depend on, as plain values. What is chosen when rows are laid out may change without them."""
        chat = self.teaching.chat
        return {
            **({} if self.holds == "examples" else {"holds": self.holds}),
            "fields": dict(self.spec.fields),
            "train_on": self.teaching.train_on,
            "rewritten": self.teaching.rewritten,
            "begin": list(self.teaching.begin),
            "end": self.teaching.end,
            "template": None if chat is None else xxhash.xxh3_64_hexdigest(chat.renderer.template.encode()),
            "specials": None if chat is None else dict(chat.specials),
        }

    def vocabulary(self, data: bytes, path: str | Path, eos: str | None) -> Vocabulary:
        """Return what `tokenizer.parse` makes of a tokenizer.json: the model's own, if it is that, made before."""
        own = self.teaching.vocabulary
        same = own.checksum == xxhash.xxh3_64_intdigest(data) and own.controls[own.eos] == eos
        return own if same else tokenizers.parse(data, path, eos)

    def question(self, prompt: str) -> list[int]:
        """Return the ids after which an answer to a prompt is written, as the model is taught them."""
        teaching = self.teaching
        if teaching.chat is not None and self.spec.prompts == "chat":
            return teaching.chat.encode([{"role": "user", "content": prompt}])
        return [*teaching.begin, *teaching.vocabulary.tokenizer.encode(prompt, add_special_tokens=False).ids]


def _example(row: Row, fields: Mapping[str, str]) -> Example:
    try:
        return parse(row, fields)
    except Fault as fault:
        form = form_of(row, fields) if fault.kind == "unknown form" else None
        if form is None:
            raise
        kind = "judged" if form == "judged" else "pairs"
        what = f"{form} is a form of preferences, not of examples; set data.form to {kind}, or leave the row out"
        raise Fault(row.place, "other form", what) from fault


def check_lesson(spec: DataSpec, lesson: Lesson, sources: Mapping[str, Sequence[Source]]) -> None:
    """Raise a ValueError where the settings of ``data`` are of no use for examples, with what to set instead."""
    if spec.attend != "document":
        raise ValueError("data.attend is row, but examples in one row never see each other: set it to document")
    if spec.tokenizer.file is None:
        raise ValueError("data.tokenizer.file is not given: name the tokenizer.json of the model that is taught")
    for name, one in spec.sets.items():
        used = {"clean": one.clean, "fim.rate": one.fim.rate > 0, "split_on": one.split_on is not None}
        if idle := [field for field, is_used in used.items() if is_used]:
            raise ValueError(f"data.sets.{name}.{idle[0]} is for documents, not for examples; leave it out")
        for source in sources[name]:
            if not _holds_rows(source):
                raise ValueError(f"{source.path} holds no examples: give files of .jsonl, .json or .parquet")


def _holds_rows(source: Source) -> bool:
    names = (".json", ".json.gz")
    return source.kind in ("jsonl", "parquet") or source.path.name.lower().endswith(names)


def write_examples(
    sources: Sequence[Source],
    spec: SetSpec,
    split: SplitSpec,
    bad_lines: Literal["stop", "count"],
    lesson: Lesson,
    writers: Mapping[str, PackedWriter],
    tally: Tally,
    say: Callable[[int], None],
) -> None:
    """Encode a set's examples, without repeats, into each split's stores; ``tally`` counts what became of every row.

    ValueError at the first row that cannot be used where ``bad_lines`` is stop. say: called now and then with the
    examples done.
    """
    codes: deque[bytes] = deque()
    lengths = byte_lengths(lesson.teaching.vocabulary)
    waiting: dict[str, list[Supervised]] = {name: [] for name in writers}

    def flush(name: str) -> None:
        texts, counts = waiting[name], tally.splits[name]
        ids, trained = (np.concatenate([getattr(text, of) for text in texts]) for of in ("ids", "trained"))
        sizes = np.array([len(text.ids) for text in texts])
        counts.documents += len(texts)
        counts.tokens += len(ids)
        counts.trained += int(trained.sum())
        counts.bytes += writers[name].append(ids, trained, sizes, lengths)
        texts.clear()

    found = taught(_admitted(sources, spec, lesson, codes, tally), lesson.teaching)
    for done, item in enumerate(found, 1):
        code = codes.popleft()
        if done % _SAY_EVERY == 0:
            say(done)
        if isinstance(item, Fault):
            tally.documents -= code != b""  # it was an example, and cannot be written
            count_bad(Bad(item.place, item.what), bad_lines, tally)
            continue
        learned = [text for text in item[1] if len(text.ids)]
        tally.untaught += not learned
        name = split_of(code, split)
        waiting[name] += learned
        if len(waiting[name]) >= _TOGETHER:
            flush(name)
    for name, texts in waiting.items():
        if texts:
            flush(name)


def _admitted(
    sources: Sequence[Source], spec: SetSpec, lesson: Lesson, codes: deque[bytes], tally: Tally
) -> Iterator[Item | Fault]:
    """Yield examples without repeats, and what is none; its digest goes into ``codes``, b"" for what is none.

    ValueError for a file that cannot be read to its end: no count could say what is lost.
    """
    seen: set[bytes] = set()
    for source in sources:
        tally.files += 1
        for item in examples(source.path, lesson.spec.fields, lesson.parse):
            code = b""
            if isinstance(item, Blank):
                tally.blank += 1
                continue
            if isinstance(item, Fault):
                if item.kind == UNREADABLE:
                    raise ValueError(str(item))
            else:
                tally.documents += 1
                tally.forms[item.kind] = tally.forms.get(item.kind, 0) + 1
                code = digest(item)
                if spec.deduplicate and code in seen:
                    tally.duplicate += 1
                    continue
                seen.add(code)
            codes.append(code)
            yield item
