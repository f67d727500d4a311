"""One example of the mesh law: what is trained, how, and on which mesh. Its repr is the counter-example one reads."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from attrs import field, frozen
from hypothesis import strategies as st

from ironfn import rng, tree
from ironfn.algo.experts import router_bias, watch_experts
from ironfn.algo.step import State, make_step, unmoved
from ironfn.grad.remat import recompute
from ironfn.grad.value_and_grad import accumulate, value_and_grad
from ironfn.layout.fsdp import fetch, shard_table
from ironfn.layout.table import by_path, shard, unshard
from ironfn.layout.zero import share_updates
from ironfn.loss.lm import lm_loss
from ironfn.loss.pairs import pair_loss
from ironfn.loss.preference import dpo
from ironfn.mesh import fake
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.mesh.pairs import reduce
from ironfn.model.adapters import adapter_shapes, adapting, first_adapter
from ironfn.model.arch import Arch, complete
from ironfn.model.attention import Dropout
from ironfn.model.forward import Forward, here, keep, unadapted
from ironfn.model.init import shapes
from ironfn.model.tables import table
from ironfn.model.transformer import hidden
from ironfn.model.virtual import with_virtual
from ironfn.optim.presets import make_optimizer, whole_work
from ironfn.spec.adapter_records import AdapterSpec
from ironfn.spec.records import AdamWSpec, ModelSpec, MoeSpec, OptimSpec
from ironfn.types import Batch, Loss, LossSum, Params
from property_tests.pairs import pair_rows, random_pairs
from property_tests.strategies import batch_of, families, params_of

STEPS = 2
LENGTH = 12  # which 2, 3 and 4 ranks can share


@frozen(repr=False)
class Scenario:
    """Fix a run of two steps. The defaults are the plainest; the repr shows what differs from them.

    bucket: bytes reduced together. idle: a row with nothing to learn.
    """

    dp: int = 1
    tp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    zero1: bool = False
    fsdp: bool = False
    model: ModelSpec = field(factory=ModelSpec)
    vocab: int = 11
    optimizer: str = "adamw"
    objective: str = "lm"
    adapter: AdapterSpec = field(factory=AdapterSpec)
    rows: int = 1
    micro: int = 99
    remat: bool = False
    dropout: bool = False
    documents: bool = False
    bucket: int = 25 << 20
    donate: bool = True
    idle: int | None = None
    seed: int = 0

    def __repr__(self) -> str:
        return brief(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # else hypothesis writes every field out

    @property
    def sizes(self) -> dict[str, Any]:
        """Return the mesh's shape, as `fake.run` takes it."""
        return {"dp": self.dp, "tp": self.tp, "ep": self.ep, "sequence_parallel": self.sequence_parallel}

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.ep


def brief(record: Any) -> str:
    """Write a record as the call that makes it, without the fields that have their defaults."""
    parts: list[str] = []
    for each in attrs.fields(type(record)):
        value = getattr(record, each.name)
        default = each.default.factory() if isinstance(each.default, attrs.Factory) else each.default  # type: ignore[arg-type]
        if value != default:
            parts.append(f"{each.name}={brief(value) if attrs.has(type(value)) else repr(value)}")
    return f"{type(record).__name__}({', '.join(parts)})"


def squared_states(arch: Arch, how: Forward) -> Loss:
    """Return an objective of somebody's own: the weighted sum of the last hidden states' squares."""

    def loss(params: Params, batch: Batch, mesh: Mesh) -> LossSum:
        x, seen = hidden(params, batch, arch, mesh, how)
        weight = batch["weight"]
        if mesh.sequence_parallel:
            share = weight.chunk(mesh.tp.size, 1)[mesh.tp.index]
            total = reduce((x.square().mean(-1) * share).sum(), mesh.tp)
        else:
            total = (x.square().mean(-1) * weight).sum()
        counts = {name: seen[name].sum(0) for name in ("load", "dropped") if name in seen}
        return LossSum(total, weight.sum(), {"doubled": 2 * total}, counts)

    return loss


def adapter_of(spec: AdapterSpec, arch: Arch, base: Params) -> Params:
    """Return an adapter in float64 that changes the model, and DoRA's lengths by a little."""
    first = first_adapter(spec, arch, base, 0, table(False), dtype=torch.float64)
    return tree.map_path(lambda path, x: x + rng.normal(x.shape, 0.1, path, dtype=x.dtype), first)


def objective(name: str, arch: Arch, how: Forward) -> Loss:
    return {
        "lm": lambda: lm_loss(arch, how, chunk=5),
        "squares": lambda: squared_states(arch, how),
        "pairs": lambda: pair_loss(arch, dpo(0.5), how=how, chunk=3),
    }[name]()


