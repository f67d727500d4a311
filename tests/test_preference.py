"""Objectives of preference: the values and gradients of trl's own code, and what papers and arithmetic say."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl import DPOTrainer, KTOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

from ironfn.loss.preference import (
    Objective,
    Scored,
    dpo,
    hinge,
    ipo,
    kto,
    orpo,
    robust,
    simpo,
    with_supervised,
)

PAIRS, LENGTH = 5, 9


class Case:
    """Hold log-probabilities of tokens, as a model might give them: of n chosen and then n rejected completions."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        sizes = torch.randint(1, LENGTH - 2, (2 * PAIRS,), generator=generator)
        self.mask = (torch.arange(LENGTH) >= LENGTH - sizes[:, None]).long()
        self.sizes = sizes.float()
        real = self.mask[:, 1:].float()
        self.log_probs = (-torch.rand(2 * PAIRS, LENGTH - 1, generator=generator) * 3 * real).requires_grad_()
        self.reference = (-torch.rand(2 * PAIRS, LENGTH - 1, generator=generator) * 3 * real).sum(1)

    def model(self, **_: Any) -> SimpleNamespace:
        """Be the model, to trl."""
        shown = torch.zeros_like(self.log_probs)
        return SimpleNamespace(log_probs=self.log_probs, entropy=shown, mean_logits=shown, is_top1=shown.bool())

    def scored(self, index: slice) -> Scored:
        return Scored(self.log_probs.sum(1)[index], self.reference[index], self.sizes[index])

    @property
    def sides(self) -> tuple[Scored, Scored]:
        return self.scored(slice(PAIRS)), self.scored(slice(PAIRS, None))


def trainer(**fields: Any) -> Any:
    """Return as much of a trainer as its loss reads."""
    same = {"gather": lambda x: x, "gather_for_metrics": lambda x: x}
    common = {
        "model": SimpleNamespace(training=True),
        "accelerator": SimpleNamespace(device="cpu", **same),
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "aux_loss_enabled": False,
        "precompute_ref_logps": True,
        "f_divergence_type": "reverse_kl",
        "ld_alpha": None,
        "use_weighting": False,
        "label_smoothing": 0.0,
        "loss_weights": [1.0],
    }
    return SimpleNamespace(**(common | fields))


def same(found: Tensor, expected: Tensor, case: Case) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    mine, theirs = (torch.autograd.grad(x, case.log_probs)[0] for x in (found, expected))
    real = case.mask[:, 1:].bool()
    torch.testing.assert_close(mine[real], theirs[real], rtol=1e-5, atol=1e-5)
    assert mine[real].abs().max() > 1e-3


