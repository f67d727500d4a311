"""Set the learning rate of each step of a run.

Every schedule counts steps from 0 and takes ``lr`` (the peak), ``steps`` (of the run) and ``warmup``. Step t of the
warm-up has the rate lr (t + 1) / (warmup + 1): no step is wasted at 0, and step ``warmup`` is the first at the peak.
The decays end at ``final`` x lr on the last step, ``steps - 1``. With lr 1, 10 steps, warm-up 2 and final 0.1:

    step         0      1      2      3      4      5      6      7      8      9
    constant     0.3333 0.6667 1      1      1      1      1      1      1      1
    linear       0.3333 0.6667 1      0.8714 0.7429 0.6143 0.4857 0.3571 0.2286 0.1
    cosine       0.3333 0.6667 1      0.9554 0.8306 0.6501 0.4499 0.2694 0.1446 0.1
    polynomial²  0.3333 0.6667 1      0.7612 0.5592 0.3939 0.2653 0.1735 0.1184 0.1
    wsd, decay 4 0.3333 0.6667 1      1      1      1      0.775  0.55   0.325  0.1

Warm-up 0 starts at the peak. A run with no step left after the peak ends there, and one that is all warm-up (``warmup``
equal to ``steps``) ends just below it; a longer warm-up is an error. After the last step the last rate holds. A rate is
a function of the step alone, so a resumed run has the rates of the run that never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ironfn.spec.records import ScheduleSpec
from ironfn.types import Schedule


def constant(lr: float, steps: int, warmup: int = 0) -> Schedule:
    """Return the schedule that warms up and stays."""
    return _decay(lr, steps, warmup, lambda gone, left: 1.0)


def linear(lr: float, steps: int, warmup: int = 0, final: float = 0.0) -> Schedule:
    """Return the schedule that falls in a straight line to ``final`` x lr."""
    return polynomial(lr, steps, warmup, final, 1.0)


def cosine(lr: float, steps: int, warmup: int = 0, final: float = 0.0) -> Schedule:
    """Return the schedule that falls along half a cosine to ``final`` x lr (arXiv 1608.03983)."""
    _check_final(final)

    def share(gone: int, left: int) -> float:
        return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * gone / max(1, gone + left)))

    return _decay(lr, steps, warmup, share)


def polynomial(lr: float, steps: int, warmup: int = 0, final: float = 0.0, power: float = 2.0) -> Schedule:
    """Return the schedule whose distance from ``final`` x lr falls as (1 - progress)^power."""
    _check_final(final)
    if not 0.0 < power < math.inf:
        raise ValueError(f"schedule: power is {power}; it must be above 0")

    def share(gone: int, left: int) -> float:
        return final + (1.0 - final) * (1.0 - gone / max(1, gone + left)) ** power

    return _decay(lr, steps, warmup, share)


def wsd(lr: float, steps: int, warmup: int, decay: int, final: float = 0.0) -> Schedule:
    """Return the schedule that warms up, stays, and falls in a straight line over the last ``decay`` steps.

    Warm-up, stable, decay: Hu et al. 2024 (arXiv 2404.06395). ``decay`` 0 is `constant`. Where warm-up and decay
    fill the run, the peak lies between two steps; ValueError where they are longer.
    """
    _check_final(final)
    if decay < 0 or warmup + decay > steps:
        raise ValueError(
            f"schedule: {warmup} steps of warm-up and {decay} of decay do not fit in a run of {steps} steps; "
            "lower optim.schedule.warmup or decay_steps, or raise train.steps"
        )

    def share(gone: int, left: int) -> float:
        return 1.0 if left >= decay else final + (1.0 - final) * left / decay

    return _decay(lr, steps, warmup, share)


def make_schedule(spec: ScheduleSpec, lr: float, steps: int) -> Schedule:
    """Return the schedule that ``spec`` describes, for a run of ``steps`` with the peak ``lr``.

    ValueError where the phases do not fit in the run, naming the key to change.
    """
    match spec.kind:
        case "constant":
            return constant(lr, steps, spec.warmup)
        case "linear":
            return linear(lr, steps, spec.warmup, spec.final)
        case "cosine":
            return cosine(lr, steps, spec.warmup, spec.final)
        case "polynomial":
            return polynomial(lr, steps, spec.warmup, spec.final, spec.power)
        case "wsd":
            if spec.decay_steps == 0:
                raise ValueError("schedule: wsd has decay_steps 0 and so never decays; set it, or use kind: constant")
            return wsd(lr, steps, spec.warmup, spec.decay_steps, spec.final)


def _decay(lr: float, steps: int, warmup: int, share: Callable[[int, int], float]) -> Schedule:
    """Warm up, then give lr x share(steps since the peak, steps until the last one)."""
    if not 0.0 <= lr < math.inf:
        raise ValueError(f"schedule: lr is {lr}; it must be a finite number of at least 0")
    if steps < 1:
        raise ValueError(f"schedule: a run of {steps} steps has no rates; train.steps must be at least 1")
    if not 0 <= warmup <= steps:
        raise ValueError(
            f"schedule: warmup is {warmup} in a run of {steps} steps; it must lie between 0 and {steps}. "
            "Lower optim.schedule.warmup or raise train.steps"
        )

    def rate(step: int) -> float:
        assert step >= 0, step
        step = min(step, steps - 1)
        if step < warmup:
            return lr * (step + 1) / (warmup + 1)
        return lr * share(step - warmup, steps - 1 - step)

    return rate


def _check_final(final: float) -> None:
    if not 0.0 <= final <= 1.0:
        raise ValueError(f"schedule: final is {final}; it is a share of lr, between 0 and 1")
