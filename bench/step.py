"""Measure a training step against a plain `transformers` loop: tokens a second, peak memory, share of the ceiling."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType

import torch

from bench import peer as peers
from bench.figure import Figure, alternate
from ironfn.algo.step import State, make_step
from ironfn.grad.remat import recompute
from ironfn.grad.value_and_grad import value_and_grad
from ironfn.loss.lm import lm_loss
from ironfn.mesh.axis import SINGLE
from ironfn.model.arch import complete
from ironfn.model.counting import flops_per_token
from ironfn.model.forward import DEFAULT, Forward
from ironfn.model.init import init
from ironfn.model.tables import table
from ironfn.optim.adamw import adamw
from ironfn.report.meter import peak_memory
from ironfn.report.mfu import measure_peak
from ironfn.spec.records import ModelSpec

ROWS, LENGTH, LR = 8, 256, 1e-4
MODEL = ModelSpec(width=384, layers=6, heads=6, ffn=1024, context=LENGTH)
"""12.2 M parameters with a vocabulary of 4096, the head tied to the embedding."""


def ours(vocab: int, how: Forward = DEFAULT) -> Callable[[], object]:
    """Return a call that takes one step of ours."""
    arch = complete(MODEL, vocab)
    params, optimizer = init(arch, 0, table(False), SINGLE), adamw(0.9, 0.999, 1e-8, 0.01)
    step = make_step(value_and_grad(lm_loss(arch, how)), optimizer, lambda s: LR, clip=1.0, donate=True)
    held = [State(0, params, optimizer.init(params))]
    ids = torch.randint(0, vocab, (ROWS, LENGTH + 1))
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "weight": torch.ones(ROWS, LENGTH)}

    def call() -> object:
        held[0], metrics = step(held[0], batch)
        return metrics

    return call


def peer(vocab: int) -> Callable[[], object]:
    """Return a call that takes one step of a plain loop around `transformers`' Llama, fused AdamW and SDPA."""
    model = peers.llama(complete(MODEL, vocab))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    ids = torch.randint(0, vocab, (ROWS, LENGTH))

    def call() -> object:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return call


CONTENDERS = MappingProxyType({"ours": ours, "remat": lambda vocab: ours(vocab, Forward(run=recompute)), "peer": peer})


def figures(rounds: int = 9) -> Iterator[Figure]:
    """Yield speed and memory at both vocabularies, and the share of the matmul ceiling at the small one."""
    for vocab, speed, memory in ((4096, ">= 1.2", "<= 0.67"), (49152, ">= 1.25", "<= 0.44")):
        yield from _speed(vocab, speed, rounds if vocab < 10000 else max(3, rounds // 2))
        used = {name: _alone(name, vocab) for name in CONTENDERS}
        note = ", ".join(f"{name} {size / 1e6:.0f} MB" for name, (_, size) in used.items())
        yield Figure(f"memory_ratio_vocab_{vocab}", used["ours"][1] / used["peer"][1], memory, note)
        if vocab == 4096:
            yield Figure("memory_ratio_remat", used["remat"][1] / used["peer"][1], "<= 0.57", note)
            note = ", ".join(f"{name} {seconds:.3f} s" for name, (seconds, _) in used.items())
            yield Figure("remat_speed_share", used["ours"][0] / used["remat"][0], ">= 0.75", note)


def _speed(vocab: int, bar: str, rounds: int) -> Iterator[Figure]:
    calls = {"ours": ours(vocab), "peer": peer(vocab)}
    peaks: list[float] = []
    calls["ceiling"] = lambda: peaks.append(measure_peak(torch.device("cpu"), torch.float32, 0.3))
    seconds = alternate(calls, rounds)
    note = ", ".join(f"{name} {ROWS * LENGTH / seconds[name]:.0f} tok/s" for name in calls if name != "ceiling")
    yield Figure(f"tokens_ratio_vocab_{vocab}", seconds["peer"] / seconds["ours"], bar, note)
    if vocab == 4096:
        flops = flops_per_token(complete(MODEL, vocab), LENGTH) * ROWS * LENGTH / seconds["ours"]
        ceiling = sorted(peaks)[len(peaks) // 2]
        note = f"{flops / 1e9:.0f} of {ceiling / 1e9:.0f} GFLOP/s"
        yield Figure("model_flops_share_of_ceiling", flops / ceiling, ">= 0.85", note)


def _alone(name: str, vocab: int, runs: int = 3) -> tuple[float, float]:
    """Return the median seconds a step and peak bytes of processes of its own.

    The bytes are without the pages of mapped files. How many pages of libtorch count as resident is the page cache's
    choice (81 or 144 MB for one and the same import, by how the file came to the disk), and no contender's merit.
    """
    command = [sys.executable, "-m", "bench.step", name, str(vocab)]
    seen: list[tuple[float, ...]] = []
    for _ in range(runs if vocab < 10000 else 1):
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent)
        seen.append(tuple(map(float, done.stdout.split())))
    seconds, sizes = zip(*seen, strict=True)
    return statistics.median(seconds), statistics.median(sizes)


if __name__ == "__main__":
    call, seconds = CONTENDERS[sys.argv[1]](int(sys.argv[2])), list[float]()
    for _ in range(6):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    print(statistics.median(seconds[1:]), peak_memory(torch.device("cpu")) - int(status["RssFile"].split()[0]) * 1024)
