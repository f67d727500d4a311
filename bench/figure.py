"""Say what a measurement gave and what it has to give."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from attrs import frozen


@frozen
class Figure:
    """One measured value with the bar that it has to meet, such as ``>= 1.05``, and what it was computed from."""

    name: str
    value: float
    bar: str
    note: str = ""

    @property
    def met(self) -> bool:
        """Tell whether the value meets its bar."""
        sign, bound = self.bar.split()
        below, equal = self.value < float(bound), self.value == float(bound)
        return {"<": below, "<=": below or equal, ">": not (below or equal), ">=": not below, "==": equal}[sign]


def alternate(contenders: dict[str, Callable[[], object]], rounds: int, warmup: int = 1) -> dict[str, float]:
    """Return each contender's median seconds a call, measured in turns so that a noisy machine is fair to all."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(warmup + rounds):
        for name, call in contenders.items():
            start = time.perf_counter()
            call()
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}