@pytest.mark.parametrize(
    ("name", "objective", "fields"),
    [
        ("sigmoid", dpo(0.3), {}),
        ("robust", robust(0.3, 0.1), {"label_smoothing": 0.1}),
        ("hinge", hinge(0.3), {}),
        ("ipo", ipo(0.3), {}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_it_is_what_trl_computes(name: str, objective: Objective, fields: dict[str, Any]) -> None:
    case = Case()
    inputs = {
        "input_ids": torch.zeros_like(case.mask),
        "attention_mask": torch.ones_like(case.mask),
        "completion_mask": case.mask,
        "ref_chosen_logps": case.reference[:PAIRS],
        "ref_rejected_logps": case.reference[PAIRS:],
    }
    told = trainer(beta=0.3, loss_types=[name], **fields)
    expected = DPOTrainer._compute_loss(told, case.model, inputs, False)
    chosen, rejected = case.sides
    same(objective.loss(chosen, rejected).mean(), expected, case)
    if name != "ipo":  # whose rewards trl does not divide by the length that its loss divides by
        metrics = told._metrics["train"]
        assert objective.reward(chosen).mean().item() == pytest.approx(metrics["rewards/chosen"][0], rel=1e-5)
        assert objective.reward(rejected).mean().item() == pytest.approx(metrics["rewards/rejected"][0], rel=1e-5)


def test_label_smoothing_is_that_of_trl() -> None:
    """Its conservative loss without a reference is CPO's; the log ratio stands in for the log-probability."""
    case = Case()
    chosen, rejected = case.sides
    told = trainer(beta=0.3, loss_type="sigmoid", label_smoothing=0.1, alpha=0.0)
    losses, _, _ = CPOTrainer.cpo_loss(told, chosen.ratio, rejected.ratio)
    same(dpo(0.3, 0.1).loss(chosen, rejected).mean(), losses.mean(), case)


def test_simpo_is_that_of_trl() -> None:
    case = Case()
    chosen, rejected = case.sides
    told = trainer(beta=2.0, loss_type="simpo", simpo_gamma=0.7, alpha=0.0)
    losses, reward, _ = CPOTrainer.cpo_loss(told, chosen.mean, rejected.mean)
    found = simpo(2.0, 0.7)
    same(found.loss(chosen, rejected).mean(), losses.mean(), case)
    torch.testing.assert_close(found.reward(chosen).detach(), reward)


def test_orpo_is_that_of_trl() -> None:
    case = Case()
    chosen, rejected = case.sides
    losses, reward, *_ = ORPOTrainer.odds_ratio_loss(trainer(beta=0.3), chosen.mean, rejected.mean)
    found = orpo(0.3)
    same(found.loss(chosen, rejected).mean(), (-chosen.mean - losses).mean(), case)
    torch.testing.assert_close(found.reward(chosen).detach(), reward)


def test_orpo_is_finite_where_a_model_is_sure() -> None:
    sure = torch.tensor([0.0, -1e-30, -1e4], requires_grad=True)
    other = torch.tensor([-1.0, 0.0, 0.0], requires_grad=True)
    ones = torch.ones(3)
    loss = orpo(0.1).loss(Scored(sure, ones, ones), Scored(other, ones, ones))
    assert loss.isfinite().all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(loss.sum(), [sure, other]))


def test_kto_is_that_of_trl() -> None:
    case = Case()
    liked = torch.arange(2 * PAIRS) % 3 == 0
    inputs = {
        "input_ids": torch.zeros_like(case.mask),
        "attention_mask": torch.ones_like(case.mask),
        "completion_mask": case.mask,
        "ref_logps": case.reference,
        "ref_KL_logps": torch.zeros(2 * PAIRS),
        "label": liked,
    }
    told = trainer(beta=0.3, loss_type="kto", calculate_KL=True, desirable_weight=1.5, undesirable_weight=0.5)
    told._compute_kl_logps = lambda model, batch: torch.full((2 * PAIRS,), 0.4)
    expected = KTOTrainer._compute_loss(told, case.model, inputs, False)
    objective = kto(0.3, 1.5, 0.5)
    scored = case.scored(slice(None))
    same(objective.loss(scored, liked, torch.tensor(0.4)).mean(), expected, case)
    chosen = told._metrics["train"]["rewards/chosen"][0]
    assert objective.reward(scored)[liked].mean().item() == pytest.approx(chosen, rel=1e-5)


def test_the_supervised_term_is_that_of_trl() -> None:
    """Of one pair: over several, trl takes the mean of all tokens, the paper of each pair's."""
    case = Case()
    one = [0, PAIRS]
    inputs = {
        "input_ids": torch.zeros_like(case.mask[one]),
        "attention_mask": torch.ones_like(case.mask[one]),
        "completion_mask": case.mask[one],
        "ref_chosen_logps": case.reference[:1],
        "ref_rejected_logps": case.reference[PAIRS : PAIRS + 1],
    }
    shown = torch.zeros(2, LENGTH - 1)

    def model(**_: Any) -> SimpleNamespace:
        return SimpleNamespace(log_probs=case.log_probs[one], entropy=shown, mean_logits=shown, is_top1=shown.bool())

    told = trainer(beta=0.3, loss_types=["sigmoid", "sft"])
    told.loss_weights = [1.0, 0.7]
    expected = DPOTrainer._compute_loss(told, model, inputs, False)
    chosen, rejected = case.scored(slice(0, 1)), case.scored(slice(PAIRS, PAIRS + 1))
    same(with_supervised(dpo(0.3), 0.7).loss(chosen, rejected).mean(), expected, case)


def pair(chosen: float, rejected: float, of_chosen: float, of_rejected: float) -> tuple[Scored, Scored]:
    def one(a: float, b: float) -> Scored:
        return Scored(torch.tensor([a]), torch.tensor([b]), torch.ones(1))

    return one(chosen, of_chosen), one(rejected, of_rejected)


@pytest.mark.parametrize(
    ("objective", "expected"), [(dpo(0.1), 0.620957), (dpo(0.1, 0.1), 0.635957), (ipo(0.1), 12.25)]
)
def test_values_that_were_worked_out_by_hand(objective: Objective, expected: float) -> None:
    """Policy -10 and -12, reference -11 and -11.5: the log ratios differ by 1.5."""
    both = pair(-10.0, -12.0, -11.0, -11.5)
    assert objective.loss(*both).item() == pytest.approx(expected, abs=1e-6)
    assert (dpo(0.1).reward(both[0]) - dpo(0.1).reward(both[1])).item() == pytest.approx(0.15, abs=1e-6)


@pytest.mark.parametrize("objective", [dpo(0.1), dpo(0.1, 0.3)])
def test_a_policy_that_is_its_reference_has_log_2(objective: Objective) -> None:
    assert objective.loss(*pair(-7.0, -9.0, -7.0, -9.0)).item() == pytest.approx(math.log(2), abs=1e-7)


def test_a_robust_loss_is_right_on_average() -> None:
    """A share of pairs is the wrong way round: the expectation is the loss of none."""
    one, two = pair(-3.0, -4.0, -2.0, -5.0)
    flipped = 0.8 * robust(0.5, 0.2).loss(one, two) + 0.2 * robust(0.5, 0.2).loss(two, one)
    torch.testing.assert_close(flipped, dpo(0.5).loss(one, two))


@pytest.mark.parametrize("objective", [dpo(0.1), hinge(0.1), ipo(0.1), robust(0.1, 0.2)])
def test_a_penalty_never_lowers_a_loss(objective: Objective) -> None:
    both = pair(-3.0, -4.0, -2.0, -5.0)
    assert with_supervised(objective, 0.5).loss(*both) > objective.loss(*both)


@pytest.mark.parametrize("objective", [dpo(0.1), hinge(0.1), robust(0.1, 0.2), simpo(2.0, 0.5), orpo(0.1)])
def test_a_likelier_choice_lowers_a_loss(objective: Objective) -> None:
    """And the order of a pair matters: a swap is not the same loss."""
    chosen, rejected = pair(-3.0, -4.0, -3.5, -3.5)
    better, _ = pair(-2.5, -4.0, -3.5, -3.5)
    assert objective.loss(better, rejected) < objective.loss(chosen, rejected) < objective.loss(rejected, chosen)
