"""Routing in closed form: weights, ties, capacity, padding, balance, z-loss, bias, jitter, and routing that is told."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ironfn import tree
from ironfn.algo.experts import router_bias, watch_experts
from ironfn.grad.value_and_grad import value_and_grad
from ironfn.layout.table import shard
from ironfn.loss.experts import _of_sequences
from ironfn.loss.lm import lm_loss
from ironfn.mesh import fake
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.model.arch import Arch
from ironfn.model.forward import Forward
from ironfn.model.routing import Routing, route
from ironfn.model.tables import table
from ironfn.model.transformer import hidden, logits
from ironfn.types import Batch, LossSum, Params
from property_tests.strategies import batch_of, params_of
from tests.experts import arch_of, rows_of, same


def routed(wanted: Tensor, how: Forward = Forward(), segment: Tensor | None = None, **moe: Any) -> Routing:  # noqa: B008
    """Route tokens whose logits are ``wanted`` [B, T, 4]: the router's matrix is the identity."""
    arch = arch_of(model={"width": 4, "heads": 1, "kv_heads": 1}, **moe)
    batch = {"tokens": torch.zeros(wanted.shape[:2], dtype=torch.long), "row": torch.arange(len(wanted))}
    batch |= {} if segment is None else {"segment": segment}
    return route(wanted, {"w": torch.eye(4, dtype=wanted.dtype)}, 0, arch, SINGLE, how, batch)


SOFTMAX, CHOSEN = [0.64391426, 0.23688282], [0.73105858, 0.26894142]  # of 2, 1, 0, -1, by hand
LOGITS = torch.tensor([[[2.0, 1.0, 0.0, -1.0]]])
SIGMOIDS = [1 / (1 + math.exp(-2)), 1 / (1 + math.exp(-1))]


@pytest.mark.parametrize(
    ("moe", "weights"),
    [
        ({"renormalize": False}, SOFTMAX),
        ({"renormalize": True}, CHOSEN),
        ({"score": "softmax_chosen"}, CHOSEN),
        ({"renormalize": True, "scale": 2.5}, [2.5 * w for w in CHOSEN]),
        ({"renormalize": False, "scale": 2.5}, [2.5 * w for w in SOFTMAX]),
        ({"score": "sigmoid", "renormalize": False}, SIGMOIDS),
        ({"score": "sigmoid"}, [s / sum(SIGMOIDS) for s in SIGMOIDS]),
    ],
    ids=str,
)
def test_weights_of_two_of_four(moe: dict[str, Any], weights: list[float]) -> None:
    found = routed(LOGITS, **moe)
    assert found.experts.tolist() == [[[0, 1]]]
    torch.testing.assert_close(found.weights, torch.tensor([[weights]]), rtol=0, atol=1e-6)


def test_of_equals_the_first_wins() -> None:
    assert routed(torch.zeros(1, 1, 4)).experts.tolist() == [[[0, 1]]]
    assert routed(torch.tensor([[[0.0, 1.0, 1.0, 1.0]]])).experts.tolist() == [[[1, 2]]]
    saturated = torch.tensor([[[90.0, 95.0, 200.0, 100.0]]])
    assert routed(saturated, score="sigmoid").experts.tolist() == [[[2, 3]]], "sigmoids are all 1, the logits are not"


def test_the_bias_chooses_and_does_not_weigh() -> None:
    arch = arch_of(model={"width": 4, "heads": 1, "kv_heads": 1}, score="sigmoid", renormalize=False)
    router: Params = {"w": torch.eye(4), "bias": torch.tensor([0.0, 0.0, 0.0, 1.0])}
    found = route(LOGITS, router, 0, arch, SINGLE, Forward(), {"tokens": torch.zeros(1, 1, dtype=torch.long)})
    assert found.experts.tolist() == [[[3, 0]]]
    torch.testing.assert_close(found.weights, torch.tensor([[[1 / (1 + math.e), SIGMOIDS[0]]]]))


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_uniform_routing_has_a_balance_of_one_for_every_top_k(top_k: int) -> None:
    """Each token in turn prefers another expert, by a hair: loads are equal, and scores are 1/4."""
    wanted = 1e-9 * torch.stack([torch.arange(4.0, dtype=torch.float64).roll(turn) for turn in range(4)])
    found = routed(wanted.repeat(3, 2, 1), top_k=top_k, renormalize=False)
    assert found.load.tolist() == [[2 * top_k] * 4] * 3
    assert balance_of(found, top_k) == pytest.approx([1.0] * 3, rel=1e-8)


