"""Measure greedy decoding against `transformers.generate`, and against what the memory's bandwidth would allow.

Every contender continues the same number of random prompts, of its own random weights of one shape: what is said does
not matter to the time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from attrs import evolve, frozen

from bench import interop, peer, step
from bench.figure import Figure, alternate
from ironfn import tree
from ironfn.generate.engine import Generator, Request, Token, complete
from ironfn.generate.sampling import Sampling
from ironfn.mesh.axis import SINGLE
from ironfn.model.arch import Arch
from ironfn.model.arch import complete as completed
from ironfn.model.init import init
from ironfn.model.prepared import int8, packed
from ironfn.model.tables import table

GREEDY = Sampling(temperature=0)
Prompts = list[tuple[int, ...]]


@frozen
class Case:
    """A shape, how much it continues, and the bars: by the number of texts, those of float32 and of 8-bit weights."""

    name: str
    arch: Arch
    tokens: int
    bars: dict[int, tuple[str, str]]


def small() -> Arch:
    """Return the 12.2 M parameters of the pretraining bench with room for long texts."""
    return completed(evolve(step.MODEL, context=1024), 4096)


def cases() -> tuple[Case, ...]:
    """Return what is measured."""
    return (
        Case("12m", small(), 96, {1: (">= 2", ">= 3.5"), 8: (">= 1.7", ">= 3")}),
        Case("smollm2", interop.model(), 40, {1: (">= 1.6", ">= 3"), 8: (">= 1.8", ">= 3")}),
    )


def figures(rounds: int = 5) -> Iterator[Figure]:
    """Yield how many times the tokens a second of `transformers` come, with float32 and with 8-bit weights."""
    for case in cases():
        params, theirs = init(case.arch, 0, table(False), SINGLE), peer.llama(case.arch).eval()
        forms = {"fp32": packed(params, case.arch), "int8": int8(params, case.arch)}
        size = sum(leaf.numel() for leaf in tree.leaves(params))
        for rows, bars in case.bars.items():
            texts, speeds = prompts(rows, case.arch.vocab), list[float]()
            calls: dict[str, Callable[[], object]] = {"memory": partial(_note_bandwidth, speeds)}
            calls["transformers"] = partial(their_texts, theirs, texts, case.tokens)
            for name, (form, arch) in forms.items():
                calls[name] = partial(our_texts, Generator(params=form, arch=arch), texts, case.tokens)
            seconds, read = alternate(calls, rounds), statistics.median(speeds)
            for (name, bytes_), bar in zip((("fp32", 4 * size), ("int8", size)), bars, strict=True):
                share = bytes_ * case.tokens / seconds[name] / read
                note = ", ".join(f"{n} {rows * case.tokens / seconds[n]:.0f} tok/s" for n in ("transformers", name))
                note += f"; {share:.2f} of the limit at {read / 1e9:.1f} GB/s"
                yield Figure(f"{case.name}_{name}_batch_{rows}", seconds["transformers"] / seconds[name], bar, note)


def prompts(rows: int, vocab: int, length: int = 16) -> Prompts:
    """Draw prompts that have nothing in common."""
    draw = torch.Generator().manual_seed(rows)
    return [tuple(row) for row in torch.randint(1, vocab, (rows, length), generator=draw).tolist()]


def our_texts(generator: Generator, texts: Prompts, tokens: int) -> None:
    """Continue all of the prompts by so many tokens."""
    requests = [Request(key=n, prompt=text, limit=tokens, sampling=GREEDY) for n, text in enumerate(texts)]
    told = sum(isinstance(event, Token) for event in complete(generator, requests))
    assert told == tokens * len(texts)


def their_texts(model: Any, texts: Prompts, tokens: int) -> None:
    """Continue prompts of one length with `transformers`, in one batch, with its cache."""
    ids = torch.tensor(texts)
    fixed: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    done = model.generate(ids, attention_mask=torch.ones_like(ids), **fixed)
    assert done.shape == (len(texts), len(texts[0]) + tokens)


def _note_bandwidth(speeds: list[float]) -> None:
    """Add the bytes a second at which a sum reads 256 MB."""
    block = torch.ones(64 << 20)
    start = time.perf_counter()
    for _ in range(3):
        block.sum()
    speeds.append(3 * block.nbytes / (time.perf_counter() - start))
