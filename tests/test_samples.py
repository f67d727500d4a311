"""What is learned of a rollout: which texts that came to no end are left out, and at which temperature."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

from drivers.samples import Rollout, Sample, passes, taught, told_of
from ironfn.algo.advantage import advantages
from ironfn.data.groups import Group
from ironfn.data.prompts import Prompt
from ironfn.generate.rollout import Written
from ironfn.model.arch import complete
from ironfn.rewards.manager import Reward
from ironfn.spec.grpo_records import GrpoSpec, StageSpec
from ironfn.spec.model_records import ModelSpec

ROUND = (*range(9), *range(128), *range(128))
LONG = tuple(range(300))
RIGHT = Reward("right", lambda texts: [], weight=1.0, low=0.0, high=1.0)
FORM = Reward("form", lambda texts: [], weight=0.2, low=0.0, high=1.0)
GRADERS = [RIGHT, FORM]
ARCH = complete(ModelSpec(vocab_size=8, width=16, layers=1, heads=2, ffn=8, context=16), 1)


def sample(reward: float | None, ids: Any = LONG, reason: Any = "length", right: Any = 1.0, form: Any = 1.0) -> Sample:
    return Sample(Written(ids, (-1.0,) * len(ids), reason), reward, {"right": right, "form": form})


GROUP = [
    sample(1.2),  # right, and cut off
    sample(0.4),  # so too: what it is too long by was taken off
    sample(1.2, ROUND),  # goes round
    sample(1.2, reason="stop"),
    sample(0.2, right=0.0),
    sample(1.0, form=0.0),
    sample(None, right="timeout: 10 s"),
    sample(0.0, (5,), reason="context", right=0.0, form=0.0),
]


def learned(truncated: Any, share: float = 1.0, seed: int = 0, groups: int = 1) -> list[Group]:
    rollout = Rollout(4, 1.0, list(range(7, 7 + groups)), [GROUP] * groups)
    prompts = [Prompt([1, 2], "?", {})] * groups
    spec = GrpoSpec(truncated=truncated, truncated_share=share)
    return taught(rollout, prompts, GRADERS, spec, ARCH, seed)


def test_all_masked_or_those_that_are_right_and_do_not_go_round() -> None:
    rewards = torch.tensor([[float("nan") if one.reward is None else one.reward for one in GROUP]])
    full = [value for value, one in zip(advantages(rewards)[0].tolist(), GROUP, strict=True) if one.reward is not None]
    (group,) = learned("learn")
    assert [one.advantage for one in group.completions] == full
    (group,) = learned("mask")
    assert [one.advantage for one in group.completions] == [full[3]]
    (group,) = learned("conditional")
    assert [one.advantage for one in group.completions] == [0.0, 0.0, *full[2:]]


def test_a_share_of_them_is_drawn_and_always_the_same() -> None:
    counts = []
    for share in (0.1, 0.3):
        groups = learned("conditional", share, groups=400)
        zero = [[one.advantage == 0 for one in group.completions] for group in groups]
        assert not any(any(each[2:]) for each in zero)
        counts.append(sum(map(sum, zero)))
        again = learned("conditional", share, groups=400)
        assert [[one.advantage for one in g.completions] for g in again] == [
            [one.advantage for one in g.completions] for g in groups
        ]
    # binomial of 800: six deviations are 51 and 78
    assert abs(counts[0] - 80) < 51
    assert abs(counts[1] - 240) < 78
    other = learned("conditional", 0.3, seed=1, groups=400)
    assert [[one.advantage for one in g.completions] for g in other] != [
        [one.advantage for one in g.completions] for g in learned("conditional", 0.3, groups=400)
    ]


@pytest.mark.parametrize(("truncated", "masked"), [("learn", 0), ("mask", 6), ("conditional", 2)])
def test_what_is_masked_is_counted(truncated: Any, masked: int) -> None:
    spec = GrpoSpec(truncated=truncated, truncated_share=1.0)
    told = told_of(Rollout(4, 0.7, [3], [GROUP]), GRADERS, spec, 0)
    assert told["masked"] == masked / 8
    assert told["truncated"] == 7 / 8
    assert told["temperature"] == 0.7
    assert told["failed"] == told["failed/right"] == 1


def test_who_passes() -> None:
    assert [passes(one, GRADERS) for one in GROUP] == [True, True, True, True, False, False, False, False]


def test_a_stage_begins_when_its_steps_were_taken() -> None:
    spec = GrpoSpec(temperature=0.6)
    assert spec.temperature_at(10**6) == 0.6
    spec = evolve(spec, stages={"hot": StageSpec(9, 1.3), "warm": StageSpec(4, 1.0)})
    assert [spec.temperature_at(step) for step in (0, 3, 4, 8, 9, 99)] == [0.6, 0.6, 1.0, 1.0, 1.3, 1.3]
