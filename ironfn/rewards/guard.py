"""Run somebody's program inside the sandbox: the first thing that runs in it, given to Python as text.

It imports nothing of ironfn, and nothing that it knows is worth a lie: the answers that are expected stay outside.
Standard input is a file with one JSON value; standard output begins with a line "ready", and then holds a line of JSON
for each call, or what the program prints.
"""

from __future__ import annotations

import builtins
import json
import os
import resource
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # of each run's 28 ms, typing would take 3
    from typing import Any


def limit(limits: dict[str, int]) -> None:
    """Bound this process and all that it starts; nothing in here may raise a bound again."""
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def main() -> None:
    """Read what to do, put the limits on, and do it."""
    with open(0, closefd=False) as file:
        asked: dict[str, Any] = json.load(file)
    limit(asked["limits"])
    os.write(1, b"ready\n")
    space: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins, "exit": sys.exit, "quit": sys.exit}
    code = compile(asked["program"], "program.py", "exec")
    if asked["entry"] is None:
        text = os.open("/tmp", os.O_TMPFILE | os.O_RDWR)
        os.write(text, asked["text"].encode())
        os.lseek(text, 0, 0)
        os.dup2(text, 0)
        os.close(text)
        builtins.exec(code, space)
        return
    answers = os.dup(1)
    nothing = os.open("/dev/null", os.O_RDWR)
    for file in (0, 1, 2):
        os.dup2(nothing, file)
    builtins.exec(code, space)
    for arguments in asked["calls"]:
        try:
            said = {"value": space[asked["entry"]](*arguments)}
            line = json.dumps(said)
        except Exception as error:
            line = json.dumps({"error": type(error).__name__})
        os.write(answers, line.encode() + b"\n")


if __name__ == "__main__":
    main()
