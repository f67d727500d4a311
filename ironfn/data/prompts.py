"""Hold prompts for a policy to answer, each with what its answer is graded by."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import xxhash
from attrs import frozen

from ironfn.data import order
from ironfn.data.admit import split_of
from ironfn.data.chat import messages_of
from ironfn.data.conversation import Fault
from ironfn.data.dataset import Dataset
from ironfn.data.lesson import Lesson
from ironfn.data.readers import Bad, Blank, Row, rows
from ironfn.data.sources import find
from ironfn.data.tokenizer import byte_lengths
from ironfn.spec.records import DataSpec, GraderSpec

_NOTHING: Mapping[str, GraderSpec] = MappingProxyType({})
_LESS = ("a larger share of data.split, or 0 to do without it", "smaller shares of data.split to the other splits")


@frozen(eq=False)
class Prompt:
    """Hold a prompt's ids, its text as a person wrote it, and the fields of its row."""

    ids: tuple[int, ...]
    text: str
    row: Mapping[str, Any]


@frozen(eq=False)
class Prompts(Dataset):
    """Hold one split of every set's prompts. cut: how many were left out, being longer than a prompt may be."""

    prompts: tuple[Prompt, ...] = ()
    cut: int = 0

    @property
    def rows(self) -> int:
        """Count the prompts."""
        return len(self.prompts)

    def at(self, numbers: Sequence[int], seed: int) -> list[Prompt]:
        """Return the prompts of these places of an endless walk: every prompt once an epoch, in a new order each."""
        size = len(self.prompts)
        epochs, places = np.divmod(np.asarray(numbers, np.int64), size)
        if self.shuffle:
            for epoch in np.unique(epochs):
                now = epochs == epoch
                places[now] = order.permute(places[now], size, seed, "prompts", int(epoch))
        return [self.prompts[place] for place in places.tolist()]


def open_prompts(
    spec: DataSpec, split: str, lesson: Lesson, longest: int, needs: Mapping[str, GraderSpec] = _NOTHING
) -> Prompts:
    """Read a split's prompts: rows with ``prompt``, a text or messages, and whatever else they are graded by.

    needs: the rewards that grade the answers, by name. A prompt of more than ``longest`` tokens is left out. Equal
    rows count once. ValueError for a row without a prompt, or what it needs, unless ``data.bad_lines`` is count, and
    where there are none.
    """
    vocabulary, chosen, cut, seen = lesson.teaching.vocabulary, list[Prompt](), 0, set[bytes]()
    for name, one in spec.sets.items():
        for source in find(one.sources):
            for item in _rows(source.path, lesson, needs):
                if isinstance(item, Fault):
                    if spec.bad_lines == "stop":
                        raise ValueError(
                            f"data.sets.{name}: {item}; or set data.bad_lines: count to pass over such rows"
                        )
                    continue
                digest = xxhash.xxh3_128_digest(json.dumps(dict(item.row), sort_keys=True).encode())
                if digest in seen or split_of(digest, spec.split) != split:
                    continue
                seen.add(digest)
                cut += len(item.ids) > longest
                chosen += [item] if len(item.ids) <= longest else []
    if not chosen:
        raise ValueError(
            f"the {split} split has no prompt of up to {longest} tokens ({cut} are longer); give more rows, "
            f"{_LESS[split == 'train']}, or a longer data.length"
        )
    told = repr([vocabulary.checksum, lesson.settings, *((p.ids, sorted(p.row)) for p in chosen)])
    return Prompts(
        names=(), stores=(), shares=(), length=spec.length, attend=spec.attend, shuffle=spec.shuffle,
        vocab_size=vocabulary.size, eos=vocabulary.eos, byte_lengths=torch.from_numpy(byte_lengths(vocabulary)),
        tokenizer=Path(spec.tokenizer.file or ""), checksum=xxhash.xxh3_64_intdigest(told.encode()),
        prompts=tuple(chosen), cut=cut,
    )  # fmt: skip


def _rows(path: Path, lesson: Lesson, needs: Mapping[str, GraderSpec]) -> Iterator[Prompt | Fault]:
    for row in rows(path):
        if isinstance(row, Blank):
            continue
        if isinstance(row, Bad):
            yield Fault(row.place, "unreadable row", f"{row.what}; correct it, or leave it out")
            continue
        try:
            yield _graded(_prompt(row, lesson), row.place, needs)
        except ValueError as error:
            yield error if isinstance(error, Fault) else Fault(row.place, "prompt", str(error))


def _graded(prompt: Prompt, place: str, needs: Mapping[str, GraderSpec]) -> Prompt:
    """Return a prompt that has what its answers are graded by. `Fault` for one that has not."""
    for reward, spec in needs.items():
        for name in spec.reads:
            value, who = prompt.row.get(name), f"the field {name!r}, which grpo.rewards.{reward} reads,"
            if value is None or (isinstance(value, str) and not value.strip()):
                what = f"{who} is missing or empty; fill it, or say what it is called by sft.fields: {{{name}: …}}"
                raise Fault(place, "nothing to grade by", what)
            if spec.kind in ("math", "exact") and not isinstance(value, str | int | float):
                what = f"{who} is {type(value).__name__}; a text or a number is compared"
                raise Fault(place, "nothing to grade by", what)
    return prompt


def _prompt(row: Row, lesson: Lesson) -> Prompt:
    values: Any = row.value
    if not isinstance(values, dict):
        raise Fault(row.place, "unknown form", "a row is an object with a prompt; write one")
    names = {theirs: ours for ours, theirs in lesson.spec.fields.items()}
    fields: dict[str, Any] = {names.get(str(name), str(name)): value for name, value in values.items()}
    try:
        told = json.dumps(fields, ensure_ascii=False, sort_keys=True)
        told.encode()
    except (UnicodeEncodeError, TypeError, ValueError, RecursionError) as error:
        raise Fault(row.place, "no JSON value", f"{error}; write texts, numbers, lists and objects only") from error
    asked = fields.get("prompt")
    if isinstance(asked, str) and asked.strip():
        return Prompt(tuple(lesson.question(asked)), asked, fields)
    chat = lesson.teaching.chat
    if not isinstance(asked, list) or chat is None:
        what = "prompt has to be a text" + ("" if chat is None else ", or a list of messages")
        raise Fault(row.place, "prompt", f"{what}; rename a field by sft.fields: {{prompt: its name}}")
    messages = messages_of(asked)
    text = "\n".join(str(message.get("content", "")) for message in messages)
    return Prompt(tuple(chat.encode(messages)), text, fields)
