"""Losses of batches of pairs: what two models of `transformers` give, each text alone; the reference; every mesh."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ironfn import tree
from ironfn.grad.value_and_grad import value_and_grad
from ironfn.layout.reduce import reduce_grads
from ironfn.layout.table import shard, unshard
from ironfn.loss.log_probs import asked_places, place_log_probs
from ironfn.loss.pairs import base_model, frozen_model, in_batch, nobody, pair_loss, unpaired_loss
from ironfn.loss.preference import dpo, kto, orpo
from ironfn.loss.scores import token_log_probs
from ironfn.mesh import fake
from ironfn.mesh.axis import SINGLE, Axis, Mesh, sum_over_rows
from ironfn.model import experts
from ironfn.model.adapters import Adapting, first_adapter, frozen_base
from ironfn.model.attention import Dropout, by_mask, by_span, written_out
from ironfn.model.forward import Forward
from ironfn.model.tables import table
from ironfn.spec.adapter_records import AdapterSpec
from ironfn.spec.records import MoeSpec
from ironfn.types import Batch, Params
from property_tests.pairs import pair_rows, random_pairs
from property_tests.strategies import archs, params_of
from tests import peers

ROWS = [[([1, 2, 3], [4, 5], [6, 7, 8]), ([9], [3, 1, 2], [5])], [([2, 2], [1], [3, 3, 3, 3])]]
CLOSE = {"rtol": 1e-9, "atol": 1e-11}
THEIRS = {"rtol": 1e-6, "atol": 1e-6}  # their norms and angles are float32's, whatever the model's dtype


def llama() -> Any:
    arch = peers.make_arch("llama", 17, kv_heads=2)
    model, params = peers.llama(arch)
    return arch, model.double(), tree.map(lambda x: x.double(), params)


def scored_alone(model: Any, prompt: list[int], completion: list[int]) -> Tensor:
    """Return the log-probability of a completion, by an unbatched scorer."""
    ids = torch.tensor([[*prompt, *completion]])
    log_probs = model(ids).logits[0, :-1].log_softmax(-1)
    at = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
    return log_probs[at, ids[0, at + 1]].sum()


def test_value_and_gradients_are_those_of_texts_alone() -> None:
    arch, policy, params = llama()
    reference, frozen = peers.llama(arch, seed=1)
    reference, frozen = reference.double(), tree.map(lambda x: x.double(), frozen)
    losses: list[Tensor] = []
    margins: list[float] = []
    for prompt, chosen, rejected in [pair for row in ROWS for pair in row]:
        sums = [scored_alone(model, prompt, side) for model in (policy, reference) for side in (chosen, rejected)]
        margin = 0.1 * ((sums[0] - sums[2].detach()) - (sums[1] - sums[3].detach()))
        losses.append(-torch.nn.functional.logsigmoid(margin))
        margins.append(margin.item())
    expected = torch.stack(losses).sum()
    expected.backward()
    loss = pair_loss(arch, dpo(0.1), frozen_model(frozen, arch, chunk=3), chunk=3)
    found, grads = value_and_grad(loss)(params, pair_rows(ROWS, 16, once=True), SINGLE)
    torch.testing.assert_close(found.total, expected.detach(), **THEIRS)
    assert found.weight == 3
    assert found.metrics["margin"].item() == pytest.approx(sum(margins), rel=1e-6)
    assert found.metrics["accuracy"] == sum(margin > 0 for margin in margins)
    theirs = tree.flatten(peers.llama_tree(policy, arch, "grad"))
    for path, grad in tree.flatten(grads).items():
        torch.testing.assert_close(grad, theirs[path], **THEIRS, msg=lambda m, p=path: f"{p}: {m}")


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_prompt_once_is_a_prompt_in_each_text(data: st.DataObject) -> None:
    """For every family and attention: packed pairs that share their prompts, and texts that share nothing."""
    moe = data.draw(st.sampled_from([MoeSpec(), MoeSpec(experts=3, top_k=2, ffn=4)]))
    arch = data.draw(archs(moe=moe))
    params, seed = params_of(arch), data.draw(st.integers(0, 99))
    rows = random_pairs(arch, 2, 20, seed)
    how = Forward(attention=data.draw(st.sampled_from([by_span, by_mask, written_out])))
    loss = value_and_grad(pair_loss(arch, dpo(0.5), in_batch, how, chunk=3, penalties=False))
    found, grads = loss(params, pair_rows(rows, 20, once=True, reference=0.3), SINGLE)
    expected, theirs = loss(params, pair_rows(rows, 40, once=False, reference=0.3), SINGLE)
    torch.testing.assert_close(found.total, expected.total, **CLOSE)
    assert {name: x.item() for name, x in found.metrics.items()} == pytest.approx(
        {name: x.item() for name, x in expected.metrics.items()}, rel=1e-9
    )
    for path, grad in tree.flatten(grads).items():
        torch.testing.assert_close(grad, tree.flatten(theirs)[path], **CLOSE, msg=lambda m, p=path: f"{p}: {m}")


def test_many_completions_of_one_prompt_and_prompts_that_share_theirs() -> None:
    """Four completions behind one prompt, two of which share more: a tree of texts in one row."""
    arch, _, params = llama()
    texts = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7], [1, 2, 8], [1, 2, 9, 9]]
    #         trunk 1 2 of all; 3 4 of the first two
    token = [1, 2, 3, 4, 5, 5, 2, 2, 9]
    target = [2, 3, 4, 5, 6, 7, 8, 9, 9]
    row: Batch = {
        "tokens": torch.tensor([token]),
        "targets": torch.tensor([target]),
        "weight": torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1.0]]).double(),
        "position": torch.tensor([[0, 1, 2, 3, 4, 4, 1, 1, 2]]),
        "segment": torch.tensor([[0, 0, 0, 0, 0, 1, 2, 3, 3]]),
        "until": torch.tensor([[3, 1, 1, 1, 0, 1, 2, 3, 3]]),
    }
    places = asked_places(row)
    found = places.sums(place_log_probs(params, row, arch, SINGLE, Forward(), places)[0])
    model = peers.llama(arch)[0].double()
    expected = [scored_alone(model, text[:cut], text[cut:]) for text, cut in zip(texts, (5, 5, 2, 2), strict=True)]
    torch.testing.assert_close(found, torch.stack(expected).detach(), **THEIRS)


def outcome(name: str, mesh: Mesh, rows: int, arch: Any, params: Params) -> tuple[Any, Params]:
    layout = table(mesh.sequence_parallel)
    batch = pair_rows(random_pairs(arch, rows, 24, 5), 24, once=True, reference=-2.0)
    mine = {name: value.tensor_split(mesh.shares)[mesh.share] for name, value in batch.items()}
    loss = pair_loss(arch, dpo(0.5), chunk=3) if name == "pairs" else unpaired_loss(arch, kto(0.5), chunk=3)
    found, grads = value_and_grad(loss)(shard(tree.clone(params), layout, mesh), mine, mesh)
    grads = unshard(reduce_grads(grads, layout, mesh), layout, mesh)
    names = ["total", "weight", *found.metrics]
    values = sum_over_rows(
        torch.stack([x.double() for x in (found.total, found.weight, *found.metrics.values())]), mesh
    )
    return dict(zip(names, values.tolist(), strict=True)), grads


@pytest.mark.parametrize("name", ["pairs", "judged"])
@pytest.mark.parametrize(
    ("sizes", "rows"),
    [
        ({"dp": 2}, 3),
        ({"dp": 4}, 3),
        ({"tp": 2}, 2),
        ({"tp": 2, "sequence_parallel": True}, 2),
        ({"dp": 2, "tp": 2}, 3),
    ],
)
def test_it_is_the_same_on_every_mesh(name: str, sizes: dict[str, Any], rows: int) -> None:
    """KTO's baseline is one number of the whole batch; a rank without a row takes part."""
    arch = peers.make_arch("llama", 16, kv_heads=2)
    params = params_of(arch)
    expected, theirs = outcome(name, SINGLE, rows, arch, params)
    if name == "judged":
        assert expected["kl"] > 0.1
    for found, grads in fake.run(lambda mesh: outcome(name, mesh, rows, arch, params), **sizes):
        assert found == pytest.approx(expected, rel=1e-9)
        for path, grad in tree.flatten(grads).items():
            torch.testing.assert_close(grad, tree.flatten(theirs)[path], **CLOSE, msg=lambda m, p=path: f"{p}: {m}")


