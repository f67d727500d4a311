"""Encode a set's documents, batch by batch, into its stores."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from attrs import field, frozen

from ironfn.data.admit import Admitted
from ironfn.data.fim import arrange, cut
from ironfn.data.store import StoreWriter
from ironfn.data.tally import Tally
from ironfn.data.tokenizer import Vocabulary, encode, encode_around, pieces
from ironfn.spec.records import FimSpec

_BATCH_CHARACTERS = 1 << 20
_REPORT_BYTES = 1 << 26


@frozen
class Job:
    """Hold documents that are encoded together: each one's split and bytes, and its texts and control ids in order."""

    heads: list[tuple[str, int]] = field(factory=list)
    bodies: list[list[str | int]] = field(factory=list)


def write(
    documents: Iterable[Admitted],
    writers: Mapping[str, StoreWriter],
    vocabulary: Vocabulary,
    fim: FimSpec,
    seed: int,
    tally: Tally,
    say: Callable[[int], None],
) -> None:
    """Encode the documents and append each to its split's store; ``tally`` counts ids and rearranged documents.

    One thread encodes a batch, by all cores, while this one takes the batch before it apart and reads the next: memory
    holds two batches. say: called now and then with the bytes done.
    """
    done, said = 0, 0
    with ThreadPoolExecutor(1, thread_name_prefix="encode") as pool:
        waiting: tuple[Job, Future[list[array[int]]]] | None = None
        for job in _jobs(documents, vocabulary, fim, seed, tally):
            texts = [part for body in job.bodies for part in body if isinstance(part, str)]
            waiting, ready = (job, pool.submit(encode, vocabulary, texts)), waiting
            if ready is not None:
                done += _append(ready[0], ready[1].result(), writers, vocabulary, tally)
            if done - said >= _REPORT_BYTES:
                said = done
                say(done)
        if waiting is not None:
            _append(waiting[0], waiting[1].result(), writers, vocabulary, tally)


def _jobs(
    documents: Iterable[Admitted], vocabulary: Vocabulary, fim: FimSpec, seed: int, tally: Tally
) -> Iterator[Job]:
    job, size = Job(), 0
    body_of = partial(_body, vocabulary=vocabulary, fim=fim, seed=seed, tally=tally)
    for document in documents:
        job.heads.append((document.split, document.text_bytes))
        job.bodies.append(body_of(document))
        size += len(document.text)
        if size >= _BATCH_CHARACTERS:
            yield job
            job, size = Job(), 0
    if job.heads:
        yield job


def _body(document: Admitted, vocabulary: Vocabulary, fim: FimSpec, seed: int, tally: Tally) -> list[str | int]:
    parts: list[str | int] = [document.text]
    if fim.rate > 0 and document.split == "train" and vocabulary.fim is not None:
        apart = cut(document.text, fim, seed, document.digest)
        if apart is not None:
            tally.fim += 1
            parts = arrange(apart, vocabulary.fim)
    body: list[str | int] = []
    for part in parts:
        body += [part] if isinstance(part, int) else pieces(part, vocabulary)
    return [*body, vocabulary.eos]


def _append(
    job: Job, encoded: list[array[int]], writers: Mapping[str, StoreWriter], vocabulary: Vocabulary, tally: Tally
) -> int:
    """Put encoded texts and control ids together again and append them; return the bytes of text that were done."""
    ids = {split: array("I") for split in writers}
    lengths: dict[str, list[int]] = {split: [] for split in writers}
    sizes = dict.fromkeys(writers, 0)
    texts = iter(encoded)
    for (split, text_bytes), body in zip(job.heads, job.bodies, strict=True):
        flat = ids[split]
        before = len(flat)
        for part in body:
            if isinstance(part, int):
                flat.append(part)
                continue
            got = next(texts)
            flat += got if vocabulary.controls.keys().isdisjoint(got) else encode_around(vocabulary, part)
        lengths[split].append(len(flat) - before)
        sizes[split] += text_bytes
    for split, writer in writers.items():
        writer.append(ids[split], lengths[split], sizes[split])
        tally.splits[split].tokens += len(ids[split])
        if vocabulary.unknown is not None:
            tally.unknown += ids[split].count(vocabulary.unknown)
    return sum(sizes.values())