def outcome(scenario: Scenario, mesh: Mesh) -> tuple[Params, list[dict[str, float]]]:
    """Take this rank's part in two steps; return the whole parameters after them and each step's metrics."""
    arch = complete(scenario.model, scenario.vocab)
    sizes = trained = shapes(arch)
    if scenario.adapter.kind != "none":
        trained = adapter_shapes(scenario.adapter, arch)
        sizes = sizes | trained
    params, fixed, moe = params_of(arch), router_bias(arch), arch.moe
    layout = by_path(table(mesh.sequence_parallel), [*sizes, *tree.flatten(fixed)])
    if scenario.fsdp and mesh.dp.size > 1:
        layout |= shard_table(layout, sizes, mesh)
    # Some gradients are 0 but for rounding (a key's bias without positions: softmax does not see it). AdamW divides
    # them by their own size: with its usual eps of 1e-8 it would turn a difference of 1e-19 into one of 1e-11.
    spec = OptimSpec(name=scenario.optimizer, adamw=AdamWSpec(eps=1e-4))
    updates = share_updates(layout, trained, mesh, whole_work(spec, trained)) if scenario.zero1 else None
    if scenario.adapter.kind != "none":
        params, fixed = adapter_of(scenario.adapter, arch, params), tree.merge(params, fixed)
    opt = make_optimizer(spec, params, table=layout, mesh=mesh, updates=updates, bucket_bytes=scenario.bucket)
    how = Forward(
        run=recompute if scenario.remat else keep,
        dropout=Dropout(0.3, 7) if scenario.dropout else None,
        fetch=fetch(layout, mesh) if scenario.fsdp else here,
        jitter=5,
        adapt=unadapted if scenario.adapter.kind == "none" else adapting(scenario.adapter, mesh, seed=3),
    )
    vg = accumulate(value_and_grad(objective(scenario.objective, arch, how)), scenario.micro)
    step = make_step(
        vg,
        opt,
        lambda s: 0.01 * (s + 1),
        table=layout,
        mesh=mesh,
        updates=updates,
        carry=unmoved if moe is None else watch_experts(arch),
        clip=0.5,
        donate=scenario.donate,
        bucket_bytes=scenario.bucket,
    )
    mine, fixed = (shard(tree.clone(leaves), layout, mesh) for leaves in (params, fixed))
    state, seen = State(0, mine, opt.init(mine), extra={"fixed": fixed} if fixed else {}), []
    if scenario.objective == "pairs":
        texts = random_pairs(arch, scenario.rows, LENGTH, scenario.seed)
        batch = pair_rows(texts, LENGTH, once=True, reference=0.3)
    else:
        batch = batch_of(arch, scenario.rows, LENGTH, scenario.seed, scenario.documents)
    if scenario.adapter.kind in ("prompt", "prefix"):
        batch = with_virtual(batch, scenario.adapter.tokens, LENGTH)
    if scenario.idle is not None and scenario.idle < scenario.rows:
        batch["weight"][scenario.idle] = 0.0
    for _ in range(STEPS):
        state, metrics = step(state, rows_of(batch, mesh))
        seen.append(metrics)
    return unshard(state.params, layout, mesh), seen


def holds(scenario: Scenario) -> None:
    """Hold every rank of a fake mesh to the single process."""
    alone = outcome(scenario, SINGLE)
    for found in fake.run(lambda mesh: outcome(scenario, mesh), **scenario.sizes):
        compare(found, alone)


def rows_of(batch: Batch, mesh: Mesh) -> Batch:
    """Return the rows of this rank; some ranks may have one more than others, or none."""
    return {name: value.tensor_split(mesh.shares)[mesh.share] for name, value in batch.items()}


def compare(found: tuple[Params, list[dict[str, float]]], expected: tuple[Params, list[dict[str, float]]]) -> None:
    """Hold a rank's outcome to another's: every leaf and every metric, rel. 1e-9 in float64."""
    theirs = tree.flatten(expected[0])
    for path, leaf in tree.flatten(found[0]).items():
        torch.testing.assert_close(leaf, theirs[path], rtol=1e-9, atol=1e-11, msg=lambda m, p=path: f"{p}: {m}")
    for mine, other in zip(found[1], expected[1], strict=True):
        assert mine == pytest.approx(other, rel=1e-9, abs=1e-11)


