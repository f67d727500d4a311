"""Check what a policy that learns from rewards needs of the rest of a spec."""

from __future__ import annotations

from collections.abc import Iterator

from ironfn.spec.check_preference import shared_rows
from ironfn.spec.check_rewards import rewards
from ironfn.spec.records import GrpoSpec, RunSpec, TrainSpec
from ironfn.spec.structure import Path

_FORM, _AT = ("data", "form"), ("grpo",)


def policy(spec: RunSpec) -> Iterator[tuple[tuple[Path, ...], str]]:
    """Yield the faults of ``grpo``, as `spec.check` lists them."""
    if spec.data.form != "prompts":
        return
    grpo = spec.grpo
    yield from rewards((*_AT, "rewards"), grpo.rewards)
    if grpo.tokens >= spec.data.length:
        what = f"completions of {grpo.tokens} tokens leave no room for a prompt in rows of {spec.data.length}"
        yield ((*_AT, "tokens"), ("data", "length")), what
    if grpo.overlong >= grpo.tokens:
        what = f"{grpo.overlong} tokens are no part of the longest completion's {grpo.tokens}"
        yield ((*_AT, "overlong"), (*_AT, "tokens")), what
    if grpo.batches > grpo.prompts:
        what = f"{grpo.prompts} prompts cannot be parted into {grpo.batches} updates"
        yield ((*_AT, "batches"), (*_AT, "prompts")), what
    if grpo.loss != "clipped":
        for name in ("whole", "dual"):
            if getattr(grpo, name):
                yield ((*_AT, name), (*_AT, "loss")), f"is for clipped, and grpo.loss is {grpo.loss}; leave it out"
    if grpo.kl == "none" and grpo.reference is not None:
        yield ((*_AT, "reference"), (*_AT, "kl")), "nothing is held to it; set grpo.kl, such as k3"
    if grpo.kl != "none" and grpo.reference is None and spec.model.init_from is None:
        yield ((*_AT, "kl"), ("model", "init_from")), "holds a policy to a reference; set model.init_from"
    if grpo.replay_routing and spec.model.moe.experts == 0:
        what = "the model has no experts whose choice could be replayed; leave it out"
        yield ((*_AT, "replay_routing"), ("model", "moe", "experts")), what
    yield from _stages(grpo)
    yield from _beside(spec)


def _stages(grpo: GrpoSpec) -> Iterator[tuple[tuple[Path, ...], str]]:
    begun: dict[int, str] = {}
    for name, stage in grpo.stages.items():
        at = (*_AT, "stages", name)
        if stage.temperature <= 0:
            yield ((*at, "temperature"),), f"{stage.temperature:g} has to be above 0"
        if stage.step < 1:
            yield ((*at, "step"),), f"{stage.step} has to be at least 1; a run begins at grpo.temperature"
        elif (other := begun.setdefault(stage.step, name)) != name:
            what = f"{stage.step} is where {other} begins already; give each stage a step of its own"
            yield ((*at, "step"), (*_AT, "stages", other, "step")), what


def _beside(spec: RunSpec) -> Iterator[tuple[tuple[Path, ...], str]]:
    yield from shared_rows(spec)
    if spec.train.batch != TrainSpec().batch:
        what = "an update learns from grpo.prompts x grpo.group texts, parted into grpo.batches; leave it out"
        yield (("train", "batch"), _FORM), what
    weighed = [name for name, one in spec.data.sets.items() if one.weight != 1]
    for path in (("data", "sets", name, "weight") for name in weighed):
        yield (path, _FORM), "all prompts are asked alike often, whatever set they are of; leave it out"
    if spec.train.noise_scale_every is not None:
        what = "the gradient noise scale is that of rows, not of texts that share them; leave one of them out"
        yield (("train", "noise_scale_every"), _FORM), what
