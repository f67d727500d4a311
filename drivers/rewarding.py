"""Make the rewards that a spec names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ironfn.rewards.code import code_reward
from ironfn.rewards.each import each
from ironfn.rewards.manager import Reward
from ironfn.rewards.math import final, math_reward, symbolic
from ironfn.rewards.sandbox import Bounds, Sandbox
from ironfn.rewards.text import keyword, matching, pattern, sections, soft_keyword
from ironfn.rewards.values import Completion, Grader
from ironfn.spec.records import GraderSpec

from .graders import function_pool, function_reward


def rewards_of(specs: Mapping[str, GraderSpec]) -> list[Reward]:
    """Return what grades completions, with whatever processes it needs. ValueError for what cannot be made."""
    return [
        Reward(name, _grader(one), weight=one.weight, low=one.low, high=one.high, on_failure=one.on_failure)
        for name, one in specs.items()
    ]


def _grader(spec: GraderSpec) -> Grader:
    def in_threads(function: Callable[[Completion], object], seconds: float = spec.seconds) -> Grader:
        return each(function, seconds=seconds)

    return {
        "math": lambda: math_reward(symbolic(seconds=spec.seconds), field=spec.answer),
        "exact": lambda: in_threads(_exact(spec.answer)),
        "keyword": lambda: in_threads(keyword(spec.words)),
        "soft_keyword": lambda: in_threads(soft_keyword(spec.words)),
        "sections": lambda: in_threads(sections(spec.words)),
        "pattern": lambda: matching(pattern(spec.pattern, seconds=spec.seconds)),
        "code": lambda: in_threads(
            code_reward(Sandbox(Bounds(wall=spec.seconds)), field=spec.answer), 3 * spec.seconds
        ),
        "function": lambda: function_reward(function_pool(spec.path, seconds=spec.seconds)),
    }[spec.kind]()


def _exact(field: str) -> Callable[[Completion], float]:
    """Return a reward of 1 for a text that is the row's field, or whose final answer is, white space aside."""

    def grade(completion: Completion) -> float:
        right, text = str(completion.field(field)).strip(), completion.text.strip()
        return float(right in (text, (final(text) or "").strip()))

    return grade
