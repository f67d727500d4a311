"""Be rewards of somebody's own, for `kind: function`: quick to import."""

from __future__ import annotations

from ironfn.rewards.values import Completion


def shortness(completion: Completion) -> float:
    """Give more to fewer tokens."""
    return 1 / (1 + len(completion.ids))


def sometimes(completion: Completion) -> float:
    """Fail where there is an a."""
    if "a" in completion.text:
        raise RuntimeError("no service")
    return float(len(completion.text) % 2)
