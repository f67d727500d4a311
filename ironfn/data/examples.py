"""Read the examples of files, and encode many at once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import xxhash
from attrs import field, frozen

from ironfn.data.conversation import Example, Fault, parse
from ironfn.data.readers import Bad, Blank, Row, rows
from ironfn.data.supervise import Draft, Supervised, Teaching, drafts, encode_drafts

UNREADABLE = "unreadable file"
"""The kind of fault after which nobody knows how many rows are missing."""
_BATCH_CHARACTERS = 1 << 20

Taught: TypeAlias = tuple[Example, list[Supervised]]


def examples(path: Path, fields: Mapping[str, str]) -> Iterator[Example | Fault | Blank]:
    """Yield what a file's rows teach, in their order; see `readers.rows` and `conversation.parse`.

    A file that cannot be read to its end yields what could be read, and a `Fault`.
    """
    try:
        for row in rows(path):
            if isinstance(row, Blank):
                yield row
            elif isinstance(row, Bad):
                yield Fault(row.place, "unreadable row", f"{row.what}; correct it, or leave it out")
            else:
                yield _parsed(row, fields)
    except ValueError as error:
        line, _, what = str(error).removeprefix(str(path)).partition(": ")
        yield Fault(f"{path}{line}", UNREADABLE, what)


def _parsed(row: Row, fields: Mapping[str, str]) -> Example | Fault:
    try:
        return parse(row, fields)
    except Fault as fault:
        return fault


def text_of(example: Example) -> str:
    """Return all that an example says, as one text; equal ones teach the same."""
    plain = (example.messages, example.weights, example.tools, example.prompt, example.completion)
    return json.dumps((*plain, example.ids, example.trained), ensure_ascii=False, sort_keys=True)


def digest(example: Example) -> bytes:
    """Return the xxh3 by which equal examples are known."""
    return xxhash.xxh3_128_digest(text_of(example).encode())


@frozen
class _Job:
    """Hold examples that are encoded together: each with how many of the drafts are its own, or what is wrong."""

    items: list[tuple[Example, int] | Fault] = field(factory=list)
    texts: list[Draft] = field(factory=list)


def taught(found: Iterable[Example | Fault], teaching: Teaching) -> Iterator[Taught | Fault]:
    """Yield each example with the texts that it becomes, see `supervised`, or what is wrong with it; in their order.

    One thread encodes a batch, by all cores, while this one reads and renders the next.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="encode") as pool:
        waiting: tuple[_Job, Future[list[Supervised | Fault]]] | None = None
        for job in _jobs(found, teaching):
            waiting, ready = (job, pool.submit(encode_drafts, job.texts, teaching)), waiting
            if ready is not None:
                yield from _done(ready[0], ready[1].result())
        if waiting is not None:
            yield from _done(waiting[0], waiting[1].result())


def _jobs(found: Iterable[Example | Fault], teaching: Teaching) -> Iterator[_Job]:
    job, size = _Job(), 0
    for item in found:
        try:
            mine = [] if isinstance(item, Fault) else drafts(item, teaching)
        except Fault as fault:
            item, mine = fault, []
        job.items.append(item if isinstance(item, Fault) else (item, len(mine)))
        job.texts.extend(mine)
        size += sum(text.characters for text in mine)
        if size >= _BATCH_CHARACTERS:
            yield job
            job, size = _Job(), 0
    yield job


def _done(job: _Job, encoded: list[Supervised | Fault]) -> Iterator[Taught | Fault]:
    texts = iter(encoded)
    for item in job.items:
        if isinstance(item, Fault):
            yield item
            continue
        example, count = item
        mine = [next(texts) for _ in range(count)]
        wrong = next((text for text in mine if isinstance(text, Fault)), None)
        yield wrong if wrong is not None else (example, [text for text in mine if isinstance(text, Supervised)])
