"""Law 1 for what is shared out: reduction, clipping, ZeRO-1, FSDP and Muon's whole matrices, on leaves of any shape.

In the first test the gradients are given, so that a step is checked against plain sums on one process: rank (dp d,
ep e) saw the tokens whose gradients are ``gradients(step)[d, e]``.
"""

from __future__ import annotations

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from ironfn import tree
from ironfn.algo.step import State, make_step
from ironfn.grad.remat import recompute
from ironfn.grad.value_and_grad import ValueAndGrad, accumulate, value_and_grad
from ironfn.layout.fsdp import fetch, shard_table
from ironfn.layout.table import WHOLE_TABLE, Placement, Table, by_path, cut, shard, shard_leaf, unshard
from ironfn.layout.zero import share_updates
from ironfn.loss.lm import lm_loss
from ironfn.mesh import fake
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.model import init, tables
from ironfn.model.arch import Arch
from ironfn.model.forward import Forward, keep
from ironfn.optim.adamw import adamw
from ironfn.optim.combine import master_weights, partition
from ironfn.optim.muon import jordan, muon
from ironfn.optim.newton_schulz import operations
from ironfn.optim.optimizer import Optimizer
from ironfn.optim.presets import make_optimizer, whole_work
from ironfn.optim.zero1 import zero1
from ironfn.spec.records import AdamWSpec, MoeSpec, OptimSpec
from ironfn.types import Batch, Flat, LossSum, Params
from property_tests.strategies import archs, batch_of, params_of

KINDS = ("whole", "columns", "rows", "stack", "between", "matrix", "vector")


@frozen
class Case:
    """One drawn tree of leaves, its layout, and how it is trained."""

    dp: int
    tp: int
    ep: int
    shapes: dict[str, tuple[int, ...]]
    table: dict[str, Placement]
    optimizer: str
    fsdp: bool
    zero: bool
    half: bool
    bucket_bytes: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dp, tp, ep = draw(st.integers(1, 4), "dp"), draw(st.integers(1, 2), "tp"), draw(st.integers(1, 2), "ep")
    size = st.integers(1, 6)
    shapes, table = dict[str, tuple[int, ...]](), dict[str, Placement]()
    for i, kind in enumerate(draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=7), "leaves")):
        path, a, b = f"{kind}/{i}", draw(size), draw(size)
        shapes[path], table[path] = {
            "whole": ((a, b, 2), Placement()),
            "columns": ((a, b * tp), cut("tp", 1)),
            "rows": ((a * tp, b), cut("tp", 0)),
            "stack": ((2 * a, b, 2 * tp), Placement((("ep", 0), ("tp", 2)))),
            "between": ((a,), Placement(partial=("tp",))),
            "matrix": ((a, b), Placement()),
            "vector": ((a * b,), Placement()),
        }[kind]
    return Case(
        dp, tp, ep, shapes, table,
        optimizer=draw(st.sampled_from(["adamw", "muon", "both"]), "optimizer"),
        fsdp=draw(st.booleans(), "fsdp"), zero=draw(st.booleans(), "zero"), half=draw(st.booleans(), "half"),
        bucket_bytes=draw(st.sampled_from([1, 40, 160, 1 << 20]), "bucket bytes"),
    )  # fmt: skip


def is_muon(path: str, name: str) -> bool:
    return name != "adamw" and path.split("/")[0] in ("columns", "rows", "stack", "matrix")


def optimizer_of(case: Case, layout: Table, mesh: Mesh) -> Optimizer:
    groups = {"muon": muon(0.9, scale=jordan, layout=layout, mesh=mesh), "adamw": adamw(eps=1e-4)}
    groups["other"] = adamw(beta1=0.5, eps=1e-4)

    def label(path: str) -> str:
        return "muon" if is_muon(path, case.optimizer) else "other" if case.optimizer == "both" else "adamw"

    plain = partition(groups, label)
    return master_weights(plain) if case.half else plain


def gradients(case: Case, step: int) -> dict[tuple[int, int], Flat]:
    """Return the gradients of whole leaves by (dp, ep)."""
    g = torch.Generator().manual_seed(step)
    return {
        (d, e): {p: torch.randn(s, generator=g, dtype=torch.float64) for p, s in case.shapes.items()}
        for d in range(case.dp)
        for e in range(case.ep)
    }


def given_gradients(case: Case, table: Table) -> ValueAndGrad:
    """Return a `value_and_grad` that finds, as a backward pass would, this rank's part of the gradients."""

    def run(params: Params, batch: Batch, mesh: Mesh, fixed: Params | None = None) -> tuple[LossSum, Params]:
        parts, found = gradients(case, int(batch["step"])), dict[str, torch.Tensor]()
        places = by_path(table, case.shapes)
        for path, place in places.items():
            ds = range(case.dp) if place.dim("dp") is not None else [mesh.dp.index]
            es = range(case.ep) if place.dim("ep") is not None else [mesh.ep.index]
            whole = sum(parts[d, e][path] for d in ds for e in es)
            if place.partial and mesh.tp.size > 1:
                whole = whole * (0.25 if mesh.tp.index == 0 else 0.75)
            found[path] = shard_leaf(whole, place, mesh).to(tree.flatten(params)[path].dtype)
        one = torch.ones((), dtype=torch.float64)
        return LossSum(one, one), tree.unflatten(found)

    return run


