"""Wait for one of some files, however high its number: select knows no more than the first 1,024."""

from __future__ import annotations

import math
import select


def readable(files: list[int], seconds: float | None) -> list[int]:
    """Return the files that can be read now, or are at their end, after so many seconds at most. None: no limit."""
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    return [file for file, _ in poll.poll(None if seconds is None else math.ceil(max(0.0, seconds) * 1000))]
