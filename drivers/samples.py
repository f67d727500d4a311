"""Hold what a policy wrote, what it was worth, and what is learned of it."""

from __future__ import annotations

import json
import math
import statistics
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from attrs import asdict, evolve, frozen

from ironfn import rng
from ironfn.algo.advantage import advantages, repeats
from ironfn.algo.step import Metrics
from ironfn.data.groups import Completion, Group
from ironfn.data.prompts import Prompt
from ironfn.generate.rollout import Written
from ironfn.model.arch import Arch
from ironfn.rewards.manager import Graded, Reward
from ironfn.rewards.values import Score
from ironfn.spec.records import GrpoSpec


@frozen
class Sample:
    """Hold a completion: what was written, its reward (None: its graders failed), and what each of them gave."""

    written: Written
    reward: float | None
    parts: dict[str, float | str]


@frozen
class Rollout:
    """Hold what was written at one step and temperature: the places of its prompts in the walk, and the completions."""

    step: int
    temperature: float
    numbers: list[int]
    groups: list[list[Sample]]

    @property
    def rewards(self) -> torch.Tensor:
        """Return [prompts, completions], NaN where there is none."""
        return torch.tensor([[math.nan if s.reward is None else s.reward for s in group] for group in self.groups])


def as_json(value: Any) -> Any:
    """Return a record of this module, or a completion, as what JSON can hold."""
    return asdict(value, value_serializer=lambda _, __, x: b64encode(x).decode() if isinstance(x, bytes) else x)


def written(told: dict[str, Any]) -> Written:
    """Read a completion that was written as JSON."""
    experts, trunk = (b64decode(told[name]) for name in ("experts", "trunk"))
    return Written(tuple(told["ids"]), tuple(told["log_probs"]), told["reason"], experts, trunk)


def sealed(rollout: Rollout) -> bytes:
    """Return a rollout as bytes that tell when they are damaged."""
    data = json.dumps(as_json(rollout)).encode()
    return xxhash.xxh3_128_hexdigest(data).encode() + b"\n" + data


def unsealed(data: bytes, step: int) -> Rollout | None:
    """Read what `sealed` wrote. None where it was damaged, or is the rollout of another step."""
    seal, _, told = data.partition(b"\n")
    if seal != xxhash.xxh3_128_hexdigest(told).encode():
        return None
    rollout: dict[str, Any] = json.loads(told)
    groups = [
        [Sample(written(one["written"]), one["reward"], one["parts"]) for one in group] for group in rollout["groups"]
    ]
    found = Rollout(rollout["step"], rollout["temperature"], rollout["numbers"], groups)
    return found if found.step == step else None


def parts_of(graded: Graded) -> dict[str, float | str]:
    """Return what each reward gave a completion: a number, or why there is none."""
    return {
        name: float(result.value) if isinstance(result, Score) else f"{result.kind}: {result.what}"
        for name, result in graded.parts.items()
    }


def mean_of(groups: Sequence[Sequence[Sample]]) -> float:
    """Return the mean reward of all that have one, NaN where none has."""
    known = [one.reward for group in groups for one in group if one.reward is not None]
    return statistics.fmean(known) if known else math.nan


def differs(group: Sequence[Sample]) -> bool:
    """Tell whether a group's rewards teach anything."""
    known = [sample.reward for sample in group if sample.reward is not None]
    return len(set(known)) > 1


def best(rollout: Rollout, count: int) -> Rollout:
    """Keep as many groups as were wanted: those that teach first, in their order."""
    order = sorted(range(len(rollout.groups)), key=lambda k: not differs(rollout.groups[k]))[:count]
    return evolve(rollout, numbers=[rollout.numbers[k] for k in order], groups=[rollout.groups[k] for k in order])


def passes(sample: Sample, rewards: Sequence[Reward]) -> bool:
    """Tell whether a completion got the most that its graders give together, whatever was taken off it since."""
    most = sum(max(reward.weight * reward.low, reward.weight * reward.high) for reward in rewards)
    given = [sample.parts[reward.name] for reward in rewards]
    if sample.reward is None or not all(isinstance(value, float) for value in given):
        return False
    return sum(r.weight * float(value) for r, value in zip(rewards, given, strict=True)) >= most - 1e-9


def taught(
    rollout: Rollout, prompts: Sequence[Prompt], rewards: Sequence[Reward], grpo: GrpoSpec, arch: Arch, seed: int
) -> list[Group]:
    """Return what is learned of a rollout: the same on every rank and in every replay."""

    def chosen(data: bytes, ids: int) -> np.ndarray | None:
        if not grpo.replay_routing or arch.moe is None:
            return None
        return np.frombuffer(data, np.int16).reshape(ids, len(arch.expert_layers), arch.moe.top_k)

    better = advantages(rollout.rewards, grpo.scale, deviation=grpo.deviation).tolist()
    masked = set(_masked(rollout, rewards, grpo, seed))
    alone = grpo.truncated == "mask"
    return [
        Group(prompt.ids, [
            Completion(
                one.written.ids, 0.0 if (k, i) in masked else value, {"drawn": one.written.log_probs},
                chosen(one.written.experts, len(one.written.ids)),
            )
            for i, (one, value) in enumerate(zip(samples, values, strict=True))
            if one.reward is not None and not (alone and (k, i) in masked)
        ], chosen(samples[0].written.trunk, len(prompt.ids) - 1))
        for k, (prompt, samples, values) in enumerate(zip(prompts, rollout.groups, better, strict=True))
    ]  # fmt: skip


def _masked(rollout: Rollout, rewards: Sequence[Reward], grpo: GrpoSpec, seed: int) -> Iterator[tuple[int, int]]:
    """Yield which completions came to no end and are not learned from for that: see `GrpoSpec.truncated`."""
    for k, group in enumerate(rollout.groups):
        for i, one in enumerate(group):
            if grpo.truncated == "learn" or one.written.reason == "stop" or one.reward is None:
                continue
            if grpo.truncated == "conditional":
                draw = torch.rand((), generator=rng.generator(seed, "truncated", rollout.step, rollout.numbers[k], i))
                if not passes(one, rewards) or repeats(one.written.ids) or float(draw) >= grpo.truncated_share:
                    continue
            yield k, i


def told_of(rollout: Rollout, rewards: Sequence[Reward], grpo: GrpoSpec, seed: int) -> Metrics:
    """Return the metrics of a rollout."""
    samples = [sample for group in rollout.groups for sample in group]
    known = [sample.reward for sample in samples if sample.reward is not None]
    told: Metrics = {
        "reward": statistics.fmean(known) if known else math.nan,
        "reward_std": statistics.pstdev(known) if known else math.nan,
        "failed": float(len(samples) - len(known)),
        "alike": 1 - sum(map(differs, rollout.groups)) / max(len(rollout.groups), 1),
        "length": statistics.fmean(len(sample.written.ids) for sample in samples),
        "truncated": sum(sample.written.reason != "stop" for sample in samples) / len(samples),
        "masked": sum(1 for _ in _masked(rollout, rewards, grpo, seed)) / len(samples),
        "temperature": rollout.temperature,
    }
    for name in (reward.name for reward in rewards):
        given = [x for sample in samples if isinstance(x := sample.parts[name], float)]
        told[f"rewards/{name}"] = statistics.fmean(given) if given else math.nan
        told[f"failed/{name}"] = float(len(samples) - len(given))
    return told
