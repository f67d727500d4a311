"""Train LoRA beside SmolLM2-135M in 4 bits: what the frozen model takes, and what its rounding costs in loss."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from attrs import evolve

from bench.figure import Figure
from bench.finetuning import DOLLY, make_ready
from bench.tuners import LORA, opened, parted
from drivers.trained import open_model
from ironfn import tree
from ironfn.algo.step import State, make_step
from ironfn.data.dataset import rows_at
from ironfn.grad.value_and_grad import value_and_grad
from ironfn.loss.lm import lm_loss
from ironfn.mesh.axis import SINGLE
from ironfn.optim.adamw import adamw
from ironfn.spec.adapter_records import AdapterSpec
from ironfn.types import Batch

STEPS, HELD, LR = 20, 6, 5e-4
TAKEN = slice(3, None, 10)


def figures() -> Iterator[Figure]:
    """Yield the bytes of the frozen model in NF4, of those in float32, and the loss beside it, of LoRA's beside those.

    The loss is that of 6 packed rows of 512 tokens that were not trained on, after 20 steps of one row each (the bar
    was set for 50, which take more than twice as long); the same rows, adapter and order everywhere.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_ready(folder, DOLLY.read_text(encoding="utf-8").splitlines()[TAKEN])
        data = opened(folder)
        rows = [rows_at(data, [row], 0) for row in range(STEPS + HELD)]
        plain = tuned(folder, LORA, rows)
        for base in ("nf4", "nf4_all"):
            size, before, after = tuned(folder, evolve(LORA, base=base), rows)
            note = f"{size / 1e6:.0f} of {plain[0] / 1e6:.0f} MB"
            yield Figure(f"{base}_bytes", size / plain[0], "<= 0.14" if base == "nf4_all" else "<= 0.32", note)
            note = f"before {before:.3f} and {plain[1]:.3f}, after {after:.3f} and {plain[2]:.3f}"
            yield Figure(f"{base}_loss", after / plain[2], "<= 1.01", note)


def tuned(folder: Path, spec: AdapterSpec, rows: Sequence[Batch]) -> tuple[int, float, float]:
    """Train; return the bytes of the frozen model, and the loss of the held rows before and after."""
    model = open_model(folder / "hf", lambda _: None)
    params, base, how = parted(model, spec)
    loss, optimizer = lm_loss(model.arch, how), adamw(0.9, 0.999, 1e-8, 0.0)
    step = make_step(value_and_grad(loss), optimizer, lambda s: LR * min(1.0, (s + 1) / 5), clip=1.0, donate=True)
    state = State(0, params, optimizer.init(params), extra={"fixed": base})

    def held(state: State) -> float:
        with torch.no_grad():
            found = [loss(state.model, batch, SINGLE) for batch in rows[STEPS:]]
        return float(sum(one.total for one in found)) / float(sum(one.weight for one in found))

    before = held(state)
    for batch in rows[:STEPS]:
        state, _ = step(state, batch)
    return tree.nbytes(base), before, held(state)