def balance_of(found: Routing, top_k: int) -> list[float]:
    seen = {"load": found.load[:, None], "scores": found.scores[:, None]}
    moe = arch_of(top_k=top_k).moe
    assert moe is not None
    return _of_sequences(seen, moe).tolist()


def test_balance_when_all_choose_the_same() -> None:
    """Logits (ln 7, 0, 0, 0) for every token: expert 0 has all loads and 7/10 of the scores: 4 x 1 x 0.7 = 2.8."""
    wanted = torch.tensor([math.log(7.0), 0.0, 0.0, 0.0], dtype=torch.float64).expand(2, 5, 4)
    assert balance_of(routed(wanted, top_k=1, renormalize=False), 1) == pytest.approx([2.8, 2.8], rel=1e-12)


def test_the_z_of_a_row_is_the_mean_square_of_logsumexp_over_its_real_tokens() -> None:
    """Logits of 0: ln 4. Shifted by 1: ln 4 + 1. Padding counts nowhere, and a row of padding is 0 and not NaN."""
    wanted = torch.zeros(2, 3, 4, dtype=torch.float64)
    wanted[0, 1] += 1.0
    wanted[:, 2] = 77.0
    found = routed(wanted, segment=torch.tensor([[0, 0, -1], [-1, -1, -1]]))
    expected = (math.log(4) ** 2 + (math.log(4) + 1) ** 2) / 2
    assert found.z.tolist() == pytest.approx([expected, 0.0], rel=1e-12)
    assert found.load.sum(1).tolist() == [4, 0]
    assert found.experts[1].eq(-1).all()
    assert not found.kept[1].any()


def test_capacity_takes_the_first_choices_first_and_then_the_earlier_tokens() -> None:
    """Four tokens choose (0, 1), (0, 1), (1, 0), (0, 2); room for ceil(1.0 x 2 x 4 / 4) = 2 each.

    Expert 0: the first choices of tokens 0 and 1 fit; token 3's first and token 2's second do not. Expert 1: token 2's
    first choice, then token 0's second; token 1's second does not fit.
    """
    order = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3], [1, 0, 2, 3], [0, 2, 1, 3]])
    wanted = torch.zeros(1, 4, 4).scatter(2, order[None], torch.tensor([3.0, 2.0, 1.0, 0.0]).expand(1, 4, 4))
    kept = routed(wanted, capacity=1.0).kept
    assert kept.tolist() == [[[True, True], [True, False], [True, False], [False, True]]]
    padded = routed(torch.cat([wanted, wanted], 1), segment=torch.tensor([[0] * 4 + [-1] * 4]), capacity=1.0).kept
    assert padded[:, :4].equal(kept)
    assert not padded[:, 4:].any()


def test_a_dropped_token_keeps_its_residual() -> None:
    """Capacity 1 of a row of four tokens that all choose expert 2: the last three pass the block as they are."""
    arch = arch_of(top_k=1, renormalize=False, capacity=0.25 * 4 / 4, model={"layers": 1})
    params, batch = params_of(arch), batch_of(arch, 1, 4, 0, documents=False)
    batch["experts"] = torch.full((1, 4, 1, 1), 2)
    loss, grads = value_and_grad(lm_loss(arch))(params, batch, SINGLE)
    assert loss.counts["dropped"].tolist() == [3]
    assert all(leaf.isfinite().all() for leaf in tree.leaves(grads))
    silent = tree.map_path(lambda path, x: torch.zeros_like(x) if "experts/w_down" in path else x, params)
    with_experts, without = (hidden(p, batch, arch, SINGLE)[0] for p in (params, silent))
    assert torch.equal(with_experts[:, 1:], without[:, 1:])
    assert not torch.equal(with_experts[:, :1], without[:, :1])


def padded(batch: Batch, by: int) -> Batch:
    """Return the batch with ``by`` more positions of padding in every row."""
    fill = {"segment": -1, "weight": 0.0, "row": 0}
    longer = {}
    for name, value in batch.items():
        more = value.new_full((len(value), by), fill.get(name, 7))
        longer[name] = value if value.ndim == 1 else torch.cat([value, more], 1)
    return longer


@pytest.mark.parametrize("moe", [{}, {"balance": "batch"}, {"capacity": 0.7}], ids=str)
def test_padding_changes_nothing(moe: dict[str, Any]) -> None:
    arch = arch_of(jitter=0.2, **moe)
    params, batch = params_of(arch), batch_of(arch, 3, 8, 0, documents=True)
    vg = value_and_grad(lm_loss(arch, Forward(jitter=1)))
    short, grads = vg(params, batch, SINGLE)
    long, more = vg(params, padded(batch, 5), SINGLE)
    torch.testing.assert_close(long.total, short.total, rtol=1e-12, atol=0)
    assert long.counts["load"].equal(short.counts["load"])
    same(more, grads)


