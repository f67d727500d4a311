"""Losses of a policy's own tokens: the values and gradients of trl's code, and what papers and arithmetic say."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl import GRPOTrainer

from ironfn import tree
from ironfn.algo.advantage import advantages
from ironfn.grad.value_and_grad import accumulate, value_and_grad
from ironfn.layout.reduce import reduce_grads
from ironfn.layout.table import shard, unshard
from ironfn.loss.log_probs import Places, asked_places
from ironfn.loss.policy import Objective, Surrogate, cispo, clipped, divergence, policy_loss, sapo
from ironfn.mesh import fake
from ironfn.mesh.axis import SINGLE, Mesh, sum_over_rows
from ironfn.model.arch import complete
from ironfn.model.init import init
from ironfn.model.tables import table
from ironfn.spec.records import ModelSpec
from ironfn.types import Batch, LossSum, Params

TEXTS, LONGEST = 6, 8


class Case:
    """Hold texts of several lengths, with log-probabilities as a model gives them, now and when they were drawn."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        sizes = torch.randint(1, LONGEST + 1, (TEXTS,), generator=generator)
        self.mask = (torch.arange(LONGEST) < sizes[:, None]).float()

        def drawn(spread: float, around: Tensor | float = -1.5) -> Tensor:
            return around + spread * torch.randn(TEXTS, LONGEST, generator=generator)

        self.log_probs = drawn(0.4).requires_grad_()
        self.old, self.reference = drawn(0.3, self.log_probs.detach()), drawn(0.3, self.log_probs.detach())
        self.entropy = drawn(0.2, 2.0).requires_grad_()
        self.advantages = torch.randn(TEXTS, generator=generator)

    def ours(self, objective: Objective) -> Tensor:
        """Return our mean."""
        batch: Batch = {
            "weight": self.mask, "targets": self.mask.long(), "drawn": self.old, "reference": self.reference,
            "segment": torch.zeros_like(self.mask, dtype=torch.long),
            "advantage": self.advantages[:, None].expand_as(self.mask),
            "share": torch.full_like(self.mask, float(self.mask.sum()) / TEXTS),
        }  # fmt: skip
        places = asked_places(batch)
        log_p, entropy = (x.flatten()[places.at] for x in (self.log_probs, self.entropy))
        out, _ = objective(log_p, entropy, places, batch)
        return out.total / out.weight

    def theirs(self, loss_type: str, **settings: Any) -> Tensor:
        """Return the mean of trl's own code."""
        options = {"delta": None, "use_bias_correction_kl": False, "sapo_temperature_pos": 1.0}
        options |= {"sapo_temperature_neg": 1.05, "steps_per_generation": 1}
        fields: dict[str, Any] = {
            "importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.0,
            "loss_type": loss_type, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None,
            "use_vllm": False, "max_completion_length": LONGEST, "current_gradient_accumulation_steps": 1,
            "_entropy_bonus_enabled": False, "use_adaptive_entropy": False, "entropy_coef": 0.0,
            "aux_loss_enabled": False, "_metrics": defaultdict(lambda: defaultdict(list)),
            "model": SimpleNamespace(training=True),
            "accelerator": SimpleNamespace(
                num_processes=1, device="cpu", sync_gradients=False, gather=lambda x: x, reduce=lambda x, **_: x
            ),
            "_get_per_token_logps_and_entropies": lambda *_, **__: (self.log_probs, self.entropy, None),
        }  # fmt: skip
        fields |= {name: value for name, value in settings.items() if name in fields}
        args = SimpleNamespace(**(options | {name: value for name, value in settings.items() if name in options}))
        ids = torch.ones(TEXTS, LONGEST, dtype=torch.long)
        inputs = {
            "prompt_ids": ids[:, :2], "prompt_mask": ids[:, :2], "completion_ids": ids, "completion_mask": self.mask,
            "advantages": self.advantages, "old_per_token_logps": self.old, "ref_per_token_logps": self.reference,
            "num_items_in_batch": self.mask.sum(),
        }  # fmt: skip
        return GRPOTrainer._compute_loss(SimpleNamespace(args=args, **fields), None, inputs)  # pyright: ignore[reportArgumentType]


MEANS = {"grpo": "sequence", "dapo": "rollout", "bnpo": "token", "dr_grpo": "constant"}
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "clipped": (clipped(), {}),
    "two bounds": (clipped(0.1, 0.3), {"epsilon_low": 0.1, "epsilon_high": 0.3}),
    "dual": (clipped(dual=1.1), {"delta": 1.1}),
}


