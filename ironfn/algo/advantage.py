"""Say how much better than others each of the texts is that a policy wrote after one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor


def advantages(
    rewards: Tensor,
    scale: Literal["group", "batch", "none"] = "group",
    *,
    deviation: Literal["sample", "population"] = "sample",
    eps: float = 1e-4,
) -> Tensor:
    """Return [groups, texts]: rewards less their group's mean, over a deviation plus ``eps``.

    rewards [groups, texts], NaN where a text has none because its grader failed: such a text has the advantage 0 and no
    part in any mean. scale: by the deviation inside the group (GRPO: Shao et al. 2024, arXiv 2402.03300, section
    4.1.2), of all rewards, or not at all (Dr. GRPO: Liu et al. 2025, arXiv 2503.20783). deviation: with n - 1 or with n
    below it. Rewards that are all alike give exactly 0.

    >>> advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), deviation="population", eps=0.0)
    tensor([[ 1.7321, -0.5774, -0.5774, -0.5774]])
    """
    real = ~rewards.isnan()
    least = torch.where(real, rewards, torch.inf).amin(1, keepdim=True)
    above = torch.where(real, rewards - least, 0.0)  # of rewards that are alike, exactly 0
    count = real.sum(1, keepdim=True)
    apart = torch.where(real, above - above.sum(1, keepdim=True) / count.clamp(min=1), 0.0)
    if scale == "none":
        return apart
    if scale == "batch":
        known = rewards[real]
        squares, count = (known - known.mean()).square().sum(), torch.tensor(len(known))
    else:
        squares = apart.square().sum(1, keepdim=True)
    below = (count - int(deviation == "sample")).clamp(min=1)
    return apart / ((squares / below).sqrt() + eps)


def repeats(ids: Sequence[int], window: int = 128) -> bool:
    """Tell whether a text goes round at its end: its last ``window`` ids are those before them (arXiv 2603.07777).

    >>> repeats([7, 1, 2, 1, 2], 2), repeats([1, 2, 1, 2, 3], 2), repeats([1, 2], 2)
    (True, False, False)
    """
    return len(ids) >= 2 * window and tuple(ids[-window:]) == tuple(ids[-2 * window : -window])
