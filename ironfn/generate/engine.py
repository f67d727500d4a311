"""Continue many texts at once with the pure model of training, each token computed once.

An engine is a value; `advance` makes one forward pass over whatever its texts want and returns the next engine and what
has happened. Only the cache's tensors are donated: of two engines made from one, go on with one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import partial

import torch
from attrs import evolve, frozen
from torch import Tensor

from ironfn import tree
from ironfn.generate import queue as queues
from ironfn.generate.blocks import no_blocks
from ironfn.generate.cache import Pool, copy_tokens, make_pool, slots, stretches
from ironfn.generate.paged import Part, paged
from ironfn.generate.queue import End, Event, Limits, Queue, Request, Token, Work
from ironfn.generate.sampling import Ask, Drawn, draw, top_log_probs
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.model.arch import Arch
from ironfn.model.forward import DEFAULT, Forward
from ironfn.model.rope import regime, tabled
from ironfn.model.transformer import hidden, scored
from ironfn.types import Batch, Params

__all__ = ["End", "Engine", "Event", "Generator", "Limits", "Request", "Token"]


@frozen(eq=False, kw_only=True)
class Generator:
    """Hold a model as generation sees it.

    version: names these parameters: blocks of another version are never read. mesh: where ``params`` is a rank's part;
    every rank goes through the same requests, and takes the choices of rank 0. before: trained vectors that stand
    before every text (`model.virtual`): as many places of it. routes: tell which experts the tokens were computed by.
    """

    params: Params
    arch: Arch
    how: Forward = DEFAULT
    mesh: Mesh = SINGLE
    version: Hashable = 0
    before: int = 0
    routes: bool = False


@frozen(eq=False)
class Engine:
    """Hold a generator, its cache, and the texts that it continues."""

    generator: Generator
    pool: Pool
    queue: Queue
    limits: Limits

    @property
    def busy(self) -> bool:
        """Tell whether a text waits or runs."""
        return bool(self.queue.waiting or self.queue.running)


def start(generator: Generator, blocks: int, *, size: int = 16, limits: Limits | None = None) -> Engine:
    """Return an idle engine with a cache of ``blocks`` blocks of ``size`` tokens."""
    arch = generator.arch.without_capacity()
    mesh = evolve(generator.mesh, sequence_parallel=False)  # tokens come one by one: tp cannot share them out
    leaf = tree.leaves(generator.params)[0]
    dtype = generator.how.compute or leaf.dtype
    pool = make_pool(arch, blocks, size, mesh, dtype, leaf.device, routes=generator.routes)
    how = evolve(generator.how, angles=tabled(arch, min(blocks * size, arch.context), leaf.device))
    generator = evolve(generator, arch=arch, mesh=mesh, how=how)
    return Engine(generator, pool, Queue(no_blocks(blocks, size)), limits or Limits())


def submit(engine: Engine, request: Request) -> Engine:
    """Return the engine with a request more. ValueError for one that neither the model nor the cache can take."""
    arch = engine.generator.arch
    if not all(0 <= i < arch.vocab for i in request.prompt):
        raise ValueError(f"the prompt holds ids outside the model's vocabulary of {arch.vocab}; use its own tokenizer")
    before = engine.generator.before
    if len(request.prompt) + before > arch.context:
        longest = f"{arch.context}" if not before else f"{arch.context}, of which {before} places are taken"
        raise ValueError(f"a prompt of {len(request.prompt)} tokens does not fit the model's context of {longest}")
    if before:
        request = evolve(request, prompt=(0,) * before + tuple(request.prompt))
    return evolve(engine, queue=queues.submit(engine.queue, request))


def cancel(engine: Engine, key: Hashable, number: int | None = None) -> Engine:
    """Return the engine without a request, or without one of its continuations: it tells nothing more of it."""
    return evolve(engine, queue=queues.cancel(engine.queue, key, number))


@torch.inference_mode()
def advance(engine: Engine) -> tuple[Engine, tuple[Event, ...]]:
    """Make one forward pass; return the engine after it, and the tokens and ends that it brought.

    ValueError where the model's logits are no numbers.
    """
    generator = engine.generator
    queue, work = queues.plan(engine.queue, engine.limits, partial(_root, generator))
    if not work.rows:
        return evolve(engine, queue=queue), work.ended
    pool = copy_tokens(engine.pool, work.copies)
    complete = [row for row, count in zip(work.rows, work.counts, strict=True) if row.left == count]
    asks = [
        Ask(row.request.sampling, (*row.request.stream, row.number + more), len(row.ids) - len(row.request.prompt),
            row.ids[generator.before :] if row.request.sampling.repetition_penalty != 1 else ())
        for row in complete for more in range(row.forks + 1)
    ]  # fmt: skip
    logits = _logits(generator, pool, work, queue.blocks.size)
    drawn, tops = _drawn(generator, logits, complete, asks)
    events: list[Event] = [*work.ended]
    groups: list[list[int]] = []
    found = zip(drawn.ids, drawn.log_probs, tops, strict=True)
    for row in complete:
        groups.append([])
        experts = _experts(pool, row, queue.blocks.size)
        for number in range(row.number, row.number + row.forks + 1):
            id, log_prob, top = next(found)
            groups[-1].append(id)
            events.append(Token(row.request.key, number, id, log_prob, top, experts))
    queue, ended = queues.absorb(queue, work, groups, engine.limits, generator.arch.context)
    return evolve(engine, pool=pool, queue=queue), (*events, *ended)


def complete(
    generator: Generator, requests: Iterable[Request], *, limits: Limits | None = None, size: int = 16
) -> Iterator[Event]:
    """Yield what happens until all requests are complete, in a cache that holds as many of them as run at a time."""
    requests, limits = list(requests), limits or Limits()
    if not requests:
        return
    sizes = [generator.before + len(r.prompt) + r.limit for r in requests for _ in range(r.n)]
    longest = sorted(min(size, generator.arch.context) for size in sizes)
    blocks = sum(-(-length // size) for length in longest[-limits.rows :])
    engine = start(generator, blocks, size=size, limits=limits)
    for request in requests:
        engine = submit(engine, request)
    while engine.busy:
        engine, events = advance(engine)
        yield from events


def _root(generator: Generator, length: int) -> Hashable:
    """Return whose blocks a text of this length can read."""
    return generator.version, regime(generator.arch, length)


def _logits(generator: Generator, pool: Pool, work: Work, size: int) -> Tensor:
    """Return the logits [rows, vocab] of the last ids of the rows that are now all computed."""
    device, pairs = pool.keys[0].device, list(zip(work.rows, work.counts, strict=True))
    ids = [i for row, count in pairs for i in row.ids[row.cached : row.cached + count]]
    places = [i for row, count in pairs for i in range(row.cached, row.cached + count)]
    batch: Batch = {"tokens": torch.tensor([ids], device=device), "position": torch.tensor([places], device=device)}
    if generator.arch.rope.kind in ("dynamic", "longrope"):
        lengths = [len(row.ids) for row, count in pairs for _ in range(count)]
        batch["lengths"] = torch.tensor([lengths], device=device)
    parts = [Part(count, row.cached, stretches(row.table, size, row.cached + count)) for row, count in pairs]
    how = evolve(generator.how, attention=paged(pool, parts))
    (x,), seen = hidden(generator.params, batch, generator.arch, generator.mesh, how)
    if pool.experts is not None:
        at = [slot for row, count in pairs for slot in slots(row.table, size, row.cached, row.cached + count)]
        pool.experts[torch.tensor(at, device=device)] = seen["experts"][0].to(torch.int16)
    ends: list[int] = []
    at = 0
    for row, count in pairs:
        at += count
        if row.left == count:
            ends.append(at - 1)
    last = x if len(ends) == x.shape[0] else x[torch.tensor(ends, dtype=torch.long, device=device)]
    logits = scored(last, generator.params, generator.arch, generator.mesh, how)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _experts(pool: Pool, row: queues.Row, size: int) -> bytes:
    """Return what a row's next token tells of experts."""
    if pool.experts is None:
        return b""
    first = 0 if len(row.ids) == len(row.request.prompt) else len(row.ids) - 1
    at = torch.tensor(slots(row.table, size, first, len(row.ids)), device=pool.experts.device)
    return pool.experts[at].cpu().numpy().tobytes()


def _drawn(
    generator: Generator, logits: Tensor, rows: Sequence[queues.Row], asks: Sequence[Ask]
) -> tuple[Drawn, list[tuple[tuple[int, float], ...]]]:
    """Return what each continuation of the rows draws, and the likeliest ids that it asked to be told."""
    if len(asks) > len(rows):
        logits = logits.repeat_interleave(torch.tensor([row.forks + 1 for row in rows], device=logits.device), 0)
    drawn = draw(logits, asks)
    world = generator.mesh.world
    if world.size > 1:  # ranks whose logits round differently must not part ways
        mine = torch.tensor([drawn.ids, drawn.log_probs], dtype=torch.float64, device=logits.device)
        ids, log_probs = world.backend.broadcast(mine, 0).tolist()
        drawn = Drawn([int(i) for i in ids], log_probs)
    wants = [row.request.top for row in rows for _ in range(row.forks + 1)]
    tops = [top_log_probs(logits[n : n + 1], top, asks[n : n + 1])[0] if top else () for n, top in enumerate(wants)]
    return drawn, tops
