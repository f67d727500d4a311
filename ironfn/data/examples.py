"""Read the examples of files, and encode many at once."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import xxhash
from attrs import field, frozen

from ironfn.data.conversation import Example, Fault, parse
from ironfn.data.preferences import Preference, agreed
from ironfn.data.readers import Bad, Blank, Row, rows
from ironfn.data.supervise import Drafts, Supervised, Teaching, draft, encode_drafts
from ironfn.data.turns import ENDLESS

UNREADABLE = "unreadable file"
"""The kind of fault after which nobody knows how many rows are missing."""
_BATCH_CHARACTERS = 1 << 20
_BATCH_ITEMS = 1 << 13
_ENCODERS = 2
_PATIENCE = 5
"""After how many examples in a row at which the template oversteps its limits nobody waits for the rest."""

Item: TypeAlias = "Example | Preference"
Taught: TypeAlias = tuple[Item, list[Supervised]]
Parse: TypeAlias = "Callable[[Row, Mapping[str, str]], Item]"


def examples(path: Path, fields: Mapping[str, str], parse: Parse = parse) -> Iterator[Item | Fault | Blank]:
    """Yield what a file's rows teach or prefer, in their order; see `readers.rows`.

    parse: `conversation.parse`, or one of `preferences`.
    A file that cannot be read to its end yields what could be read, and a `Fault`.
    """
    try:
        for row in rows(path):
            if isinstance(row, Blank):
                yield row
            elif isinstance(row, Bad):
                yield Fault(row.place, "unreadable row", f"{row.what}; correct it, or leave it out")
            else:
                yield _parsed(row, fields, parse)
    except ValueError as error:
        line, _, what = str(error).removeprefix(str(path)).partition(": ")
        yield Fault(f"{path}{line}", UNREADABLE, what)


def _parsed(row: Row, fields: Mapping[str, str], parse: Parse) -> Item | Fault:
    try:
        return parse(row, fields)
    except Fault as fault:
        return fault


def text_of(item: Item) -> str:
    """Return all that an example or a preference says, as one text; equal ones teach the same."""
    if isinstance(item, Preference):
        return json.dumps([*map(text_of, item.examples), item.liked])
    example = item
    if example.kind in ("completion", "text"):  # no JSON, which begins with a bracket, and takes longer than the rest
        return f"{len(example.prompt)} {example.prompt}{example.completion}"
    plain = (example.messages, example.weights, example.tools, example.prompt, example.completion)
    return json.dumps((*plain, example.ids, example.trained), ensure_ascii=False, sort_keys=True)


def digest(item: Item) -> bytes:
    """Return the xxh3 by which equal ones are known."""
    return xxhash.xxh3_128_digest(text_of(item).encode())


@frozen
class _Job:
    """Hold examples that are encoded together, or what is wrong with one; and how many of the drafts are each one's."""

    items: list[Item | Fault] = field(factory=list)
    counts: list[int] = field(factory=list)
    drafts: Drafts = field(factory=Drafts)


def taught(found: Iterable[Item | Fault], teaching: Teaching) -> Iterator[Taught | Fault]:
    """Yield each item with the texts that it becomes, see `supervised` and `agreed`, or what is wrong with it.

    They come in their order. While this thread reads and renders, two encode a batch each, by all cores: one of them
    has work for these when the other takes apart what they made.
    """
    waiting: deque[tuple[_Job, Future[list[Supervised | Fault]]]] = deque()
    with ThreadPoolExecutor(_ENCODERS, thread_name_prefix="encode") as pool:
        for job in _jobs(found, teaching):
            waiting.append((job, pool.submit(encode_drafts, job.drafts, teaching)))
            if len(waiting) > _ENCODERS:
                yield from _done(*waiting.popleft())
        for ready in waiting:
            yield from _done(*ready)


def _jobs(found: Iterable[Item | Fault], teaching: Teaching) -> Iterator[_Job]:
    job, endless = _Job(), 0
    for item in found:
        count = 0
        try:
            for example in _examples_of(item):
                count += draft(example, teaching, job.drafts)
            endless = 0
        except Fault as fault:
            item, endless = fault, endless + 1 if fault.kind == ENDLESS else 0
            if endless == _PATIENCE:
                raise ValueError(f"{fault}; so it was for {endless} examples in a row") from fault
        job.items.append(item)
        job.counts.append(count)
        if job.drafts.characters >= _BATCH_CHARACTERS or len(job.items) >= _BATCH_ITEMS:
            yield job
            job = _Job()
    yield job


def _examples_of(item: Item | Fault) -> tuple[Example, ...]:
    if isinstance(item, Example):
        return (item,)
    return item.examples if isinstance(item, Preference) else ()


def _done(job: _Job, encoding: Future[list[Supervised | Fault]]) -> Iterator[Taught | Fault]:
    texts = iter(encoding.result())
    for item, count in zip(job.items, job.counts, strict=True):
        mine = list(islice(texts, count))
        yield item if isinstance(item, Fault) else _agreed(item, mine)


def _agreed(item: Item, mine: list[Supervised | Fault]) -> Taught | Fault:
    texts: list[Supervised] = []
    for text in mine:
        if isinstance(text, Fault):
            return text
        texts.append(text)
    try:
        return item, agreed(item, texts) if isinstance(item, Preference) else texts
    except Fault as fault:
        return fault
