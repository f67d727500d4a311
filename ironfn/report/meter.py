"""Tell the pace, the time and the memory of a run. The clock is an argument."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import torch
from attrs import define, field


@define
class Meter:
    """Keep the pace of a run since the last look, without the time of evaluations and saves.

    steps: the run's last step. step: where this start begins. before: seconds that earlier starts spent.
    clock: seconds that only grow, such as ``time.perf_counter``.
    """

    steps: int
    step: int
    before: float
    clock: Callable[[], float]
    _start: float = field(init=False)
    _mark: float = field(init=False)
    _away: float = field(init=False, default=0.0)
    _pace: float = field(init=False, default=0.0)

    def __attrs_post_init__(self) -> None:
        self._start = self._mark = self.clock()

    @property
    def seconds(self) -> float:
        """Return the seconds spent in the run so far, over all its starts."""
        return self.before + self.clock() - self._start

    @contextmanager
    def away(self) -> Generator[None]:
        """Leave the time inside out of the pace: it is no training."""
        left = self.clock()
        try:
            yield
        finally:
            self._away += self.clock() - left

    def look(self, step: int, tokens: int) -> tuple[float, float]:
        """Return tokens/s since the last look and the seconds left, when ``step`` steps are done.

        tokens: trained on since the last look, over all ranks. The seconds left follow a smoothed pace.
        """
        now = self.clock()
        spent = max(now - self._mark - self._away, 1e-9)
        steps = max(step - self.step, 1)
        pace = spent / steps
        self._pace = pace if self._pace == 0.0 else 0.7 * self._pace + 0.3 * pace
        self.step, self._mark, self._away = step, now, 0.0
        return tokens / spent, self._pace * max(self.steps - step, 0)


def peak_memory(device: torch.device) -> int:
    """Return the most bytes used so far: of the GPU's memory by tensors, or of the machine's by this process.

    0 where the system does not tell.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():  # unlike getrusage, this does not count the parent that forked us
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return 0
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024
