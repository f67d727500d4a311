"""Measure how long a thousand new examples of the mesh law take, in two processes of one thread each."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from hypothesis import HealthCheck, given, seed, settings

from bench.figure import Figure
from property_tests.scenario import Scenario, holds, scenarios

EXAMPLES, PROCESSES = 1000, 2


def figures() -> Iterator[Figure]:
    """Yield the seconds that the examples take; CalledProcessError, after the counter-example, where one fails."""
    start, first = time.perf_counter(), secrets.randbelow(1 << 30)
    commands = [[sys.executable, "-m", "bench.law", str(first + i)] for i in range(PROCESSES)]
    root, environment = Path(__file__).parent.parent, os.environ | {"OMP_NUM_THREADS": "1"}
    running = [subprocess.Popen(command, cwd=root, env=environment) for command in commands]
    codes = [process.wait() for process in running]
    for command, code in zip(commands, codes, strict=True):
        if code:
            raise subprocess.CalledProcessError(code, command)
    note = f"seconds for {EXAMPLES} examples in {PROCESSES} processes, seeds {first} to {first + PROCESSES - 1}"
    yield Figure("mesh_law_1000_examples", time.perf_counter() - start, "<= 300", note)


def campaign(number: int, examples: int) -> None:
    """Hold that many new examples to the law."""

    @seed(number)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(scenario=scenarios())
    def law(scenario: Scenario) -> None:
        holds(scenario)

    law()


if __name__ == "__main__":
    campaign(int(sys.argv[1]), EXAMPLES // PROCESSES)
