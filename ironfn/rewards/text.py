"""Reward words and forms: keywords, sections in their order, regular expressions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from ironfn.rewards.values import Completion, Grader, Result
from ironfn.rewards.worker import Limits, Pool


def _found(words: Sequence[str]) -> Callable[[Completion], float]:
    """Return a function that gives the share of the words that stand in a text, whole and in any case."""
    if not words or not all(word.strip() for word in words):
        raise ValueError(f"the keywords are {list(words)}; give one at least, none of them empty")
    patterns = [re.compile(rf"(?<!\w){re.escape(word.strip())}(?!\w)", re.IGNORECASE) for word in words]
    return lambda completion: sum(bool(each.search(completion.text)) for each in patterns) / len(patterns)


def keyword(words: Sequence[str]) -> Callable[[Completion], float]:
    """Return a reward of 1 for a text with all of the words, whole and in any case, else 0."""
    share = _found(words)
    return lambda completion: float(share(completion) == 1.0)


def soft_keyword(words: Sequence[str]) -> Callable[[Completion], float]:
    """Return a reward of the share of the words that stand in a text.

    >>> soft_keyword(["sum", "total"])(Completion("", "The Sum is summed up"))
    0.5
    """
    return _found(words)


def sections(names: Sequence[str]) -> Callable[[Completion], float]:
    """Return a reward of 1 for a text that is these sections in order, none empty, and white space, else 0.

    >>> form = sections(["think", "answer"])
    >>> form(Completion("", "<think>2 + 2</think> <answer>4</answer>")), form(Completion("", "<answer>4</answer>"))
    (1.0, 0.0)
    """
    if not names or len(set(names)) < len(names) or not all(re.fullmatch(r"[\w-]+", name) for name in names):
        raise ValueError(f"the sections are {list(names)}; give names of letters, each once")

    def grade(completion: Completion) -> float:
        rest = completion.text
        for name in names:
            before, opened, rest = rest.partition(f"<{name}>")
            body, closed, rest = rest.partition(f"</{name}>")
            marks = [f"<{mark}{other}>" for other in names for mark in ("", "/")]
            if before.strip() or not (opened and closed and body.strip()) or any(mark in body for mark in marks):
                return 0.0
        return float(not rest.strip())

    return grade


def pattern(expression: str, *, whole: bool = False, seconds: float = 1.0, size: int = 1) -> Pool:
    """Return the process for `matching`: an expression may take exponential time, and only a process can be ended.

    whole: the text has to match from its beginning to its end. The dot is any character. ValueError for an expression
    that is none.
    """
    try:
        re.compile(expression)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"the regular expression {expression!r} is none: {error}") from None
    settings = {"expression": expression, "whole": whole}
    return Pool("ironfn.rewards.pattern_worker", settings, Limits(seconds=seconds), size)


def matching(pool: Pool) -> Grader:
    """Return a grader that gives 1 for a text that the pool's expression matches, else 0."""

    def grade(completions: Sequence[Completion]) -> list[Result]:
        return pool.every([completion.text for completion in completions])

    return grade