def test_kto_has_the_baseline_of_what_answers_other_prompts() -> None:
    arch, policy, params = llama()
    batch = pair_rows(ROWS, 16, once=True)
    found, _ = value_and_grad(unpaired_loss(arch, kto(0.1), chunk=3))(params, batch, SINGLE)
    triples = [pair for row in ROWS for pair in row]
    own, other = (torch.stack([scored_alone(policy, t[0], t[side]) for t in triples]) for side in (1, 2))
    baseline = other.mean().clamp(min=0)
    liked = torch.tensor([False, True, False])  # the second of a row, in these rows
    sign = torch.where(liked, 1.0, -1.0)
    expected = torch.sigmoid(-sign * 0.1 * (own - baseline)).sum()
    torch.testing.assert_close(found.total, expected.detach(), **THEIRS)
    assert found.metrics["margin"].item() == pytest.approx((0.1 * sign * own).sum().item(), rel=1e-6)


def test_torch_func_sees_it() -> None:
    arch = peers.make_arch("llama", 17, kv_heads=2, moe=MoeSpec(experts=3, top_k=2, ffn=8))
    params, batch = params_of(arch), pair_rows(ROWS, 16, once=True, reference=0.2)
    how = Forward(attention=written_out, experts=experts.written_out)
    found, grads = value_and_grad(pair_loss(arch, dpo(0.5)))(params, batch, SINGLE)
    loss = pair_loss(arch, dpo(0.5), how=how)
    theirs, value = torch.func.grad_and_value(lambda p: loss(p, batch, SINGLE).total)(params)
    torch.testing.assert_close(found.total, value, **CLOSE)
    direction = tree.map(torch.randn_like, params)
    _, change = torch.func.jvp(lambda p: loss(p, batch, SINGLE).total, (params,), (direction,))
    along = torch.zeros((), dtype=torch.float64)
    for path, grad in tree.flatten(grads).items():
        torch.testing.assert_close(grad, tree.flatten(theirs)[path], **CLOSE)
        along = along + (grad * tree.flatten(direction)[path]).sum()
    torch.testing.assert_close(change, along, **CLOSE)


