"""The chunked cross-entropy equals torch's; weights, labels and means are what they should be."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ironfn.algo.step import State, make_step
from ironfn.grad.value_and_grad import accumulate, split, value_and_grad
from ironfn.loss.cross_entropy import cross_entropy
from ironfn.mesh import fake
from ironfn.mesh.axis import SINGLE, Axis, Mesh
from ironfn.optim.optimizer import Optimizer
from ironfn.types import Batch, LossSum, Params

ALONE = Axis("tp")


def case(tokens: int = 37, width: int = 16, rows: int = 50) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = torch.randn(tokens, width, requires_grad=True)
    w = torch.randn(rows, width, requires_grad=True)
    return x, w, torch.randint(0, rows, (tokens,)), (torch.rand(tokens) < 0.6).float()


@pytest.mark.parametrize("chunk", [1, 10, 37, 512])
def test_value_and_gradients_equal_torch(chunk: int) -> None:
    x, w, targets, weight = case()
    expected = (F.cross_entropy(x @ w.t(), targets, reduction="none") * weight).sum()
    found = cross_entropy(x, w, targets, weight, ALONE, vocab=50, chunk=chunk)
    torch.testing.assert_close(found, expected)
    for mine, theirs in zip(
        torch.autograd.grad(3 * found, [x, w]), torch.autograd.grad(3 * expected, [x, w]), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("chunk", [10, 512])
def test_a_bias_and_a_cap_of_the_logits_equal_torch(chunk: int, softcap: float | None) -> None:
    x, w, targets, weight = case()
    b = torch.randn(50, requires_grad=True)
    logits = (x @ w.t() + b)[:, :47]
    targets, logits = targets % 47, logits if softcap is None else softcap * (logits / softcap).tanh()
    expected = (F.cross_entropy(logits, targets, reduction="none") * weight).sum()
    found = cross_entropy(x, w, targets, weight, ALONE, vocab=47, bias=b, softcap=softcap, chunk=chunk)
    torch.testing.assert_close(found, expected)
    theirs = torch.autograd.grad(3 * expected, [x, w, b])
    for mine, other in zip(torch.autograd.grad(3 * found, [x, w, b]), theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_padded_vocabulary_has_no_probability() -> None:
    x, w, targets, weight = case(rows=50)
    targets = targets % 41
    expected = (F.cross_entropy(x @ w[:41].t(), targets, reduction="none") * weight).sum()
    found = cross_entropy(x, w, targets, weight, ALONE, vocab=41)
    torch.testing.assert_close(found, expected)
    (grad,) = torch.autograd.grad(found, [w])
    assert grad[41:].count_nonzero() == 0


def test_a_target_without_weight_may_be_anything_and_learns_nothing() -> None:
    """Labels [-100, -100, 3]: the loss is that of the one token, the other rows' gradients are exactly 0."""
    x, w, _, _ = case(tokens=3)
    found = cross_entropy(x, w, torch.tensor([-100, -100, 3]), torch.tensor([0.0, 0.0, 1.0]), ALONE, vocab=50)
    torch.testing.assert_close(found, F.cross_entropy(x[2:] @ w.t(), torch.tensor([3])))
    (grad,) = torch.autograd.grad(found, [x])
    assert grad[:2].count_nonzero() == 0
    assert grad[2].count_nonzero() > 0


def test_nothing_to_learn_is_a_connected_zero() -> None:
    x, w, targets, _ = case()
    found = cross_entropy(x, w, targets, torch.zeros(37), ALONE, vocab=50)
    assert found == 0.0
    for grad in torch.autograd.grad(found, [x, w]):
        assert grad.count_nonzero() == 0


def test_the_logits_of_a_batch_are_never_whole() -> None:
    """The largest tensor that the loss makes is a chunk of logits or the gradient of the head."""
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes: list[int] = []

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, Tensor))
            return out

    x = torch.randn(512, 8, requires_grad=True)
    w = torch.randn(1000, 8, requires_grad=True)
    with Largest():
        torch.autograd.grad(
            cross_entropy(x, w, torch.randint(0, 1000, (512,)), torch.ones(512), ALONE, vocab=1000, chunk=32), [x, w]
        )
    assert max(sizes) <= 32 * 1000


def test_evaluation_makes_no_gradient() -> None:
    x, w, targets, weight = case()
    with torch.no_grad():
        found = cross_entropy(x, w, targets, weight, ALONE, vocab=50)
    assert not found.requires_grad


