"""Compare the bytes that each axis of the mesh moves with what theory says, on fake ranks under a ledger."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch

from bench.figure import Figure
from ironfn.algo.step import State, make_step
from ironfn.grad.value_and_grad import value_and_grad
from ironfn.layout.fsdp import fetch, shard_table
from ironfn.layout.table import Table, shard
from ironfn.layout.zero import share_updates
from ironfn.loss.lm import lm_loss
from ironfn.mesh import fake
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.mesh.ledger import Entry, Ledger
from ironfn.model.arch import Arch, complete
from ironfn.model.forward import Forward
from ironfn.model.init import init, shapes
from ironfn.model.tables import table
from ironfn.model.transformer import hidden
from ironfn.optim.presets import make_optimizer, whole_work
from ironfn.spec.records import ModelSpec, MoeSpec, OptimSpec
from ironfn.types import Batch

ROWS, LENGTH, WIDTH, VOCAB = 2, 64, 128, 512
EXPERTS = MoeSpec(experts=8, top_k=2)


def figures() -> Iterator[Figure]:
    """Yield the bytes that were moved over the bytes of theory, of each form of parallelism."""
    for ranks in (2, 4):
        yield _data(ranks, "adamw", zero=False)
        yield _data(ranks, "adamw", zero=True)
        yield _data(ranks, "muon", zero=True)
        yield _fsdp(ranks)
        yield _tensor(ranks, sequence_parallel=False)
        yield _tensor(ranks, sequence_parallel=True)
        yield from _experts(ranks)


def _arch(layers: int = 8, moe: MoeSpec | None = None) -> Arch:
    spec = ModelSpec(width=WIDTH, layers=layers, heads=4, ffn=384, context=LENGTH, moe=moe or MoeSpec(), tied=False)
    return complete(spec, VOCAB)


def _batch(rows: int, seed: int = 0) -> Batch:
    ids = torch.randint(0, VOCAB, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:], "weight": torch.ones(rows, LENGTH)}


def _step(mesh: Mesh, arch: Arch, layout: Table, spec: OptimSpec, zero: bool) -> list[Entry]:
    """Return what one rank writes down in one step."""
    book = Ledger()
    watched = book.watch(mesh)
    params = shard(init(arch, 0, table(False), SINGLE), layout, mesh)
    updates = share_updates(layout, shapes(arch), watched, whole_work(spec, shapes(arch))) if zero else None
    optimizer = make_optimizer(spec, params, table=layout, mesh=watched, updates=updates)
    vg = value_and_grad(lm_loss(arch))
    step = make_step(vg, optimizer, lambda s: 1e-3, table=layout, mesh=watched, updates=updates, clip=1.0)
    step(State(0, params, optimizer.init(params)), _batch(ROWS, mesh.dp.index))
    return book.entries


def _sent(ranks: list[list[Entry]], axis: str) -> int:
    """Return the most bytes that a rank sends over an axis."""
    return max(sum(entry.sent for entry in entries if entry.axis == axis) for entries in ranks)


def _data(ranks: int, name: Literal["adamw", "muon"], zero: bool) -> Figure:
    """All-reduce, or ZeRO-1's reduce-scatter and all-gather: 2 (N-1)/N of the parameters (arXiv 1910.02054, 7.2)."""
    arch = _arch()
    found = fake.run(lambda mesh: _step(mesh, arch, table(False), OptimSpec(name=name), zero), dp=ranks)
    whole = 4 * sum(torch.Size(shape).numel() for shape in shapes(arch).values())
    moved, theory = _sent(found, "dp"), 2 * (ranks - 1) * whole / ranks
    title = f"dp{ranks}_{'zero1_' if zero else ''}{name}_bytes"
    return _figure(title, moved, theory, "2 (N-1)/N of the parameters")


def _fsdp(ranks: int) -> Figure:
    """Gathered to go forward, gradients reduce-scattered: 2 (N-1)/N too, or 3 where blocks are recomputed."""
    arch = _arch()

    def run(mesh: Mesh) -> tuple[list[Entry], int]:
        book = Ledger()
        watched = book.watch(mesh)
        layout = shard_table(table(False), shapes(arch), watched)
        params = shard(init(arch, 0, table(False), SINGLE), layout, mesh)
        value_and_grad(lm_loss(arch, Forward(fetch=fetch(layout, watched))))(params, _batch(ROWS), watched)
        cut = [shape for path, shape in shapes(arch).items() if layout[path].dim("dp") is not None]
        return book.entries, 4 * sum(torch.Size(shape).numel() for shape in cut)

    found = fake.run(run, dp=ranks)
    theory = 2 * (ranks - 1) * found[0][1] / ranks
    return _figure(f"dp{ranks}_fsdp_bytes", _sent([e for e, _ in found], "dp"), theory, "2 (N-1)/N of the cut leaves")


def _gradient(mesh: Mesh, arch: Arch) -> list[Entry]:
    book = Ledger()
    layout = table(mesh.sequence_parallel)
    params = shard(init(arch, 0, layout, SINGLE), layout, mesh)
    value_and_grad(lm_loss(arch))(params, _batch(ROWS, mesh.share), book.watch(mesh))
    return book.entries


def _tensor(ranks: int, sequence_parallel: bool) -> Figure:
    """Four all-reduces of an activation a block and pass (arXiv 1909.08053, section 3); SP the same bytes (2205.05198).

    What embedding, head and loss move is in models of 4 and of 8 blocks alike, and so in neither's difference.
    """

    def moved(layers: int) -> int:
        arch = _arch(layers)
        found = fake.run(lambda mesh: _gradient(mesh, arch), tp=ranks, sequence_parallel=sequence_parallel)
        return _sent(found, "tp")

    activation = 4 * ROWS * LENGTH * WIDTH
    theory = 4 * 2 * (ranks - 1) / ranks * activation
    title = f"tp{ranks}_{'sp_' if sequence_parallel else ''}bytes_a_block"
    return _figure(title, (moved(8) - moved(4)) / 4, theory, "four all-reduces of an activation")


def _experts(ranks: int) -> Iterator[Figure]:
    """Two exchanges a layer forward and two backward, each of the tokens whose chosen expert is on another rank."""
    arch = _arch(4, EXPERTS)

    def run(mesh: Mesh) -> tuple[list[Entry], int]:
        layout = table(False)
        params = shard(init(arch, 0, layout, SINGLE), layout, mesh)
        experts = hidden(params, _batch(ROWS, mesh.share), arch, mesh)[1]["experts"]
        home = experts.div(EXPERTS.experts // ranks, rounding_mode="floor")
        return _gradient(mesh, arch), int((home != mesh.ep.index).sum())

    found = fake.run(run, ep=ranks)
    exchanges = [[e for e in entries if e.op == "all_to_all" and e.dtype == "float32"] for entries, _ in found]
    calls = max(map(len, exchanges)) / arch.layers
    yield Figure(f"ep{ranks}_exchanges_a_layer", calls, "== 4", "two forward and two backward")
    moved = sum(entry.sent for entries in exchanges for entry in entries)
    theory = 4 * sum(leaving for _, leaving in found) * 4 * WIDTH
    yield _figure(f"ep{ranks}_bytes", moved, theory, "four times the tokens that leave their rank")


def _figure(name: str, moved: float, theory: float, what: str) -> Figure:
    return Figure(name, abs(moved / theory - 1), "<= 0.01", f"{moved:,.0f} bytes, theory {theory:,.0f}: {what}")
