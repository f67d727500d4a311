"""Rewards as a user writes them, called by path: good ones, and such as raise, hang, stall, die, print or lie."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

from drivers.graders import function_pool, function_reward
from ironfn.rewards.values import Completion


def length(completion: Completion) -> float:
    return len(completion.text) / completion.row["longest"]


def misbehave(completion: Completion) -> object:
    match completion.text:
        case "raise":
            raise RuntimeError("no reward today")
        case "loop":
            while True:
                pass
        case "sleep":
            time.sleep(1000)
        case "stall":  # in C, with the lock of the interpreter held: no thread and no signal handler gets a turn
            ctypes.PyDLL(None).sleep(1000)
        case "die":
            os._exit(0)
        case "print":
            print('{"value": 1.0}', flush=True)
        case "write":
            os.write(1, b'{"value": 1.0}\n')
        case "nan":
            return float("nan")
        case "infinite":
            return float("inf")
        case "text":
            return "1.0"
        case "none":
            return None
        case "huge":
            return 2.0
        case "child":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
            with open(completion.row["where"], "w") as file:
                file.write(str(child.pid))
            time.sleep(1000)
        case _:
            return 0.25
    return 0.5


def leave_behind() -> None:
    """Have a process stall, say which it is, and die before its time is over."""
    pool = function_pool("tests.grading:misbehave", seconds=2.0)
    grade = function_reward(pool)
    threading.Thread(target=grade, args=[[Completion("", "stall")]], daemon=True).start()
    while (process := pool._workers[0]._process) is None:
        time.sleep(0.01)
    time.sleep(1.0)
    print(process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
