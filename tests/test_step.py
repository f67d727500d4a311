"""A step clips once, refuses or leaves out what is not finite on all ranks alike, and touches nothing it should not."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from ironfn import tree
from ironfn.algo.step import Metrics, NonFiniteError, State, Step, make_step, skip, stop
from ironfn.grad.value_and_grad import accumulate, value_and_grad
from ironfn.layout.table import Placement, cut, shard, unshard
from ironfn.layout.zero import share_updates
from ironfn.loss.lm import lm_loss
from ironfn.mesh import fake
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.model.init import init, shapes
from ironfn.model.tables import table
from ironfn.optim.adamw import adamw
from ironfn.optim.optimizer import Optimizer
from ironfn.optim.presets import make_optimizer
from ironfn.report.evaluation import evaluate
from ironfn.spec.records import OptimSpec
from ironfn.types import Batch, Loss, LossSum, Params
from tests import peers

ARCH = peers.make_arch("llama", 38, width=16, heads=2, ffn=24)
LM = lm_loss(ARCH)


def sgd_update(grads: Params, state: Params, params: Params, lr: float) -> tuple[Params, Params]:
    return tree.map(lambda p, g: p - lr * g, params, grads), state


SGD = Optimizer(lambda params: {}, sgd_update)


def batch_of(rows: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, ARCH.vocab, (rows, 13), generator=generator)
    weight = (torch.rand(rows, 12, generator=generator) < 0.8).float()
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weight": weight}


def first(optimizer: Optimizer = SGD) -> State:
    params = init(ARCH, 0, table(False), SINGLE)
    return State(0, params, optimizer.init(params))


def bits(*trees: Params) -> list[bytes]:
    return [leaf.reshape(-1).view(torch.uint8).numpy().tobytes() for each in trees for leaf in tree.leaves(each)]


def one(loss: Loss, optimizer: Optimizer = SGD, **options: object) -> Step:
    return make_step(value_and_grad(loss), optimizer, lambda step: 0.1, **options)  # pyright: ignore[reportArgumentType]


# The gradient of the mean, its norm, and its clipping, against torch.


@pytest.mark.parametrize("clip", [1e-3, 0.1, 1e3])
@pytest.mark.parametrize("micro", [1, 2, 99])
def test_clipping_is_torchs_on_the_whole_batchs_gradient(clip: float, micro: int) -> None:
    """In float64. clip_grad_norm_ divides by norm + 1e-6, we by the norm: the results are 1e-6 / norm apart."""
    batch = batch_of(5)
    state = State(0, init(ARCH, 0, table(False), SINGLE, torch.float64), {})
    leaves = {path: leaf.clone().requires_grad_() for path, leaf in tree.flatten(state.params).items()}
    out = LM(tree.unflatten(dict(leaves)), batch, SINGLE)
    (out.total / out.weight).backward()
    norm = torch.nn.utils.clip_grad_norm_(list(leaves.values()), clip)
    assert norm > 0.1
    step = make_step(accumulate(value_and_grad(LM), micro), SGD, lambda step: 1.0, clip=clip)
    after, metrics = step(state, batch)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-12)
    assert metrics["loss"] == pytest.approx(float(out.total.detach() / out.weight), rel=1e-12)
    moved = tree.map(lambda new, old: old - new, after.params, state.params)
    for path, leaf in leaves.items():
        assert leaf.grad is not None
        torch.testing.assert_close(
            tree.flatten(moved)[path], leaf.grad, rtol=1.1e-6 / float(norm), atol=1e-12, msg=lambda m, p=path: p + m
        )
    assert float(tree.norm(moved)) == pytest.approx(min(clip, float(norm)), rel=1e-9)


def test_without_clip_and_below_it_a_gradient_keeps_its_bits() -> None:
    plain, _ = one(LM)(first(), batch_of(3))
    loose, _ = one(LM, clip=1e6)(first(), batch_of(3))
    assert bits(plain.params) == bits(loose.params)


def given_gradient(params: Params, batch: Batch, mesh: Mesh) -> LossSum:
    """Have the gradient ``batch["grad"]`` for each row of weight 1."""
    w = tree.leaf(params, "w")
    return LossSum((batch["grad"] * w).sum(), batch["weight"].sum())


def pull(*rows: list[float]) -> Batch:
    grad = torch.tensor(rows)
    return {"tokens": torch.zeros(len(rows), 1, dtype=torch.long), "grad": grad, "weight": torch.ones(len(rows), 1)}


def test_one_clip_a_step_on_the_sum_of_the_micro_batches() -> None:
    """Rows (6, 0) and (0, 8): their mean (3, 4) has norm 5. Clipped by itself, each would be (1, 0) and (0, 1)."""
    step = make_step(accumulate(value_and_grad(given_gradient), 1), SGD, lambda step: 1.0, clip=1.0)
    state, metrics = step(State(0, {"w": torch.zeros(2)}, {}), pull([6.0, 0.0], [0.0, 8.0]))
    assert metrics["grad_norm"] == pytest.approx(5.0)
    torch.testing.assert_close(state.params["w"], torch.tensor([-0.6, -0.8]))


def test_the_norm_of_split_leaves_is_that_of_the_whole() -> None:
    """Shares of norm 3 and 4 have the norm 5 on every rank; a leaf that every rank holds counts once."""
    layout = (("w", cut("tp", 0)), ("whole", Placement()))

    def loss(params: Params, batch: Batch, mesh: Mesh) -> LossSum:
        g = batch["grad"][0].chunk(mesh.tp.size)[mesh.tp.index]
        return LossSum((tree.leaf(params, "w") * g).sum() + 12.0 * tree.leaf(params, "whole"), batch["weight"].sum())

    def rank(mesh: Mesh) -> tuple[Params, Metrics]:
        state = State(0, shard({"w": torch.zeros(4), "whole": torch.zeros(())}, layout, mesh), {})
        step = make_step(value_and_grad(loss), SGD, lambda step: 1.0, table=layout, mesh=mesh, clip=6.5)
        state, metrics = step(state, pull([0.0, 3.0, 4.0, 0.0]))
        return unshard(state.params, layout, mesh), metrics

    for params, metrics in [*fake.run(rank, tp=2), rank(SINGLE)]:
        assert metrics["grad_norm"] == pytest.approx(13.0)
        torch.testing.assert_close(params["w"], torch.tensor([0.0, -1.5, -2.0, 0.0]))
        torch.testing.assert_close(params["whole"], torch.tensor(-6.0))


# Gradients that are not finite.


class Spoil(torch.autograd.Function):
    """Give 0 and the gradient ``value``: the loss stays what it is."""

    @staticmethod
    def forward(x: Tensor, value: float) -> Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.value = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.full_like(grad, ctx.value), None


def spoiled(value: float, when: int = 0) -> Loss:
    """Return the language model's loss, with the gradient of one weight spoiled on the step whose batch says so."""

    def loss(params: Params, batch: Batch, mesh: Mesh) -> LossSum:
        out = LM(params, {name: x for name, x in batch.items() if name != "number"}, mesh)
        if int(batch["number"][0]) != when:
            return out
        x = tree.flatten(params)["blocks/0/attn/wq"][0, 0]
        return LossSum(out.total + Spoil.apply(x, value), out.weight, out.metrics)

    return loss


