"""Measure gradients that two gloo processes add up: in buckets against leaf by leaf, and beside a whole step."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from bench.figure import Figure
from bench.step import LENGTH, LR, MODEL, ROWS
from ironfn import tree
from ironfn.algo.step import State, make_step
from ironfn.grad.value_and_grad import value_and_grad
from ironfn.layout.reduce import reduce_grads
from ironfn.layout.table import WHOLE_TABLE
from ironfn.layout.zero import share_updates
from ironfn.loss.lm import lm_loss
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.model.arch import complete
from ironfn.model.init import init, shapes
from ironfn.optim.adamw import adamw
from ironfn.optim.zero1 import zero1
from ironfn.types import Params
from tests.gloo import world

ARCH = complete(MODEL, 4096)
Times = dict[str, list[float]]


def figures() -> Iterator[Figure]:
    """Yield the gain of buckets in reduction time, and what a DP-2 step takes beside a rank's own computation."""
    times = _measured("reduce", 31)
    leaf, bucket = (statistics.median(times[name]) for name in ("leaf", "bucket"))
    leaves = len(shapes(ARCH))
    note = f"{leaves} leaves one by one {1000 * leaf:.0f} ms, in buckets {1000 * bucket:.0f} ms, 49 MB over gloo"
    yield Figure("reduction_leaf_over_bucket", leaf / bucket, ">= 1.5", note)
    step, zero, once, alone = (statistics.median(x) for x in _measured("step", 9).values())
    note = (
        f"step {step:.3f} s (ZeRO-1 {zero:.3f} s); {ROWS // 2}x{LENGTH} rows without a mesh {once:.3f} s in both "
        f"processes at once, {alone:.3f} s in one alone (x{step / alone:.2f})"
    )
    yield Figure("dp2_step_over_half_batch", step / once, "<= 1.15", note)


def _measured(what: str, rounds: int) -> Times:
    """Return the seconds of each round, the slower rank's, from processes of their own with one thread each."""
    command = [sys.executable, "-m", "bench.reduction", what, str(rounds)]
    root, single = Path(__file__).parent.parent, {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=root, env=single)
    return json.loads(done.stdout)


def _reduce(mesh: Mesh, rounds: int) -> Times:
    """Time both ways in turns. Every gradient is new memory, as autograd's is."""

    def leaf_by_leaf(grads: Params) -> Params:
        return tree.map(lambda x: mesh.dp.backend.all_reduce(x, donate=True), grads)

    ways = {"leaf": leaf_by_leaf, "bucket": lambda grads: reduce_grads(grads, WHOLE_TABLE, mesh)}
    times: Times = {name: [] for name in ways}
    for _ in range(rounds + 2):
        for name, way in ways.items():
            grads = tree.unflatten({path: torch.ones(shape) for path, shape in shapes(ARCH).items()})
            times[name].append(_timed(mesh, lambda way=way, grads=grads: way(grads)))
    return {name: seconds[2:] for name, seconds in times.items()}


def _step(mesh: Mesh, rounds: int) -> Times:
    """Time the step over dp, the same with ZeRO-1, and half the batch without a mesh: on both ranks, and on each."""
    calls = {"dp": _half(mesh, zero=False), "zero": _half(mesh, zero=True), "once": _half(SINGLE, zero=False)}
    times: Times = {name: [] for name in (*calls, "alone")}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            times[name].append(_timed(mesh, call))
        alone = calls["once"] if turn % 2 == mesh.dp.index else lambda: None
        times["alone"].append(_timed(mesh, alone))
    return {name: seconds[1:] for name, seconds in times.items()}


def _half(mesh: Mesh, zero: bool) -> Callable[[], object]:
    """Return a call that takes one step on half the rows, with one more half on the other rank if the mesh has one."""
    params, optimizer, updates = init(ARCH, 0, WHOLE_TABLE, SINGLE), adamw(0.9, 0.999, 1e-8, 0.01), None
    if zero:
        updates = share_updates(WHOLE_TABLE, shapes(ARCH), mesh)
        optimizer = zero1(optimizer, WHOLE_TABLE, updates, mesh)
    vg = value_and_grad(lm_loss(ARCH))
    step = make_step(vg, optimizer, lambda s: LR, mesh=mesh, updates=updates, clip=1.0, donate=True)
    held = [State(0, params, optimizer.init(params))]
    ids = torch.randint(0, 4096, (ROWS // 2, LENGTH + 1))
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "weight": torch.ones(ROWS // 2, LENGTH)}

    def call() -> object:
        held[0], metrics = step(held[0], batch)
        return metrics

    return call


def _timed(mesh: Mesh, call: Callable[[], object]) -> float:
    """Return the seconds of a call that both ranks begin together; those of the rank that takes longer."""
    together = mesh.dp.backend
    together.all_reduce(torch.zeros(1))
    start = time.perf_counter()
    call()
    taken = torch.tensor([time.perf_counter() - start])
    return float(together.all_gather(taken, 0).max())


if __name__ == "__main__":
    torch.set_num_threads(1)
    run, rounds = {"reduce": _reduce, "step": _step}[sys.argv[1]], int(sys.argv[2])
    print(json.dumps(world(2, lambda mesh: run(mesh, rounds), timeout=900)[0]))
