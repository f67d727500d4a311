"""Be rewards of somebody's own, for `kind: function`: quick to import."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from ironfn.rewards.values import Completion


def shortness(completion: Completion) -> float:
    """Give more to fewer tokens."""
    return 1 / (1 + len(completion.ids))


def sometimes(completion: Completion) -> float:
    """Fail where there is an a."""
    if "a" in completion.text:
        raise RuntimeError("no service")
    return float(len(completion.text) % 2)


def always_fails(completion: Completion) -> float:
    """Have no score for anything."""
    raise RuntimeError("no service")


def kills_itself(completion: Completion) -> float:
    """End the process that asks it, as a signal of somebody else would."""
    os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


def waits_once(completion: Completion) -> float:
    """Write into the file of RWD_MARK which process this is, and wait until it holds something else.

    Once, for the first text of some length after the file of RWD_AFTER is there; all others get a score at once.
    """
    mark, mine = Path(os.environ["RWD_MARK"]), f"{os.getpid()}\n"
    if len(completion.ids) > 3 and not mark.exists() and Path(os.environ.get("RWD_AFTER", ".")).exists():
        mark.write_text(mine)
        while mark.read_text() == mine:
            time.sleep(0.05)
    return 1 / (1 + len(completion.ids))
