"""What a policy wrote, and what it is taught of it: the same log-probabilities, each prompt once, no text lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ironfn import tree
from ironfn.algo.advantage import advantages
from ironfn.data.groups import Completion, Group, lay_groups
from ironfn.generate.engine import Generator
from ironfn.generate.rollout import Written, roll_out
from ironfn.generate.sampling import Sampling
from ironfn.grad.value_and_grad import value_and_grad
from ironfn.loss.policy import Objective, clipped, policy_loss
from ironfn.mesh.axis import SINGLE
from ironfn.model.arch import Arch, complete
from ironfn.model.init import init
from ironfn.model.tables import table
from ironfn.spec.records import ModelSpec, MoeSpec
from ironfn.types import Batch, LossSum, Params

PROMPTS = [[5], [7, 8, 9], [3, 1, 4, 1, 5, 9, 2, 6], [7, 8, 9, 10]]
END, LIMIT, WARMTH = 0, 9, 0.7
MODELS: dict[str, Any] = {
    "llama": ModelSpec(vocab_size=23, width=32, layers=2, heads=4, kv_heads=2, ffn=48, context=64, init_std=0.3),
    "gpt2": ModelSpec(
        preset="gpt2", vocab_size=23, width=32, layers=2, heads=4, ffn=48, context=64, init_std=0.3, norm="layer",
        positions="learned", mlp="gelu_tanh", attention_bias=True, mlp_bias=True, norm_bias=True,
    ),
    "windows": ModelSpec(
        vocab_size=23, width=32, layers=2, heads=4, ffn=48, context=64, init_std=0.3, windows=[4, 0], logit_softcap=8.0
    ),
    "mixtral": ModelSpec(
        vocab_size=23, width=32, layers=2, heads=4, ffn=48, context=64, init_std=0.3, moe=MoeSpec(experts=4)
    ),
}  # fmt: skip


def model_of(name: str) -> tuple[Params, Arch]:
    arch = complete(MODELS[name], 1)
    return init(arch, 0, table(False), SINGLE), arch


def written(params: Params, arch: Arch, version: int = 0, prompts: list[list[int]] = PROMPTS) -> list[list[Written]]:
    generator = Generator(params=params, arch=arch, version=version)
    streams: list[tuple[int | str, ...]] = [("prompt", *prompt) for prompt in prompts]
    return roll_out(generator, prompts, 4, LIMIT, Sampling(WARMTH, seed=1), frozenset([END]), streams)


def test_a_text_is_finished_at_whichever_end_comes_first() -> None:
    params, arch = model_of("llama")
    generator, stop = Generator(params=params, arch=arch, version=0), frozenset([7, 9])
    found = roll_out(generator, PROMPTS, 9, LIMIT, Sampling(1.5, seed=1), stop, [("text", *p) for p in PROMPTS])
    last: set[int] = set()
    for text in (text for group in found for text in group):
        assert not stop & set(text.ids[:-1])
        assert (text.reason == "stop") == (text.ids[-1] in stop)
        last.add(text.ids[-1])
    assert last > stop


def groups_of(found: list[list[Written]]) -> list[Group]:
    """Return groups that are rewarded for the share of even ids."""
    rewards = torch.tensor([[float(np.mean([i % 2 == 0 for i in each.ids])) for each in group] for group in found])
    told = advantages(rewards).tolist()
    return [
        Group(prompt, [Completion(w.ids, a, {"drawn": w.log_probs}) for w, a in zip(group, values, strict=True)])
        for prompt, group, values in zip(PROMPTS, found, told, strict=True)
    ]


def batch_of(groups: list[Group], length: int, **options: Any) -> Batch:
    arrays = lay_groups(groups, length, END, **options)
    batch = {name: torch.from_numpy(values) for name, values in arrays.items()}
    batch["temperature"] = torch.full_like(batch["drawn"], WARMTH)
    return batch | {"row": torch.arange(len(arrays["tokens"]))}


def judged(params: Params, arch: Arch, batch: Batch, mean: Any = "sequence") -> tuple[LossSum, Params]:
    loss = policy_loss(arch, Objective(clipped(), mean), penalties=False)
    return value_and_grad(loss)(params, batch, SINGLE)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_taught_has_the_log_probabilities_with_which_it_was_drawn(name: str) -> None:
    params, arch = model_of(name)
    found = written(params, arch)
    out, grads = judged(params, arch, batch_of(groups_of(found), 64))
    texts = float(out.weight)
    assert texts == 16
    assert float(out.metrics["gap"]) / texts <= 1e-5
    assert float(out.metrics["ratio"]) / texts == pytest.approx(1.0, abs=1e-5)
    assert float(out.metrics["clipped"]) == 0
    assert float(out.total) / texts == pytest.approx(0.0, abs=1e-5)
    assert tree.norm(grads) > 1e-3


def test_a_prompt_once_teaches_what_rows_of_their_own_teach() -> None:
    params, arch = model_of("llama")
    groups = groups_of(written(params, arch))
    moved = tree.map(lambda x: (x + 0.01).double(), params)
    alone = [Group(group.prompt, [each]) for group in groups for each in group.completions]
    together, apart = batch_of(groups, 64), batch_of(alone, 20)
    assert int((together["segment"] >= 0).sum()) < int((apart["segment"] >= 0).sum())
    for mean in ("sequence", "token"):
        (a, a_grads), (b, b_grads) = (judged(moved, arch, batch, mean) for batch in (together, apart))
        torch.testing.assert_close(a.total, b.total, rtol=1e-9, atol=1e-9)
        for path, leaf in tree.flatten(a_grads).items():
            torch.testing.assert_close(leaf, tree.flatten(b_grads)[path], rtol=1e-7, atol=1e-9)


def test_every_completion_stands_in_the_rows_once_whatever_their_length() -> None:
    draw = np.random.default_rng(0)
    for length in (12, 17, 40, 200):
        groups = [
            Group(
                draw.integers(1, 9, draw.integers(1, 5)).tolist(),
                [Completion(draw.integers(1, 9, draw.integers(0, 9)).tolist(), 1.0) for _ in range(5)],
            )
            for _ in range(6)
        ]
        rows = lay_groups(groups, length, END, rows=4)
        assert len(rows["tokens"]) % 4 == 0
        filled = int(np.flatnonzero((rows["segment"] >= 0).any(0))[-1]) + 1
        assert filled <= rows["tokens"].shape[1] <= min(length, filled + 15)
        seen: list[tuple[int, ...]] = []
        for row in range(len(rows["tokens"])):
            for segment in range(int(rows["segment"][row].max()) + 1):
                mine = (rows["segment"][row] <= segment) & (rows["until"][row] >= segment) & (rows["segment"][row] >= 0)
                asked = mine & (rows["weight"][row] > 0)
                assert rows["position"][row][mine].tolist() == list(range(int(mine.sum())))
                ids = [*rows["tokens"][row][mine].tolist(), int(rows["targets"][row][mine][-1])]
                seen.append((len(ids) - int(asked.sum()), *ids))
        expected = [
            (len(group.prompt), *group.prompt, *each.ids) for group in groups for each in group.completions if each.ids
        ]
        assert sorted(seen) == sorted(expected)


def test_what_no_row_can_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="longer than a row of 4"):
        lay_groups([Group([1, 2, 3], [Completion([4, 5, 6], 0.0)])], 4, END)


def test_nothing_to_learn_is_a_row_without_weight() -> None:
    rows = lay_groups([Group([1, 2], [Completion([], 0.0)])], 8, END, rows=2)
    assert rows["tokens"].shape == (2, 8)
    assert not rows["weight"].any()
    params, arch = model_of("llama")
    for mean in ("sequence", "token", "constant", "rollout"):
        batch = {name: torch.from_numpy(values) for name, values in rows.items()} | {"row": torch.arange(2)}
        loss = policy_loss(arch, Objective(clipped(whole=True), mean, 4, kl=None, entropy=0.1))
        out, grads = value_and_grad(loss)(params, batch, SINGLE)
        assert out.total == out.weight == 0
        assert tree.norm(grads) == 0


def test_a_prompt_draws_the_same_in_any_company_and_from_the_parameters_of_now() -> None:
    params, arch = model_of("llama")
    whole = written(params, arch)
    alone = written(params, arch, prompts=[PROMPTS[2]])[0]
    assert [each.ids for each in alone] == [each.ids for each in whole[2]]
    for a, b in zip(alone, whole[2], strict=True):
        assert a.log_probs == pytest.approx(b.log_probs, abs=1e-5)
    moved = tree.map(lambda x: x * 1.2, params)
    assert [each.ids for each in written(moved, arch)[2]] != [each.ids for each in whole[2]]