def train(case: Case, params: Params, mesh: Mesh, steps: int = 3) -> tuple[Params, list[float], Params]:
    table: Table = shard_table(case.table, case.shapes, mesh) if case.fsdp else case.table
    work = {p: float(operations(s[-2], s[-1])) for p, s in case.shapes.items() if is_muon(p, case.optimizer)}
    updates = share_updates(table, case.shapes, mesh, work) if case.zero else None
    optimizer = optimizer_of(case, table if updates is None else updates, mesh)
    if updates is not None:
        optimizer = zero1(optimizer, table, updates, mesh, case.bucket_bytes)
    step = make_step(
        given_gradients(case, table), optimizer, lambda s: 0.1 / (s + 1),
        table=table, mesh=mesh, updates=updates, clip=1.0, bucket_bytes=case.bucket_bytes, donate=True,
    )  # fmt: skip
    mine = shard(tree.clone(params), table, mesh)
    state, norms = State(0, mine, optimizer.init(mine)), []
    for i in range(steps):
        state, metrics = step(state, {"step": torch.tensor(i)})
        norms.append(metrics["grad_norm"])
    return unshard(state.params, table, mesh), norms, state.opt


@settings(max_examples=80, deadline=None)
@given(case=cases())
def test_what_is_shared_out_moves_as_on_one_process(case: Case) -> None:
    """Three clipped steps: parameters and norms, rel. 1e-9 in float64, whatever the buckets and whoever owns what."""
    case = evolve(case, half=False)
    g = torch.Generator().manual_seed(7)
    params = tree.unflatten({p: torch.randn(s, generator=g, dtype=torch.float64) for p, s in case.shapes.items()})
    alone = evolve(case, dp=1, ep=1, tp=1, fsdp=False, zero=False)
    expected, norms, _ = train_on_sums(case, alone, params)
    for found, seen, _ in fake.run(lambda mesh: train(case, params, mesh), dp=case.dp, tp=case.tp, ep=case.ep):
        assert seen == pytest.approx(norms, rel=1e-9)
        for path, leaf in tree.flatten(expected).items():
            torch.testing.assert_close(tree.flatten(found)[path], leaf, rtol=1e-9, atol=1e-11, msg=path)


def train_on_sums(case: Case, alone: Case, params: Params) -> tuple[Params, list[float], Params]:
    """Train on one process with the sums of all ranks' gradients, over the weight of all of them."""
    optimizer, ranks = optimizer_of(alone, WHOLE_TABLE, SINGLE), case.dp * case.ep
    params, norms = tree.clone(params), list[float]()
    state = optimizer.init(params)
    for i in range(3):
        parts = gradients(case, i).values()
        mean = {path: sum(part[path] for part in parts) / ranks for path in case.shapes}
        norm = float(sum(x.square().sum() for x in mean.values())) ** 0.5
        norms.append(norm)
        grads = tree.unflatten({path: x * min(1.0, 1.0 / norm) for path, x in mean.items()})
        params, state = optimizer.update(grads, state, params, 0.1 / (i + 1))
    return params, norms, state


def model_steps(
    arch: Arch, params: Params, batch: Batch, mesh: Mesh, how: Forward, spec: OptimSpec, zero: bool
) -> tuple[Params, list[dict[str, float]]]:
    """Take two steps of a model whose parameters are shared out over dp."""
    table = shard_table(tables.table(mesh.sequence_parallel), init.shapes(arch), mesh)
    updates = share_updates(table, init.shapes(arch), mesh, whole_work(spec, init.shapes(arch))) if zero else None
    optimizer = make_optimizer(spec, params, table=table, mesh=mesh, updates=updates)
    vg = accumulate(value_and_grad(lm_loss(arch, evolve(how, fetch=fetch(table, mesh)), chunk=5)), 1)
    step = make_step(vg, optimizer, lambda s: 0.01 * (s + 1), table=table, mesh=mesh, updates=updates, clip=0.5)
    mine = shard(tree.clone(params), table, mesh)
    state, metrics = State(0, mine, optimizer.init(mine)), list[dict[str, float]]()
    rows = {name: value.tensor_split(mesh.shares)[mesh.share] for name, value in batch.items()}
    for _ in range(2):
        state, seen = step(state, rows)
        metrics.append(seen)
    return unshard(state.params, table, mesh), metrics


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_model_whose_parameters_are_shared_out_takes_the_same_steps(data: st.DataObject) -> None:
    """FSDP with and without ZeRO-1, under tp, sp, ep, remat, tied heads, AdamW and Muon: rel. 1e-9 in float64."""
    dp, tp, ep = data.draw(st.sampled_from([(2, 1, 1), (2, 2, 1), (3, 1, 1), (2, 1, 2)]), "mesh")
    moe = MoeSpec(experts=4, shared=data.draw(st.integers(0, 1), "shared")) if ep > 1 else MoeSpec()
    arch = data.draw(archs(tp, moe), "arch")
    spec = OptimSpec(data.draw(st.sampled_from(["adamw", "muon"]), "optimizer"), adamw=AdamWSpec(eps=1e-4))
    how = Forward(run=data.draw(st.sampled_from([keep, recompute]), "remat"))
    zero, sequence_parallel = data.draw(st.booleans(), "zero"), tp > 1 and data.draw(st.booleans(), "sp")
    params, batch = params_of(arch), batch_of(arch, dp * ep, 8, data.draw(st.integers(0, 9)), documents=True)
    expected, metrics = model_steps(arch, params, batch, SINGLE, Forward(), spec, False)
    for found, seen in fake.run(
        lambda mesh: model_steps(arch, params, batch, mesh, how, spec, zero),
        dp=dp, tp=tp, ep=ep, sequence_parallel=sequence_parallel,
    ):  # fmt: skip
        for mine, theirs in zip(seen, metrics, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-11)
        for path, leaf in tree.flatten(expected).items():
            torch.testing.assert_close(tree.flatten(found)[path], leaf, rtol=1e-9, atol=1e-11, msg=path)
