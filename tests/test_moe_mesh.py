"""Mixtures of experts obey the laws of the mesh and of the split, in float64: rel. 1e-9."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ironfn import tree
from ironfn.grad.remat import recompute
from ironfn.grad.value_and_grad import value_and_grad
from ironfn.layout.reduce import reduce_grads
from ironfn.layout.table import shard, unshard
from ironfn.loss.lm import lm_loss
from ironfn.mesh import fake
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.model.attention import Dropout
from ironfn.model.forward import Forward
from ironfn.model.tables import table
from ironfn.model.transformer import hidden
from ironfn.types import Params
from property_tests.strategies import batch_of, params_of
from tests import gloo
from tests.experts import arch_of, rows_of, same, steps

PAGE = Path(__file__).parents[1] / "docs/moe.md"
MESHES: dict[str, dict[str, Any]] = {
    "ep2": {"ep": 2},
    "ep4": {"ep": 4},
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "tp2 sp": {"tp": 2, "sequence_parallel": True},
    "ep2 tp2 sp": {"ep": 2, "tp": 2, "sequence_parallel": True},
    "dp2 ep2 tp2": {"dp": 2, "ep": 2, "tp": 2},
}
MIXTURES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "batch balance": {"balance": "batch", "shared": 1},
    "sigmoid bias": {"score": "sigmoid", "bias_rate": 0.05, "balance": "none", "scale": 2.5, "shared": 2},
    "capacity": {"capacity": 0.9, "dense_layers": 1, "score": "softmax_chosen", "top_k": 3},
    "jitter": {"jitter": 0.3, "top_k": 1, "renormalize": False},
    "no gate": {"top_k": 4, "model": {"mlp": "gelu"}},
}


CASES = [(mesh, mixture) for mesh in ("ep2", "tp2 sp", "dp2 ep2 tp2") for mixture in MIXTURES]
CASES += [(mesh, "softmax") for mesh in MESHES if (mesh, "softmax") not in CASES]


@pytest.mark.parametrize(("mesh", "mixture"), CASES)
def test_a_step_is_the_same_on_every_mesh(mesh: str, mixture: str) -> None:
    """Packed documents, padding, dropout and remat; micro-batches, but for a balance that cannot have them."""
    arch = arch_of(**MIXTURES[mixture])
    params, batch = params_of(arch), batch_of(arch, 4, 8, 3, documents=True)
    how = Forward(jitter=5, dropout=Dropout(0.2, 1))
    alone, expected = steps(arch, params, batch, SINGLE, how)
    micro = None if mixture == "batch balance" else 1
    there = Forward(jitter=5, dropout=Dropout(0.2, 1), run=recompute)
    for state, metrics in fake.run(lambda m: steps(arch, params, batch, m, there, micro=micro), **MESHES[mesh]):
        same(state.params, alone.params)
        same(state.extra, alone.extra)
        for mine, theirs in zip(metrics, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-11)


@pytest.mark.parametrize("mesh", ["ep2", "dp2 ep2"])
def test_a_step_is_the_same_between_processes(mesh: str) -> None:
    """Tokens travel to their experts over gloo: biases, capacity, shared experts, remat, and a rank without a row."""
    arch = arch_of(score="sigmoid", bias_rate=0.05, capacity=0.9, shared=1)
    params, batch = params_of(arch), batch_of(arch, 3, 8, 3, documents=True)
    alone, expected = steps(arch, params, batch, SINGLE, Forward(jitter=5))

    def rank(m: Mesh) -> Any:
        state, metrics = steps(arch, params, batch, m, Forward(jitter=5, run=recompute))
        return state.params, state.extra, metrics

    ranks, ep = (2, 2) if mesh == "ep2" else (4, 2)
    for found, extra, metrics in gloo.world(ranks, rank, ep=ep):
        same(found, alone.params)
        same(extra, alone.extra)
        for mine, theirs in zip(metrics, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-11)


def test_the_page_runs_as_it_stands() -> None:
    """docs/moe.md: routing is read, handed back, and gives the same bits."""
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    arch = arch_of(capacity=1.0)
    batch = batch_of(arch, 2, 8, 3, documents=True)
    names: dict[str, Any] = {"params": params_of(arch), "batch": batch, "arch": arch, "mesh": SINGLE}
    names |= {"hidden": hidden, "again": []}
    lines = block.splitlines()
    assert lines[-1].startswith("hidden("), "the last line is the one whose value the page speaks of"
    exec("\n".join([*lines[:-1], f"again = {lines[-1]}"]), names)
    assert names["seen"]["experts"].shape == (2, 8, 2, 2)
    assert names["again"][0].equal(names["x"])
    assert names["again"][1]["experts"].equal(names["seen"]["experts"])


@pytest.mark.parametrize("mixture", sorted(set(MIXTURES) - {"batch balance"}))
@pytest.mark.parametrize("micro", [1, 2, 3])
def test_no_split_of_a_batch_changes_a_step(mixture: str, micro: int) -> None:
    arch = arch_of(**MIXTURES[mixture])
    params, batch = params_of(arch), batch_of(arch, 5, 8, 3, documents=True)
    batch["weight"][1] = 0.0
    whole, expected = steps(arch, params, batch, SINGLE, Forward(jitter=5))
    parts, metrics = steps(arch, params, batch, SINGLE, Forward(jitter=5), micro=micro)
    same(parts.params, whole.params)
    same(parts.extra, whole.extra)
    for mine, theirs in zip(metrics, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-11)


@pytest.mark.parametrize("mesh", ["ep2", "ep4", "dp2 ep2 tp2"])
def test_gradients_of_experts_do_not_grow_with_the_ranks(mesh: str) -> None:
    """EP 2 = EP 1 for every leaf by itself, before any optimizer could hide a factor."""
    arch = arch_of(shared=1)
    params, batch = params_of(arch), batch_of(arch, 4, 8, 7, documents=False)
    _, expected = value_and_grad(lm_loss(arch))(params, batch, SINGLE)

    def rank(m: Mesh) -> Params:
        layout = table(m.sequence_parallel)
        _, grads = value_and_grad(lm_loss(arch))(shard(tree.clone(params), layout, m), rows_of(batch, m), m)
        return unshard(reduce_grads(grads, layout, m), layout, m)

    for grads in fake.run(rank, **MESHES[mesh]):
        same(grads, expected)


@pytest.mark.parametrize("mesh", ["ep2", "ep4", "tp2 sp", "ep2 tp2 sp"])
def test_an_idle_expert_and_a_rank_whose_experts_nobody_chose(mesh: str) -> None:
    """Every token takes experts 0 and 1: with ep 2 the second rank's experts, with ep 4 the last two ranks', idle."""
    arch = arch_of(balance="batch")
    params = params_of(arch)
    batch = batch_of(arch, 4, 8, 3, documents=True)
    batch["experts"] = torch.tensor([0, 1]).expand(4, 8, 2, 2).contiguous()
    alone, expected = steps(arch, params, batch, SINGLE, Forward())
    assert expected[0]["load/1/3"] == expected[0]["load_min"] == 0.0
    assert expected[0]["load/0/0"] == expected[0]["load_max"] == 2.0
    for state, metrics in fake.run(lambda m: steps(arch, params, batch, m, Forward()), **MESHES[mesh]):
        same(state.params, alone.params)
        assert metrics[1] == pytest.approx(expected[1], rel=1e-9, abs=1e-11)


@pytest.mark.parametrize("mesh", ["ep2", "ep4", "dp2", "dp2 ep2 tp2"])
def test_a_rank_without_rows_makes_the_same_exchanges(mesh: str) -> None:
    arch = arch_of(balance="batch", capacity=1.0)
    params, batch = params_of(arch), batch_of(arch, 1, 8, 3, documents=True)
    alone, expected = steps(arch, params, batch, SINGLE, Forward(run=recompute))
    for state, metrics in fake.run(lambda m: steps(arch, params, batch, m, Forward(run=recompute)), **MESHES[mesh]):
        same(state.params, alone.params)
        assert metrics[1] == pytest.approx(expected[1], rel=1e-9, abs=1e-11)
