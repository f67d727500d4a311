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
    """Say in the file of RWD_MARK which process this is, and wait to be killed; where it is there, give a score."""
    mark = Path(os.environ["RWD_MARK"])
    if len(completion.ids) > 3 and not mark.exists():
        mark.write_text(f"{os.getpid()}\n")
        time.sleep(50)
    return 1 / (1 + len(completion.ids))