def same(found: Tensor, expected: Tensor, case: Case) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    inputs = [case.log_probs, case.entropy]
    mine, theirs = (
        torch.autograd.grad(x, inputs, allow_unused=True, materialize_grads=True) for x in (found, expected)
    )
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert mine[0].abs().max() > 1e-3


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss_type", MEANS)
def test_clipped_losses_are_those_of_trl(loss_type: str, way: str) -> None:
    case, (surrogate, settings) = Case(), WAYS[way]
    objective = Objective(surrogate, MEANS[loss_type], LONGEST)  # type: ignore[arg-type]
    same(case.ours(objective), case.theirs(loss_type, **settings), case)


@pytest.mark.parametrize(
    ("objective", "loss_type", "settings"),
    [
        (Objective(clipped(whole=True), "sequence"), "grpo", {"importance_sampling_level": "sequence"}),
        (Objective(cispo(1.1), "token"), "cispo", {"epsilon_high": 1.1}),
        (Objective(sapo(), "sequence"), "sapo", {}),
        (Objective(sapo(0.7, 1.4), "sequence"), "sapo", {"sapo_temperature_pos": 0.7, "sapo_temperature_neg": 1.4}),
        (Objective(clipped(), "sequence", kl=("k3", 0.3)), "grpo", {"beta": 0.3}),
        (Objective(clipped(), "token", entropy=0.2), "bnpo", {"_entropy_bonus_enabled": True, "entropy_coef": 0.2}),
    ],
    ids=["gspo", "cispo", "sapo", "sapo warm", "kl", "entropy"],
)
def test_other_losses_are_those_of_trl(objective: Objective, loss_type: str, settings: dict[str, Any]) -> None:
    case = Case()
    same(case.ours(objective), case.theirs(loss_type, **settings), case)


def of_two_texts(mean: Any) -> float:
    """Return the mean of a text of 4 tokens whose losses are 1 and one of 1 token whose loss is 6."""
    plain = Surrogate(lambda log_ratio, log_p, advantage: (advantage, torch.zeros_like(advantage, dtype=torch.bool)))
    places = Places(torch.arange(5), torch.zeros(5, dtype=torch.long), (4, 1), torch.tensor([0, 1]))
    values = torch.tensor([[1.0, 1.0, 1.0, 1.0, 6.0]])
    batch = {"drawn": torch.zeros(1, 5), "advantage": values, "share": torch.full((1, 5), 2.5)}
    out, _ = Objective(plain, mean, 8)(torch.zeros(5), torch.zeros(5), places, batch)
    return float(out.total / out.weight)


@pytest.mark.parametrize(("mean", "value"), [("token", 2.0), ("sequence", 3.5), ("constant", 0.625), ("rollout", 2.0)])
def test_which_mean(mean: str, value: float) -> None:
    assert of_two_texts(mean) == pytest.approx(value)


@pytest.mark.parametrize(("kind", "value"), [("k1", 0.5), ("k2", 0.125), ("k3", 0.106531)])
def test_estimators_of_the_divergence(kind: Any, value: float) -> None:
    assert float(divergence(kind, torch.tensor(-1.0), torch.tensor(-1.5))) == pytest.approx(value, abs=1e-6)
    assert torch.isfinite(divergence(kind, torch.tensor(-900.0), torch.tensor(-1.0)))


def test_advantages_of_groups() -> None:
    one = torch.tensor([[1.0, 0, 0, 0]])
    torch.testing.assert_close(advantages(one), torch.tensor([[1.4997, -0.4999, -0.4999, -0.4999]]), atol=1e-4, rtol=0)
    assert advantages(one, deviation="population", eps=0.0)[0, 0] == pytest.approx(1.7321, abs=1e-4)
    pair = advantages(torch.tensor([[1.0, 0.0], [11.0, 10.0]]))
    torch.testing.assert_close(pair[0], pair[1])
    assert pair[0, 0] == -pair[0, 1] > 0
    whole = torch.tensor([[1.0, 0.0], [11.0, 10.0]])
    expected = torch.tensor([[0.5, -0.5], [0.5, -0.5]]) / (whole.std() + 1e-4)
    torch.testing.assert_close(advantages(whole, "batch"), expected)
    assert advantages(whole, "none").tolist() == [[0.5, -0.5], [0.5, -0.5]]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_groups_that_teach_nothing_and_graders_that_fail(scale: Any) -> None:
    rewards = torch.tensor([[2.1, 2.1, 2.1], [0.1, math.nan, 0.7], [math.nan, 3.0, math.nan], [math.nan] * 3])
    found = advantages(rewards, scale)
    assert found[0].tolist() == [0.0, 0.0, 0.0]
    assert found[1, 1] == 0
    assert found[1, 0] == -found[1, 2] < 0
    assert not found[2:].any()


