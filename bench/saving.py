"""Measure for how long a save stops the steps: one that is waited for, and one that a thread writes."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from bench.figure import Figure
from ironfn import tree
from ironfn.checkpoint import Saver, load, prune
from ironfn.types import Params

LEAVES, NUMBERS = 60, 640_000  # 154 MB in float32


def figures() -> Iterator[Figure]:
    """Yield what part of a waited-for save's stall is left when a thread writes, medians of saves in turns.

    The stall of the second is its start, which is mostly the copy, and the edge at which it is published. What it takes
    to delete old checkpoints is in neither.
    """
    state: Params = {f"l{i}": torch.randn(NUMBERS) for i in range(LEAVES)}
    waited: list[float] = []
    copied: list[float] = []
    published: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        saver = Saver(Path(name))
        for step in range(1, 15, 2):
            waited.append(_seconds(lambda step=step: saver.save(step, state, {})))
            copied.append(_seconds(lambda step=step: saver.start(step + 1, state, {})))
            tree.map(lambda leaf: leaf.add_(1.0), state)  # as a step that is given the buffers would
            while _seconds_of_poll(saver, published) is None:
                time.sleep(0.01)
            prune(Path(name), 1)
        loaded, _ = load(Path(name) / "step-00000014")
        tree.map(lambda a, b: torch.testing.assert_close(a + 1.0, b, rtol=0, atol=0), loaded, state)
    stall = statistics.median(copied[1:]) + statistics.median(published[1:])
    wait, copy, publish = (1e3 * statistics.median(times[1:]) for times in (waited, copied, published))
    note = f"{tree.nbytes(state) / 1e6:.0f} MB: {wait:.0f} ms waited for; {copy:.0f} to copy, {publish:.0f} to publish"
    yield Figure("background_save_stall", stall / statistics.median(waited[1:]), "<= 0.5", note)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _seconds_of_poll(saver: Saver, published: list[float]) -> Path | None:
    start = time.perf_counter()
    path = saver.poll()
    if path is not None:
        published.append(time.perf_counter() - start)
    return path
