"""The gradient noise scale equals a loop over rows, a closed form, and itself on every mesh and every split."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ironfn import tree
from ironfn.grad.noise import noise_scale, per_row_grads
from ironfn.grad.value_and_grad import value_and_grad
from ironfn.loss.lm import lm_loss
from ironfn.mesh import fake
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.model.attention import written_out
from ironfn.model.forward import Forward
from ironfn.model.init import init
from ironfn.model.tables import table
from ironfn.types import Batch, LossSum, Params
from tests.peers import make_arch

ARCH = make_arch("gpt2", 31, width=16, heads=2, layers=1)
LM = lm_loss(ARCH, Forward(attention=written_out))


def a_batch(rows: int) -> Batch:
    generator = torch.Generator().manual_seed(rows)
    tokens = torch.randint(0, ARCH.vocab, (rows, 10), generator=generator)
    weight = (torch.rand(rows, 9, generator=generator) < 0.7).double()
    weight[:, 0] = 1.0
    segment = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1]).expand(rows, -1)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weight": weight, "segment": segment}


def params() -> Params:
    return init(ARCH, 0, table(False), SINGLE, torch.float64)


def by_hand(batch: Batch) -> dict[str, float]:
    """Take every row's gradient by itself, as one vector, and use torch's own mean and unbiased variance."""
    vectors = []
    for row in range(len(batch["tokens"])):
        alone = {name: value[row : row + 1] for name, value in batch.items()}
        loss, grads = value_and_grad(lm_loss(ARCH))(params(), alone, SINGLE)
        vectors.append(torch.cat([g.flatten() for g in tree.leaves(grads)]) / loss.weight)
    grads = torch.stack(vectors)
    noise = float(grads.var(0, unbiased=True).sum())
    signal = float(grads.mean(0).square().sum()) - noise / len(grads)
    return {"noise_scale": noise / signal if signal > 0 else math.nan, "noise": noise, "signal": signal}


@pytest.mark.parametrize("at_once", [1, 2, 4, 7])
def test_it_is_a_loop_over_rows_however_many_are_held_at_once(at_once: int) -> None:
    batch = a_batch(5)
    found, expected = noise_scale(LM, params(), batch, SINGLE, at_once=at_once), by_hand(batch)
    assert found == pytest.approx(expected, rel=1e-9, nan_ok=True)


def test_ranks_that_share_the_rows_find_the_same() -> None:
    batch = a_batch(4)
    expected = by_hand(batch)

    def rank(mesh: Mesh) -> dict[str, float]:
        mine = {name: value.tensor_split(2)[mesh.dp.index] for name, value in batch.items()}
        return noise_scale(LM, params(), mine, mesh)

    for found in fake.run(rank, dp=2):
        assert found == pytest.approx(expected, rel=1e-9, nan_ok=True)


def linear(params: Params, batch: Batch, mesh: Mesh) -> LossSum:
    """Have the gradient ``tokens[i]`` for row i: the loss of a row is <w, x_i>."""
    weight = batch["weight"].sum()
    return LossSum((batch["tokens"] @ tree.leaf(params, "w")).sum() * weight, weight)


def rows(*vectors: list[float]) -> Batch:
    x = torch.tensor(vectors, dtype=torch.float64)
    return {"tokens": x, "weight": torch.ones(len(x), 1, dtype=torch.float64)}


W: Params = {"w": torch.zeros(2, dtype=torch.float64)}


def test_values_worked_out_by_hand() -> None:
    """Gradients (3, 1), (3, -1): mean (3, 0), tr Σ = 2, |G|² = 9 - 2 / 2 = 8, scale 2 / 8."""
    found = noise_scale(linear, W, rows([3.0, 1.0], [3.0, -1.0]), SINGLE)
    assert found == pytest.approx({"noise_scale": 0.25, "noise": 2.0, "signal": 8.0})


def test_equal_rows_have_no_noise_and_opposite_rows_no_signal() -> None:
    equal = noise_scale(linear, W, rows([3.0, 4.0], [3.0, 4.0], [3.0, 4.0]), SINGLE)
    assert equal == pytest.approx({"noise_scale": 0.0, "noise": 0.0, "signal": 25.0}, abs=1e-12)
    opposite = noise_scale(linear, W, rows([3.0, 4.0], [-3.0, -4.0]), SINGLE)
    assert math.isnan(opposite["noise_scale"])
    assert opposite["signal"] < 0


def test_it_estimates_the_true_scale_of_a_known_distribution() -> None:
    """x ~ N(μ, Σ) with |μ|² = 4 and tr Σ = 9 + 16: the scale is 25 / 4. Over 4000 rows the two parts come near."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.tensor([3.0, 4.0], dtype=torch.float64)
    x = torch.tensor([2.0, 0.0]) + spread * torch.randn(4000, 2, generator=generator, dtype=torch.float64)
    batch = {"tokens": x, "weight": torch.ones(4000, 1, dtype=torch.float64)}
    found = noise_scale(linear, W, batch, SINGLE, at_once=4000)
    assert found["noise"] == pytest.approx(25.0, rel=0.1)
    assert found["signal"] == pytest.approx(4.0, rel=0.2)


def test_its_parts_do_not_depend_on_the_batch_size_on_average() -> None:
    """The estimates are unbiased: the mean over every pair of 6 rows is the estimate over all 6."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 2, generator=generator, dtype=torch.float64) + 1.0

    def parts(chosen: Tensor) -> tuple[float, float]:
        found = noise_scale(linear, W, {"tokens": chosen, "weight": torch.ones(len(chosen), 1).double()}, SINGLE)
        return found["noise"], found["signal"]

    pairs = [parts(x[[i, j]]) for i in range(6) for j in range(i)]
    whole = parts(x)
    for place in (0, 1):
        assert sum(pair[place] for pair in pairs) / len(pairs) == pytest.approx(whole[place], rel=1e-9)


def test_a_row_counts_by_its_mean_and_not_by_its_tokens() -> None:
    batch = rows([3.0, 1.0], [3.0, -1.0])
    batch["weight"][0] = 7.0
    assert noise_scale(linear, W, batch, SINGLE)["noise"] == pytest.approx(2.0)


def test_one_row_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="at least two"):
        noise_scale(linear, W, rows([1.0, 0.0]), SINGLE)


def test_the_gradients_of_rows_add_up_to_the_batchs() -> None:
    batch = a_batch(3)
    each = tree.flatten(per_row_grads(LM, params(), batch, SINGLE))
    _, together = value_and_grad(LM)(params(), batch, SINGLE)
    weights = batch["weight"].sum(1)
    for path, grad in tree.flatten(together).items():
        torch.testing.assert_close(torch.einsum("r,r...->...", weights, each[path]), grad, msg=lambda m, p=path: p + m)