def numbered(number: int, rows: int = 2) -> Batch:
    return batch_of(rows, number) | {"number": torch.full((rows,), number)}


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("donate", [False, True])
def test_stop_raises_and_touches_nothing(value: float, donate: bool) -> None:
    optimizer = adamw()
    step = one(spoiled(value), optimizer, donate=donate, clip=1.0)
    state = first(optimizer)
    before = bits(state.params, state.opt)
    with pytest.raises(NonFiniteError, match=r"step 0: loss [0-9.]+, gradient norm (inf|nan); nothing was updated"):
        step(state, numbered(0))
    assert bits(state.params, state.opt) == before
    state, metrics = step(state, numbered(1))
    assert math.isfinite(metrics["grad_norm"])


def test_a_loss_that_is_not_finite_is_refused_even_where_its_gradient_is() -> None:
    def loss(params: Params, batch: Batch, mesh: Mesh) -> LossSum:
        out = LM(params, batch, mesh)
        return LossSum(out.total + math.inf, out.weight)

    with pytest.raises(NonFiniteError, match="loss inf"):
        one(loss)(first(), batch_of(2))


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("donate", [False, True])
def test_skip_leaves_a_step_out_counts_it_and_goes_on(value: float, donate: bool) -> None:
    """The steps after are those of a run that never saw the batch, except that the number of the step went on."""
    optimizer = adamw()
    step = one(spoiled(value, when=1), optimizer, on_nonfinite=skip, donate=donate)
    state, _ = step(first(optimizer), numbered(0))
    before = bits(state.params, state.opt)
    state, metrics = step(state, numbered(1))
    assert bits(state.params, state.opt) == before
    assert (state.step, state.skipped, metrics["skipped"]) == (2, 1, 1)
    assert not math.isfinite(metrics["grad_norm"])
    state, metrics = step(state, numbered(2))
    assert (state.step, state.skipped, metrics["skipped"]) == (3, 1, 1)
    assert all(leaf.isfinite().all() for leaf in tree.leaves(state.params) + tree.leaves(state.opt))
    never, _ = step(first(optimizer), numbered(0))
    never, _ = step(never, numbered(2))
    assert bits(state.params, state.opt) == bits(never.params, never.opt)


