"""Make the rewards that a spec names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from attrs import frozen

from ironfn.rewards.code import code_reward
from ironfn.rewards.each import each
from ironfn.rewards.gym import gym_pool, gym_reward
from ironfn.rewards.judge import SYSTEM, Judge, judged
from ironfn.rewards.manager import Reward
from ironfn.rewards.math import final, math_reward, mentioned, symbolic
from ironfn.rewards.sandbox import Bounds, Sandbox
from ironfn.rewards.text import keyword, matching, pattern, sections, soft_keyword
from ironfn.rewards.values import Completion, Grader, Result
from ironfn.spec.records import GraderSpec, RunSpec

from .graders import function_pool, function_reward, key_from
from .scorer import scorer


def rewards_of(spec: RunSpec, device: torch.device, *, grades: bool = True) -> list[Reward]:
    """Return what grades completions, with whatever processes it needs. ValueError for what cannot be made.

    There is none where a run answers no prompts.
    device: for reward models. grades: whether this rank is to grade; others know but the names and weights.
    """
    if spec.data.form != "prompts":
        return []
    made = _Making(device, chat=spec.sft.prompts == "chat")
    return [
        Reward(
            name, _made(name, one, made) if grades else _elsewhere, weight=one.weight, low=one.low, high=one.high,
            on_failure=one.on_failure,
        )
        for name, one in spec.grpo.rewards.items()
    ]  # fmt: skip


def _elsewhere(_: Sequence[Completion]) -> list[Result]:
    raise AssertionError("another rank grades")


@frozen
class _Making:
    """Hold what a grader may need beside its own spec. chat: whether a prompt that is a text is asked as a message."""

    device: torch.device
    chat: bool


def _made(name: str, spec: GraderSpec, making: _Making) -> Grader:
    try:
        return _grader(spec, making)
    except ValueError as error:
        raise ValueError(f"grpo.rewards.{name}: {error}") from error


def _grader(spec: GraderSpec, making: _Making) -> Grader:
    seconds = (60.0 if spec.kind == "judge" else 10.0) if spec.seconds is None else spec.seconds

    def in_threads(function: Callable[[Completion], object], most: float = seconds, threads: int = 4) -> Grader:
        return each(function, seconds=most, threads=threads)

    makers: Mapping[str, Callable[[], Grader]] = {
        "math": lambda: math_reward(
            symbolic(seconds=seconds), field=spec.answer, find=mentioned if spec.find == "number" else final
        ),
        "exact": lambda: in_threads(_exact(spec.answer)),
        "keyword": lambda: in_threads(keyword(spec.words)),
        "soft_keyword": lambda: in_threads(soft_keyword(spec.words)),
        "sections": lambda: in_threads(sections(spec.words)),
        "pattern": lambda: matching(pattern(spec.pattern, seconds=seconds)),
        "code": lambda: in_threads(code_reward(Sandbox(Bounds(wall=seconds)), field=spec.answer), 3 * seconds),
        "function": lambda: function_reward(function_pool(spec.path, seconds=seconds)),
        "gym": lambda: gym_reward(gym_pool(seconds=seconds)),
        # the look-up of a name is in nobody's hands, and gets a little more
        "judge": lambda: in_threads(judged(_judge(spec, seconds)), seconds + 10, spec.judge.together),
        "model": lambda: scorer(spec.path, making.device, chat=making.chat, squash=spec.squash),
    }
    return makers[spec.kind]()


def _judge(spec: GraderSpec, seconds: float) -> Judge:
    told = spec.judge
    return Judge(
        url=told.url.rstrip("/"), model=told.model, key="" if told.key is None else key_from(told.key),
        system=told.prompt or SYSTEM, fields=tuple(told.fields), low=told.low, high=told.high, tokens=told.tokens,
        seconds=seconds, tries=told.tries, failures=told.failures, rest=told.rest, remembered=told.remembered,
    )  # fmt: skip


def _exact(field: str) -> Callable[[Completion], float]:
    """Return a reward of 1 for a text that is the row's field, or whose final answer is, white space aside."""

    def grade(completion: Completion) -> float:
        right, text, last = str(completion.field(field)).strip(), completion.text.strip(), final(completion.text)
        return float(right == text or (last is not None and right == last.strip()))

    return grade
