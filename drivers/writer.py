"""Continue prompts with an engine: what a command needs that waits for the answers itself."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
from attrs import evolve

from ironfn import tree
from ironfn.generate.cache import blocks_within, token_bytes
from ironfn.generate.engine import Engine, Generator, Limits, Request, advance, cancel, start, submit
from ironfn.generate.text import Words
from ironfn.model.prepared import int8, packed, quantization_error
from ironfn.tree import branch, leaf

from .telling import Piece, Teller
from .trained import Trained, open_model

SIZE = 16
"""Tokens in a block of the cache."""
CACHE = 2 << 30
"""Bytes that the cache takes at the most, unless it is told otherwise or a single text wants more."""


def for_writing(path: Path, dtype: str | None, eight: bool) -> Trained:
    """Open a model, its matrices laid out for decoding. eight: in 8 bits, with a line on standard error on the error.

    That takes as much memory again; where it is not there, the matrices stay as they are.
    """
    model = open_model(path, lambda line: click.echo(line, err=True), dtype=dtype)
    if eight:
        matrices = [w for name, w in tree.flatten(model.params).items() if w.dim() == 2 and "embed" not in name]
        errors = [quantization_error(w.float()) for w in matrices]
        told = f"{sum(errors) / len(errors):.2%} off, at most {max(errors):.2%} (norm of the difference over the norm)"
        click.echo(f"matrices in 8 bits, {told}", err=True)
    elif tree.nbytes(model.params) > os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2:
        return model
    params, arch = (int8 if eight else packed)(model.params, model.arch)
    return evolve(model, params=params, arch=arch)


def engine_of(
    model: Trained, limits: Limits | None = None, *, cache_gb: float | None = None, longest: int | None = None
) -> Engine:
    """Return an idle engine for a model. cache_gb: 1e9 bytes for its cache; None: what its rows can use, up to `CACHE`.

    longest: tokens of the longest text, where that is known. ValueError for a cache that holds nothing.
    """
    limits = limits or Limits()
    generator = Generator(
        params=model.params, arch=model.arch, how=model.how, version=model.version, before=model.vectors
    )
    dtype = model.how.compute or leaf(branch(model.params, "embed"), "tokens").dtype
    if cache_gb is not None:
        blocks = blocks_within(int(cache_gb * 1e9), model.arch, SIZE, generator.mesh, dtype)
    else:
        longest = model.arch.context if longest is None else longest + model.vectors
        one = -(-min(model.arch.context, longest) // SIZE) + 1
        blocks = min(limits.rows * one, max(one, CACHE // (SIZE * token_bytes(model.arch, generator.mesh, dtype))))
    return start(generator, blocks, size=SIZE, limits=limits)


class Writer:
    """Hold an engine, and with it what it has computed, from one call to the next."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def write(self, jobs: Iterable[tuple[Request, Words]]) -> Iterator[Piece]:
        """Yield the texts of all continuations as they become certain, those of many requests among each other.

        Requests are taken as there is room for them. A caller that stops listening cancels what is still being written.
        """
        teller, waiting = Teller(), iter(jobs)
        more = True
        try:
            while more or self.engine.busy:
                while more and len(self.engine.queue.waiting) < self.engine.limits.rows:
                    job = next(waiting, None)
                    more = job is not None
                    if job is not None:
                        self.engine = submit(self.engine, job[0])
                        teller.expect(*job)
                self.engine, events = advance(self.engine)
                pieces, enough = teller.hear(events)
                for key, number in enough:
                    self.engine = cancel(self.engine, key, number)
                yield from pieces
        finally:
            for row in (*self.engine.queue.waiting, *self.engine.queue.running):
                self.engine = cancel(self.engine, row.request.key)