def test_low_precision_sums_in_float32() -> None:
    x, w, targets, weight = case(tokens=3000)
    expected = (F.cross_entropy((x.bfloat16() @ w.bfloat16().t()).float(), targets, reduction="none") * weight).sum()
    found = cross_entropy(x.bfloat16(), w, targets, weight, ALONE, vocab=50)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert [g.dtype for g in torch.autograd.grad(found, [x, w])] == [torch.float32, torch.float32]


# A loss whose tokens have given values: enough to check the arithmetic of means.


def given_losses(params: Params, batch: Batch, mesh: Mesh) -> LossSum:
    scale = params["scale"]
    assert isinstance(scale, Tensor)
    return LossSum((batch["value"] * batch["weight"]).sum() * scale, batch["weight"].sum())


def sgd(params: Params, grads: Params, lr: float) -> Params:
    return {name: params[name] - lr * grads[name] for name in params}  # pyright: ignore[reportOperatorIssue]


PLAIN = Optimizer(lambda params: {}, lambda grads, state, params, lr: (sgd(params, grads, lr), state))


def one_step(batch: Batch, mesh: Mesh = SINGLE, micro: int = 99) -> dict[str, float]:
    step = make_step(accumulate(value_and_grad(given_losses), micro), PLAIN, lambda s: 1.0, mesh=mesh)
    state, metrics = step(State(0, {"scale": torch.ones(())}, {}), batch)
    return metrics | {"scale": float(state.params["scale"])}  # pyright: ignore[reportArgumentType]


def rows(*losses: list[float], length: int = 8) -> Batch:
    value = torch.tensor([row + [99.0] * (length - len(row)) for row in losses])
    weight = torch.tensor([[1.0] * len(row) + [0.0] * (length - len(row)) for row in losses])
    return {"tokens": torch.zeros(len(losses), length, dtype=torch.long), "value": value, "weight": weight}


def test_accumulation_is_not_a_mean_of_means() -> None:
    """2 targets at 1.0 and 8 at 3.0 make 26 / 10, in one part or in two; the update is the mean's gradient."""
    batch = rows([1.0] * 2, [3.0] * 8)
    for micro in (1, 2):
        metrics = one_step(batch, micro=micro)
        assert metrics["loss"] == pytest.approx(2.6)
        assert metrics["scale"] == pytest.approx(1 - 2.6)
        assert metrics["grad_norm"] == pytest.approx(2.6)


@pytest.mark.parametrize("micro", [1, 2, 3, 4, 5])
def test_loss_and_norm_do_not_grow_with_the_parts(micro: int) -> None:
    metrics = one_step(rows(*[[2.0] * 4] * 5), micro=micro)  # five rows: the last part is short for 2, 3 and 4
    assert metrics["loss"] == pytest.approx(2.0)
    assert metrics["grad_norm"] == pytest.approx(2.0)


def test_targets_are_counted_over_ranks() -> None:
    """Rank 0 has 1 target at 4.0, rank 1 has 3 at 2.0: the loss is 10 / 4 on both, and so is the update."""
    batch = rows([4.0], [2.0] * 3)

    def rank(mesh: Mesh) -> dict[str, float]:
        return one_step({name: value[mesh.dp.index : mesh.dp.index + 1] for name, value in batch.items()}, mesh)

    for metrics in fake.run(rank, dp=2):
        assert metrics["loss"] == pytest.approx(2.5)
        assert metrics["scale"] == pytest.approx(1 - 2.5)


def test_a_part_with_nothing_to_learn_changes_nothing() -> None:
    alone, padded = one_step(rows([3.0, 1.0])), one_step(rows([3.0, 1.0], []), micro=1)
    assert padded["loss"] == alone["loss"]
    assert padded["scale"] == alone["scale"]
    nothing = one_step(rows([], []))
    assert (nothing["loss"], nothing["scale"]) == (0.0, 1.0)


def test_parts_hold_every_row_once() -> None:
    batch = {"tokens": torch.arange(7)[:, None]}
    assert torch.equal(torch.cat([part["tokens"] for part in split(batch, 3)]), batch["tokens"])
    with pytest.raises(ValueError, match="7 rows cannot be cut into 8"):
        split(batch, 8)


def test_huge_losses_stay_numbers() -> None:
    assert one_step(rows([800.0]))["loss"] == 800.0
    assert math.isfinite(one_step(rows([1e30]))["loss"])