@pytest.mark.parametrize("base", ["none", "nf4"])
def test_the_base_under_an_adapter_is_its_reference(base: Any) -> None:
    """A fresh adapter changes nothing: the loss is log 2 and every reward 0. No leaf is there twice."""
    arch = peers.make_arch("llama", 17, kv_heads=2, width=64, ffn=64)
    spec = AdapterSpec(kind="lora", rank=2, dropout=0.5, base=base)
    params = tree.map(lambda x: x.float(), params_of(arch))
    frozen = frozen_base(spec, params, table(False))
    fresh = first_adapter(spec, arch, frozen, 0, table(False))
    how, batch = Forward(adapt=Adapting(spec)), pair_rows(ROWS, 16, once=True)
    vg = value_and_grad(pair_loss(arch, dpo(0.1), base_model(arch, how), how))
    found, grads = vg(fresh, batch, SINGLE, frozen)
    assert found.total.item() / 3 == pytest.approx(math.log(2), abs=1e-7)
    assert found.metrics["margin"].item() == pytest.approx(0.0, abs=1e-6)
    assert max(float(grad.abs().max()) for grad in tree.leaves(grads)) > 0
    moved = tree.map(lambda x: x + 0.05, fresh)
    changed, _ = vg(moved, batch, SINGLE, frozen)
    given = frozen_model(frozen, arch, how)
    again, _ = value_and_grad(pair_loss(arch, dpo(0.1), given, how))(moved, batch, SINGLE, frozen)
    assert changed.total == again.total != found.total