def test_a_policy_of_ones_own_sees_the_metrics_and_may_raise() -> None:
    seen: list[Metrics] = []
    step = one(spoiled(math.nan), on_nonfinite=seen.append)
    step(first(), numbered(0))
    assert [metrics["step"] for metrics in seen] == [0]
    with pytest.raises(NonFiniteError, match=r"optim.lr|skip"):
        stop(seen[0])


@pytest.mark.parametrize("policy", [skip, stop])
@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 3}, {"dp": 2, "tp": 2}])
def test_not_a_number_on_one_rank_makes_all_ranks_do_the_same(policy: object, axes: dict[str, int]) -> None:
    """Only the rows of rank 1 are bad. A rank that went on alone would wait for the others for ever."""
    layout, optimizer = table(False), adamw()

    def rank(mesh: Mesh) -> tuple[str | None, int, bool, bool]:
        params = init(ARCH, 0, layout, mesh)
        state = State(0, params, optimizer.init(params))
        before = bits(state.params, state.opt)
        step = make_step(
            value_and_grad(spoiled(math.nan)), optimizer, lambda step: 0.1, table=layout, mesh=mesh,
            on_nonfinite=policy,  # pyright: ignore[reportArgumentType]
        )  # fmt: skip
        raised = None
        try:
            state, _ = step(state, numbered(0 if mesh.dp.index == 1 else 7))
        except NonFiniteError as error:
            raised = str(error)
        untouched = bits(state.params, state.opt) == before
        state, metrics = step(state, numbered(3))
        return raised, state.skipped, untouched, math.isfinite(metrics["loss"])

    found = fake.run(rank, timeout=30, **axes)
    assert len(set(found)) == 1
    raised, skipped, untouched, went_on = found[0]
    assert (raised is None, skipped) == ((True, 1) if policy is skip else (False, 0))
    assert untouched
    assert went_on


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("forgotten", ["zero1", "updates"])
def test_updates_of_another_optimizer_are_refused(name: Literal["adamw", "muon"], forgotten: str) -> None:
    """Shares for an optimizer of whole leaves, or the other way round: torch's fused AdamW reads past their end."""
    layout = table(False)

    def rank(mesh: Mesh) -> None:
        params = init(ARCH, 0, layout, mesh)
        updates = share_updates(layout, shapes(ARCH), mesh)
        right = make_optimizer(OptimSpec(name=name), params, table=layout, mesh=mesh, updates=updates)
        optimizer = make_optimizer(OptimSpec(name=name), params) if forgotten == "zero1" else right
        given = updates if forgotten == "zero1" else None
        step = make_step(value_and_grad(LM), optimizer, lambda step: 0.1, table=layout, mesh=mesh, updates=given)
        with pytest.raises(ValueError, match=r"cannot move a leaf of shape .* `updates` of the optimizer"):
            step(State(0, params, optimizer.init(params)), numbered(mesh.dp.index))

    fake.run(rank, dp=2)


# The rest of what a step promises.


