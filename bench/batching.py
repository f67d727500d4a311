"""Measure many requests at once: what they share is computed once, and what ends makes room.

Sharing is measured against the same work on prompts that have nothing in common, batching against `transformers` with
padded batches of eight in the order in which the requests came.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from bench import decoding, peer
from bench.decoding import GREEDY, Prompts
from bench.figure import Figure, alternate
from ironfn.generate.engine import Generator, Request, Token, complete
from ironfn.mesh.axis import SINGLE
from ironfn.model.init import init
from ironfn.model.prepared import packed
from ironfn.model.tables import table

REQUESTS, PREFIX, NEW = 16, 512, 16
RAGGED, PADDED = 64, 8


def figures() -> Iterator[Figure]:
    """Yield what a common prefix saves, to the end and to the first tokens, and what continuous batching does."""
    arch = decoding.small()
    params, prepared = packed(init(arch, 0, table(False), SINGLE), arch)
    generator = Generator(params=params, arch=prepared)
    yield from _shared(generator)
    yield _ragged(generator, peer.llama(arch).eval())


def _shared(generator: Generator, rounds: int = 5) -> Iterator[Figure]:
    vocab = generator.arch.vocab
    apart = decoding.prompts(REQUESTS, vocab, PREFIX + 4)
    alike = [apart[0][:PREFIX] + text[PREFIX:] for text in apart]
    first: dict[str, list[float]] = {"apart": [], "alike": []}

    def timed(name: str, texts: Prompts) -> None:
        first[name].append(_until_first(generator, texts))

    seconds = alternate({"apart": partial(timed, "apart", apart), "alike": partial(timed, "alike", alike)}, rounds)
    firsts = {name: sorted(times[1:])[rounds // 2] for name, times in first.items()}
    for name, found, bar in (("shared_prefix", seconds, ">= 5"), ("shared_prefix_first_tokens", firsts, ">= 10")):
        note = f"{REQUESTS} requests of {PREFIX} + 4 tokens: {found['apart']:.2f} s apart, {found['alike']:.3f} s alike"
        yield Figure(name, found["apart"] / found["alike"], bar, note)


def _until_first(generator: Generator, texts: Prompts) -> float:
    """Continue the prompts; return the seconds until each has its first token."""
    requests = [Request(key=n, prompt=text, limit=NEW, sampling=GREEDY) for n, text in enumerate(texts)]
    start, seen, last = time.perf_counter(), set[object](), 0.0
    for event in complete(generator, requests):
        if isinstance(event, Token) and event.key not in seen:
            seen.add(event.key)
            last = time.perf_counter() - start
    assert len(seen) == len(texts)
    return last


def _ragged(generator: Generator, theirs: Any) -> Figure:
    """Continue 64 prompts of 8 to 512 ids by 8 to 256, each as far as it asks."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(8, 513, (RAGGED,), generator=draw).tolist()
    wants = torch.randint(8, 257, (RAGGED,), generator=draw).tolist()
    texts = [tuple(torch.randint(1, generator.arch.vocab, (length,), generator=draw).tolist()) for length in lengths]

    def ours() -> None:
        requests = [
            Request(key=n, prompt=text, limit=limit, sampling=GREEDY)
            for n, (text, limit) in enumerate(zip(texts, wants, strict=True))
        ]
        assert sum(isinstance(event, Token) for event in complete(generator, requests)) == sum(wants)

    def padded() -> None:
        for at in range(0, RAGGED, PADDED):
            _padded(theirs, texts[at : at + PADDED], max(wants[at : at + PADDED]))

    seconds = alternate({"ours": ours, "padded": padded}, rounds=1, warmup=0)
    speeds = ", ".join(f"{name} {sum(wants) / took:.0f} tok/s" for name, took in seconds.items())
    note = f"{speeds}, {sum(lengths)} tokens read and {sum(wants)} said"
    return Figure("ragged_load", seconds["padded"] / seconds["ours"], ">= 3", note)


def _padded(model: Any, texts: Prompts, tokens: int) -> None:
    """Continue prompts in one batch, padded on the left to the longest, as far as the one that wants most."""
    width = max(map(len, texts))
    ids = torch.tensor([(0,) * (width - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