def test_rows_of_padding_or_without_weight_are_finite_and_weigh_nothing() -> None:
    arch = arch_of()
    params, batch = params_of(arch), batch_of(arch, 3, 8, 0, documents=True)
    batch["segment"][1], batch["weight"][1] = -1, 0.0
    batch["weight"][2] = 0.0
    vg = value_and_grad(lm_loss(arch))
    whole, grads = vg(params, batch, SINGLE)
    first, expected = vg(params, {name: value[:1] for name, value in batch.items()}, SINGLE)
    torch.testing.assert_close(whole.total, first.total, rtol=1e-12, atol=0)
    same(grads, expected)


def test_a_coefficient_above_zero_is_in_the_loss_and_its_gradient() -> None:
    params, batch = params_of(arch_of()), batch_of(arch_of(), 3, 8, 0, documents=True)

    def at(**moe: Any) -> tuple[LossSum, Params]:
        return value_and_grad(lm_loss(arch_of(**moe)))(params, batch, SINGLE)

    plain, _ = at(balance_weight=0.0, z_weight=0.0)
    assert plain.total == plain.metrics["cross_entropy"]
    for moe in ({"balance_weight": 0.5, "z_weight": 0.0}, {"balance_weight": 0.0, "z_weight": 0.5}):
        for kind in ("sequence", "batch"):
            loss, grads = at(balance=kind, **moe)
            name = "balance" if moe["balance_weight"] else "router_z"
            torch.testing.assert_close(loss.total, plain.total + 0.5 * loss.metrics[name], rtol=1e-12, atol=0)
            router = tree.flatten(grads)["blocks/0/mlp/router/w"]
            assert not torch.allclose(
                router, tree.flatten(at(balance_weight=0.0, z_weight=0.0)[1])["blocks/0/mlp/router/w"]
            )
    evaluated = lm_loss(arch_of(balance_weight=0.5, z_weight=0.5), penalties=False)(params, batch, SINGLE)
    assert evaluated.total == plain.total
    assert (evaluated.metrics, evaluated.counts) == ({}, {})


def test_the_bias_moves_against_the_loads_and_the_metrics_tell_them() -> None:
    arch = arch_of(bias_rate=0.25, balance="none", dense_layers=1)
    counts = {"load": torch.tensor([[6, 4, 4, 2]]), "dropped": torch.tensor([4])}
    extra, metrics = watch_experts(arch)({"fixed": router_bias(arch), "other": torch.ones(1)}, counts)
    assert tree.flatten(extra)["fixed/blocks/1/mlp/router/bias"].tolist() == [-0.25, 0.0, 0.0, 0.25]
    assert set(tree.flatten(extra)) == {"fixed/blocks/1/mlp/router/bias", "other"}
    loads = {"load/1/0": 1.5, "load/1/1": 1.0, "load/1/2": 1.0, "load/1/3": 0.5}
    assert metrics == {"load_max": 1.5, "load_min": 0.5, "dropped": 0.25, **loads}
    assert router_bias(arch_of()) == {}


def test_the_bias_evens_out_a_router_that_sends_all_to_one() -> None:
    """Logits of one expert stand 0.4 above the others' for every token; after enough steps the loads are near even."""
    arch = arch_of(score="sigmoid", bias_rate=0.01, balance="none", top_k=1, renormalize=False, model={"layers": 1})
    g = torch.Generator().manual_seed(0)
    wanted = torch.randn(4, 64, 16, generator=g)
    router: Params = {"w": 0.1 * torch.randn(16, 4, generator=g), "bias": torch.zeros(4)}
    wanted[..., 0], router["w"][0] = 1.0, torch.tensor([1.0, 0.0, 0.0, 0.0])  # type: ignore[index]
    batch, extra = {"tokens": torch.zeros(4, 64, dtype=torch.long)}, {"fixed": router_bias(arch)}
    shares = []
    for _ in range(100):
        bias = tree.flatten(extra)["fixed/blocks/0/mlp/router/bias"]
        load = route(wanted, router | {"bias": bias}, 0, arch, SINGLE, Forward(), batch).load.sum(0)
        extra, metrics = watch_experts(arch)(extra, {"load": load[None], "dropped": torch.zeros(1)})
        shares.append(metrics["load_max"])
    assert shares[0] > 2.5
    assert max(shares[-10:]) < 1.3