def test_a_batch_without_targets_has_loss_0_and_no_gradient() -> None:
    batch = batch_of(2) | {"weight": torch.zeros(2, 12)}
    state = first()
    after, metrics = one(LM, clip=1.0)(state, batch)
    assert (metrics["loss"], metrics["grad_norm"], metrics["tokens"]) == (0.0, 0.0, 0.0)
    assert bits(after.params) == bits(state.params)
    decayed, _ = one(LM, adamw(weight_decay=0.5))(first(adamw()), batch)
    for path, leaf in tree.flatten(decayed.params).items():  # AdamW still decays, as torch's does at gradient 0
        torch.testing.assert_close(leaf, tree.flatten(state.params)[path] * 0.95)


def test_metrics_say_what_the_step_did() -> None:
    batch = batch_of(4)

    def loss(params: Params, batch: Batch, mesh: Mesh) -> LossSum:
        out = LM(params, batch, mesh)
        return LossSum(out.total, out.weight, {"twice": 2 * out.total.detach()})

    step = make_step(accumulate(value_and_grad(loss), 3), SGD, lambda step: 0.1 / (step + 1))
    state, metrics = step(first(), batch)
    assert metrics["twice"] == pytest.approx(2 * metrics["loss"])
    assert (metrics["step"], metrics["lr"], metrics["tokens"], metrics["skipped"]) == (0, 0.1, batch["weight"].sum(), 0)
    _, metrics = step(state, batch)
    assert (metrics["step"], metrics["lr"]) == (1, 0.05)
    assert all(isinstance(value, int | float) for value in metrics.values()), "no tensor, so no graph, is kept"


def test_without_donation_the_state_given_is_left_as_it_was() -> None:
    optimizer = adamw()
    state = first(optimizer)
    before = bits(state.params, state.opt)
    step = one(LM, optimizer)
    again, _ = step(state, batch_of(2))
    assert bits(state.params, state.opt) == before
    assert bits(again.params) != bits(state.params)
    twice, _ = step(state, batch_of(2))
    assert bits(twice.params, twice.opt) == bits(again.params, again.opt), "a function: the same in, the same out"


def test_a_leaf_that_the_table_does_not_know_is_refused() -> None:
    step = make_step(value_and_grad(given_gradient), SGD, lambda step: 1.0, table=(("v", Placement()),))
    with pytest.raises(ValueError, match="no row of the layout table matches the leaf 'w'"):
        step(State(0, {"w": torch.zeros(2)}, {}), pull([1.0, 1.0]))


def test_an_untouched_parameter_gets_a_zero_gradient() -> None:
    params: Params = {"w": torch.zeros(2), "idle": torch.ones(3)}
    _, grads = value_and_grad(given_gradient)(params, pull([1.0, 2.0]), SINGLE)
    assert isinstance(grads["idle"], Tensor)
    assert grads["idle"].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("wanted", [False, True])
def test_differentiating_leaves_the_parameters_as_they_were(wanted: bool) -> None:
    """No ``.grad`` is filled and no flag is set, whether or not somebody else differentiates by them."""
    params = tree.map(lambda x: x.requires_grad_(wanted), init(ARCH, 0, table(False), SINGLE))
    _, grads = value_and_grad(LM)(params, batch_of(2), SINGLE)
    for leaf, grad in zip(tree.leaves(params), tree.leaves(grads), strict=True):
        assert (leaf.requires_grad, leaf.grad, leaf.grad_fn) == (wanted, None, None)
        assert not grad.requires_grad


def test_training_evaluation_and_a_peer_that_shifts_by_itself_see_one_loss() -> None:
    """`transformers` takes the ids as labels and shifts them; we are given the targets, and nobody shifts twice."""
    model, params = peers.llama(ARCH)
    ids = torch.randint(0, ARCH.vocab, (3, 14))
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "weight": torch.ones(3, 13)}
    theirs = float(model(input_ids=ids, labels=ids).loss.detach())
    _, metrics = one(LM)(State(0, params, {}), batch)
    lengths = torch.ones(ARCH.vocab, dtype=torch.long)
    scored = evaluate(LM, params, [batch], SINGLE, lengths)
    assert metrics["loss"] == pytest.approx(theirs, rel=1e-6)
    assert scored.loss == pytest.approx(theirs, rel=1e-6)
    shifted = batch | {"targets": ids[:, 1:].roll(-1, 1)}
    assert evaluate(LM, params, [shifted], SINGLE, lengths).loss != pytest.approx(theirs, rel=1e-3)
