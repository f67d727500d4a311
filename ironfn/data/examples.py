"""Read the examples of files, and encode many at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import xxhash
from attrs import field, frozen

from ironfn.data.conversation import Example, Fault, parse
from ironfn.data.preferences import Preference, agreed
from ironfn.data.readers import Bad, Blank, Row, rows
from ironfn.data.supervise import Draft, Supervised, Teaching, drafts, encode_drafts

UNREADABLE = "unreadable file"
"""The kind of fault after which nobody knows how many rows are missing."""
_BATCH_CHARACTERS = 1 << 20

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
    """Hold examples that are encoded together: each with how many of the drafts are its own, or what is wrong."""

    items: list[tuple[Item, int] | Fault] = field(factory=list)
    texts: list[Draft] = field(factory=list)


def taught(found: Iterable[Item | Fault], teaching: Teaching) -> Iterator[Taught | Fault]:
    """Yield each item with the texts that it becomes, see `supervised` and `agreed`, or what is wrong with it.

    They come in their order. One thread encodes a batch, by all cores, while this one reads and renders the next.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="encode") as pool:
        waiting: tuple[_Job, Future[list[Supervised | Fault]]] | None = None
        for job in _jobs(found, teaching):
            waiting, ready = (job, pool.submit(encode_drafts, job.texts, teaching)), waiting
            if ready is not None:
                yield from _done(ready[0], ready[1].result())
        if waiting is not None:
            yield from _done(waiting[0], waiting[1].result())


def _jobs(found: Iterable[Item | Fault], teaching: Teaching) -> Iterator[_Job]:
    job, size = _Job(), 0
    for item in found:
        try:
            mine = [draft for example in _examples_of(item) for draft in drafts(example, teaching)]
        except Fault as fault:
            item, mine = fault, []
        job.items.append(item if isinstance(item, Fault) else (item, len(mine)))
        job.texts.extend(mine)
        size += sum(text.characters for text in mine)
        if size >= _BATCH_CHARACTERS:
            yield job
            job, size = _Job(), 0
    yield job


def _examples_of(item: Item | Fault) -> tuple[Example, ...]:
    if isinstance(item, Fault):
        return ()
    return item.examples if isinstance(item, Preference) else (item,)


def _done(job: _Job, encoded: list[Supervised | Fault]) -> Iterator[Taught | Fault]:
    texts = iter(encoded)
    for item in job.items:
        if isinstance(item, Fault):
            yield item
            continue
        example, count = item
        mine = [next(texts) for _ in range(count)]
        yield _agreed(example, mine)


def _agreed(item: Item, mine: list[Supervised | Fault]) -> Taught | Fault:
    if (wrong := next((text for text in mine if isinstance(text, Fault)), None)) is not None:
        return wrong
    texts = [text for text in mine if isinstance(text, Supervised)]
    try:
        return item, agreed(item, texts) if isinstance(item, Preference) else texts
    except Fault as fault:
        return fault