def test_a_batch_may_say_what_the_reference_gives() -> None:
    arch, _, params = llama()
    batch = pair_rows(ROWS, 16, once=True)
    reference = tree.map(lambda x: x * 1.1, params)
    live = frozen_model(reference, arch)
    expected, theirs = value_and_grad(pair_loss(arch, dpo(0.1), live))(params, batch, SINGLE)
    places = asked_places(batch)
    batch["reference"].view(-1)[places.at] = live(params, batch, SINGLE, places)
    found, grads = value_and_grad(pair_loss(arch, dpo(0.1), in_batch))(params, batch, SINGLE)
    assert torch.equal(found.total, expected.total)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(grads), tree.leaves(theirs), strict=True))


def test_experts_are_balanced_by_pairs_or_left_alone() -> None:
    moe = MoeSpec(experts=4, top_k=2, ffn=8, balance_weight=0.5, z_weight=0.1)
    arch = peers.make_arch("llama", 17, kv_heads=2, moe=moe)
    params, batch = params_of(arch), pair_rows(ROWS, 16, once=True)
    plain = pair_loss(arch, orpo(0.1), nobody, penalties=False)(params, batch, SINGLE)
    found = pair_loss(arch, orpo(0.1), nobody)(params, batch, SINGLE)
    added = 0.5 * found.metrics["balance"] + 0.1 * found.metrics["router_z"]
    torch.testing.assert_close(found.total, plain.total + added, **CLOSE)
    assert found.counts["load"].sum() == 2 * arch.layers * (batch["segment"] >= 0).sum()
    parts = [{name: x[row : row + 1] for name, x in batch.items()} for row in (0, 1)]
    sums = [pair_loss(arch, orpo(0.1), nobody)(params, part, SINGLE).total for part in parts]
    torch.testing.assert_close(found.total, sums[0] + sums[1], **CLOSE)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_log_probabilities_of_tokens_and_their_gradients_equal_torch(softcap: float | None) -> None:
    x, w = (torch.randn(n, 16, requires_grad=True) for n in (37, 50))
    bias = torch.randn(50, requires_grad=True)
    targets, pull = torch.randint(0, 47, (37,)), torch.randn(37)
    logits = (x @ w.t() + bias)[:, :47]
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    expected = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    found = token_log_probs(x, w, targets, Axis("tp"), vocab=47, bias=bias, softcap=softcap, chunk=10)
    torch.testing.assert_close(found, expected)
    mine, theirs = (torch.autograd.grad((out * pull).sum(), [x, w, bias]) for out in (found, expected))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    frozen = token_log_probs(
        x, w.detach(), targets, Axis("tp"), vocab=47, bias=bias.detach(), softcap=softcap, chunk=10
    )
    torch.testing.assert_close(frozen, expected)
    torch.testing.assert_close(torch.autograd.grad((frozen * pull).sum(), x)[0], theirs[0], rtol=1e-5, atol=1e-5)


def test_what_has_no_pairs_learns_nothing_and_still_takes_part() -> None:
    arch, _, params = llama()
    batch = pair_rows(ROWS, 16, once=True)
    batch["weight"] = torch.zeros_like(batch["weight"])
    for loss in (pair_loss(arch, dpo(0.1)), unpaired_loss(arch, kto(0.1))):
        found, grads = value_and_grad(loss)(params, batch, SINGLE)
        assert found.total.item() == found.weight.item() == 0.0
        assert not any(grad.count_nonzero() for grad in tree.leaves(grads))
        with torch.enable_grad():
            leaves = tree.map(lambda x: x.detach().requires_grad_(), params)
            assert loss(leaves, batch, SINGLE).total.requires_grad, "or a rank would not answer the others' backward"


def test_dropout_is_refused() -> None:
    arch, _, params = llama()
    how = evolve(Forward(), dropout=Dropout(0.5, 1))
    with pytest.raises(AssertionError, match="share"):
        pair_loss(arch, dpo(0.1), how=how)(params, pair_rows(ROWS, 16, once=True), SINGLE)
