"""Measure how long the command line takes to answer."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

from bench.figure import Figure


def _aliases(open_: str, close: str, first: str, item: str, times: int, levels: int) -> bytes:
    lines = [f"a0: &a0 {open_}{first}{close}"]
    for level in range(1, levels):
        items = ", ".join(item.format(number=number, name=f"*a{level - 1}") for number in range(times))
        lines.append(f"a{level}: &a{level} {open_}{items}{close}")
    return "\n".join(lines).encode()


HOSTILE = MappingProxyType(
    {
        "nested flow lists": b"[" * 10_000 + b"]" * 10_000,
        "nested flow mappings": b"{a: " * 10_000 + b"}" * 10_000,
        "nested blocks": b"\n".join(b" " * level + b"a:" for level in range(350)),
        "nested dashes": b"- " * 10_000,
        "billion laughs": _aliases("[", "]", ", ".join("x" * 9), "{name}", 9, 10),
        "billion laughs in mappings": _aliases("{", "}", "x: 1, y: 2", "k{number}: {name}", 2, 30),
        "a long list": b"[" + b"a," * 30_000 + b"]",
        "a number of 60,000 digits": b"train: {steps: " + b"9" * 60_000 + b"}",
        "larger than a spec": b"name: " + b"x" * 10_000_000,
        "unknown keys": b"".join(b"key%d: 1\n" % number for number in range(1_990)),
    }
)
"""Files made to take for ever: each has to be refused in less than a second."""


def figures(rounds: int = 9) -> Iterator[Figure]:
    """Yield the median seconds of the installed ``ironfn --help``, and those of the slowest refusal of a spec."""
    script = Path(sys.executable).with_name("ironfn")
    if not script.exists():
        raise FileNotFoundError(f"{script} is not there; install ironfn into this environment: make dev")
    helps = [_seconds([script, "--help"], 0) for _ in range(rounds)]
    yield Figure("help_seconds", statistics.median(helps), "< 0.3", f"{script.name} --help, {rounds} runs")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        slowest = {}
        for name, raw in HOSTILE.items():
            file.write_bytes(raw)
            refusals = [_seconds([script, "specs", "check", file], 78) for _ in range(3)]
            slowest[name] = statistics.median(refusals)
    worst = max(slowest, key=lambda name: slowest[name])
    yield Figure("refusal_seconds", slowest[worst], "< 1", f"{worst}, the slowest of {len(HOSTILE)} files")


def _seconds(command: list[str | Path], code: int) -> float:
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True)
    assert done.returncode == code, done.stderr
    return time.perf_counter() - start