@st.composite
def scenarios(draw: st.DrawFn, ranks: int | None = None, largest: int = 4) -> Scenario:
    """Draw a scenario on a mesh of ``ranks`` ranks, or of 2 to ``largest``."""
    shapes = [
        (dp, tp, ep)
        for dp in range(1, largest + 1) for tp in range(1, largest + 1) for ep in range(1, largest + 1)
        if (dp * tp * ep == ranks if ranks else 1 < dp * tp * ep <= largest)
    ]  # fmt: skip
    dp, tp, ep = draw(st.sampled_from(sorted(shapes, key=lambda s: (s[0] * s[1] * s[2], s[2], s[1]))))
    moe = draw(mixtures(tp, ep)) if ep > 1 or draw(st.booleans()) else MoeSpec()
    shared_out = draw(st.sampled_from(["no", "zero1", "fsdp"])) if dp > 1 else "no"
    micro = draw(st.sampled_from([99, 1])) if moe.balance != "batch" else 99
    # where ranks with other rows work together on a micro-batch, all need as many; elsewhere one may have none
    even = micro == 1 and (ep > 1 or shared_out == "fsdp")
    rows = dp * ep * draw(st.integers(1, 2)) if even else draw(st.integers(1, 2 * dp * ep))
    objective = draw(st.sampled_from(["lm", "squares", "pairs"]))
    return Scenario(
        dp=dp,
        tp=tp,
        ep=ep,
        sequence_parallel=tp > 1 and draw(st.booleans()),
        zero1=shared_out == "zero1",
        fsdp=shared_out == "fsdp",
        model=draw(families(tp, moe)),
        vocab=draw(st.integers(11, 17)),
        optimizer=draw(st.sampled_from(["adamw", "muon"])),
        objective=objective,
        rows=rows,
        micro=micro,
        remat=draw(st.booleans()),
        dropout=objective != "pairs" and draw(st.booleans()),
        documents=draw(st.booleans()),
        bucket=draw(st.sampled_from([25 << 20, 64])),
        seed=draw(st.integers(0, 99)),
        adapter=draw(adapters(moe, virtual=objective != "pairs")) if draw(st.booleans()) else AdapterSpec(),
    )


@st.composite
def adapters(draw: st.DrawFn, moe: MoeSpec, virtual: bool = True) -> AdapterSpec:
    """Draw what is trained beside a frozen model."""
    plain, rest = ["all-linear", "attn/w[qv]", "attn/wo"], ["embed/tokens", "head/w"]
    rest += ["mlp/experts"] if moe.experts else []
    kind = draw(st.sampled_from(["any", "dropout", "dora", *(["prompt", "prefix"] if virtual else [])]))
    if kind in ("prompt", "prefix"):
        return AdapterSpec(kind=kind, tokens=draw(st.integers(1, 3)))
    patterns = plain if kind == "dropout" else [*plain, "head/w"] if kind == "dora" else [*plain, *rest]
    return AdapterSpec(
        kind="lora",
        rank=draw(st.integers(1, 3)),
        alpha=2.0,
        dropout=0.3 if kind == "dropout" else 0.0,
        rslora=draw(st.booleans()),
        dora=kind == "dora",
        targets=draw(st.lists(st.sampled_from(patterns), min_size=1, max_size=3, unique=True)),
    )


@st.composite
def mixtures(draw: st.DrawFn, tp: int, ep: int) -> MoeSpec:
    """Draw a mixture whose experts ``ep`` ranks can share."""
    experts, shared = ep * draw(st.integers(1, 3)), draw(st.integers(0, 1))
    top_k = draw(st.integers(1, min(experts, 3)))
    groups = draw(st.sampled_from([n for n in (1, 2, 3) if experts % n == 0]))
    dense_layers = draw(st.integers(0, 1))
    return MoeSpec(
        experts=experts,
        top_k=top_k,
        ffn=tp * draw(st.integers(1, 3)),
        shared=shared,
        shared_ffn=tp * 2 if shared and draw(st.booleans()) else None,
        shared_gate=shared > 0 and draw(st.booleans()),
        dense_layers=dense_layers,
        every=draw(st.integers(1, 2 - dense_layers)),
        groups=groups,
        group_top_k=draw(st.integers(-(-top_k * groups // experts), groups)),
        score=draw(st.sampled_from(["softmax", "softmax_chosen", "sigmoid"])),
        renormalize=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
        balance=draw(st.sampled_from(["sequence", "batch", "none"])),
        balance_weight=0.1,
        bias_rate=draw(st.sampled_from([0.0, 0.05])),
        z_weight=draw(st.sampled_from([0.0, 0.1])),
        jitter=draw(st.sampled_from([0.0, 0.1])),
        capacity=draw(st.sampled_from([None, 1.0])),
    )