def test_jitter_is_drawn_by_seed_layer_row_and_position_and_only_in_training() -> None:
    wanted = torch.ones(2, 3, 4, dtype=torch.float64)
    noisy = routed(wanted, Forward(jitter=1), jitter=0.25)
    z = noisy.z.sqrt()
    assert ((math.log(4) + 0.75 <= z) & (z <= math.log(4) + 1.25)).all()
    assert noisy.z.unique().numel() == 2
    assert routed(wanted, Forward(jitter=1), jitter=0.25).z.equal(noisy.z)
    assert not routed(wanted, Forward(jitter=2), jitter=0.25).z.equal(noisy.z)
    assert routed(wanted, jitter=0.25).z.tolist() == pytest.approx([(math.log(4) + 1) ** 2] * 2, rel=1e-12)


def test_a_router_computes_in_float32_when_the_rest_is_bfloat16() -> None:
    """Two logits that one bfloat16 number would hold: 1.000 and 1.001."""
    arch = arch_of()
    params = tree.map(lambda x: x.float(), params_of(arch))
    batch = batch_of(arch, 2, 8, 0, documents=False)
    close = params["blocks"]["0"]["mlp"]["router"]  # type: ignore[index,call-overload]
    close["w"] = torch.zeros(16, 4)
    close["w"][:, 1] = 1e-3  # type: ignore[index]
    how = Forward(torch.bfloat16)
    _, seen = hidden(params, batch, arch, SINGLE, how)
    assert seen["z"].dtype == seen["scores"].dtype == torch.float32
    assert seen["scores"][:, 0].unique().numel() > 2, "a router in bfloat16 would see hardly any difference"
    grads = value_and_grad(lm_loss(arch, how))(params, batch, SINGLE)[1]
    assert {leaf.dtype for leaf in tree.leaves(grads)} == {torch.float32}


@pytest.mark.parametrize("mesh", [{"ep": 2}, {"tp": 2, "sequence_parallel": True}], ids=str)
def test_a_routing_given_back_gives_the_same_bits(mesh: dict[str, Any]) -> None:
    arch = arch_of(capacity=1.0, score="sigmoid", jitter=0.1)
    params, batch = params_of(arch), batch_of(arch, 4, 8, 0, documents=True)
    chosen = hidden(params, batch, arch, SINGLE)[1]["experts"]
    assert chosen.shape == (4, 8, 2, 2)
    again = batch | {"experts": chosen}
    assert logits(params, again, arch, SINGLE).equal(logits(params, batch, arch, SINGLE))
    for (mine, its), m in fake.run(lambda m: (replay(arch, params, batch, m), m), **mesh):
        assert mine.equal(its)
        assert mine.equal(rows_of({"x": chosen}, m)["x"])


def replay(arch: Arch, params: Params, batch: Batch, mesh: Mesh) -> tuple[Tensor, Tensor]:
    mine, rows = shard(params, table(mesh.sequence_parallel), mesh), rows_of(batch, mesh)
    x, seen = hidden(mine, rows, arch, mesh)
    y, told = hidden(mine, rows | {"experts": seen["experts"]}, arch, mesh)
    assert x.equal(y)
    return seen["experts"], told["experts"]


def test_weights_and_gradients_of_a_given_routing_are_the_present_ones() -> None:
    arch = arch_of()
    params, batch = params_of(arch), batch_of(arch, 2, 8, 0, documents=False)
    batch["experts"] = hidden(params_of(arch, 1), batch, arch, SINGLE)[1]["experts"]
    grads = tree.flatten(value_and_grad(lm_loss(arch))(params, batch, SINGLE)[1])
    assert grads["blocks/1/mlp/router/w"].abs().sum() > 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.full((2, 8, 2, 2), 4), "names expert 4; there are 0 to 3"),
        (torch.full((2, 8, 2, 2), -1), "names expert -1"),
        (torch.ones(2, 8, 2, 2, dtype=torch.long), "names an expert twice"),
        (torch.ones(2, 8, 1, 2, dtype=torch.long), r"want integers \[2, 8, 2, 2\]"),
        (torch.ones(2, 8, 2, 2), "is torch.float32"),
    ],
    ids=["too high", "too low", "twice", "shape", "dtype"],
)
def test_a_routing_that_is_none_is_refused(given: Tensor, message: str) -> None:
    arch = arch_of()
    with pytest.raises(ValueError, match=message):
        hidden(params_of(arch), batch_of(arch, 2, 8, 0, documents=False) | {"experts": given}, arch, SINGLE)