OBJECTIVES = {
    "sequence": Objective(clipped(0.1, 0.2, 3.0), "sequence", kl=("k3", 0.1), entropy=0.05),
    "token": Objective(clipped(whole=True), "token", kl=("k1", 0.1)),
    "constant": Objective(sapo(), "constant", 6, entropy=0.1),
    "rollout": Objective(cispo(1.2), "rollout", kl=("k2", 0.1)),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_loss_is_the_same_on_every_mesh(name: str) -> None:
    """dp 2, tp 2 and sequence parallelism, whole or by micro-batches, in float64: value, gradient and metrics."""
    arch = complete(ModelSpec(vocab_size=14, width=16, layers=1, heads=4, kv_heads=2, ffn=24, context=16), 1)
    params = tree.map(lambda x: x.double(), init(arch, 0, table(False), SINGLE))
    generator = torch.Generator().manual_seed(1)
    shape = (4, 8)
    batch: Batch = {
        "tokens": torch.randint(0, arch.vocab, shape, generator=generator),
        "targets": torch.randint(0, arch.vocab, shape, generator=generator),
        "weight": (torch.arange(8) >= torch.tensor([[2], [4], [7], [3]])).double().expand(shape).clone(),
        "position": torch.arange(8).expand(shape).clone(), "row": torch.arange(4),
        "segment": torch.zeros(shape, dtype=torch.long),
        "share": torch.full(shape, 4.0).double(), "temperature": torch.full(shape, 0.8).double(),
    }  # fmt: skip
    for field in ("drawn", "reference"):
        batch[field] = -5 + torch.randn(shape, generator=generator).double()
    batch["advantage"] = torch.randn(4, 1, generator=generator).double().expand(shape).clone()
    loss = policy_loss(arch, OBJECTIVES[name], chunk=3)

    def outcome(mesh: Mesh, micro: int = 4) -> tuple[LossSum, Params]:
        mine = {n: x.tensor_split(mesh.shares)[mesh.share] for n, x in batch.items()}
        layout = table(mesh.sequence_parallel)

        out, grads = accumulate(value_and_grad(loss), micro)(shard(params, layout, mesh), mine, mesh)
        grads = unshard(reduce_grads(grads, layout, mesh, None, 1 << 20), layout, mesh)
        sums = [out.total, out.weight, *out.metrics.values()]
        joined = sum_over_rows(torch.stack([x.double() for x in sums]), mesh) if mesh.shares > 1 else torch.stack(sums)
        total, weight, *rest = joined.unbind()
        return LossSum(total, weight, dict(zip(out.metrics, rest, strict=True))), grads

    alone, expected = outcome(SINGLE)
    found = [outcome(SINGLE, 1)]
    for dp, tp, parallel in ((2, 1, False), (1, 2, False), (1, 2, True)):
        found += fake.run(lambda mesh: outcome(mesh), dp=dp, tp=tp, sequence_parallel=parallel)
    for out, grads in found:
        for a, b in zip(
            (out.total, out.weight, *out.metrics.values()),
            (alone.total, alone.weight, *alone.metrics.values()),
            strict=True,
        ):
            torch.testing.assert_close(a.double(), b.double(), rtol=1e-9, atol=1e-11)
        for path, leaf in tree.flatten(grads).items():
            torch.testing.assert_close(leaf, tree.flatten(expected)[path], rtol=1e-9, atol=1e-11)


def test_the_first_step_has_ratio_one_no_loss_and_a_gradient() -> None:
    case = Case()
    case.old = case.log_probs.detach().clone()
    centred = case.advantages - case.advantages.mean()
    case.advantages = centred
    found = case.ours(Objective(clipped(), "sequence"))
    assert found.item() == pytest.approx(0, abs=1e-6)
    assert torch.autograd.grad(found, case.log_probs)[0].abs().max() > 1e-3
