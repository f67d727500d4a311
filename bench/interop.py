"""Measure SmolLM2-135M here against `transformers`: forward, training step, and import from safetensors.

The weights are random: speed and memory do not depend on them, and nothing has to be downloaded.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from bench import peer
from bench.figure import Figure, alternate
from ironfn.algo.step import State, make_step
from ironfn.grad.remat import recompute
from ironfn.grad.value_and_grad import accumulate, value_and_grad
from ironfn.hf.load import load_weights
from ironfn.hf.names import LLAMA
from ironfn.loss.lm import lm_loss
from ironfn.mesh.axis import SINGLE
from ironfn.model.arch import Arch, complete
from ironfn.model.forward import DEFAULT, Forward
from ironfn.model.init import init
from ironfn.model.tables import table
from ironfn.model.transformer import logits
from ironfn.optim.adamw import adamw
from ironfn.report.meter import peak_memory
from ironfn.spec.records import ModelSpec

ROWS, LENGTH, VOCAB, LR = 4, 512, 49152, 1e-5
MODEL = ModelSpec(width=576, layers=30, heads=9, kv_heads=3, ffn=1536, context=8192)
"""SmolLM2-135M (arXiv 2502.02737): 134.5 M parameters, the head tied to the embedding."""

Call = Callable[[], object]


def model() -> Arch:
    """Return the architecture."""
    return complete(MODEL, VOCAB)


def tokens(length: int = LENGTH) -> Tensor:
    """Draw a batch of ids."""
    return torch.randint(0, VOCAB, (ROWS, length), generator=torch.Generator().manual_seed(0))


def our_forward() -> Call:
    """Return a call that computes all logits."""
    arch = model()
    params, ids = init(arch, 0, table(False), SINGLE), tokens()

    def call() -> object:
        with torch.no_grad():
            return logits(params, {"tokens": ids}, arch, SINGLE)

    return call


def their_forward() -> Call:
    """Return a call that computes all logits with `transformers`."""
    theirs, ids = peer.llama(model()).eval(), tokens()

    def call() -> object:
        with torch.no_grad():
            return theirs(input_ids=ids).logits

    return call


def our_step(how: Forward = DEFAULT, rows: int = ROWS) -> Call:
    """Return a call that takes one step of ours with AdamW, its loss computed in chunks, its buffers used again.

    rows: how many are computed at a time.
    """
    arch = model()
    params, optimizer = init(arch, 0, table(False), SINGLE), adamw(0.9, 0.999, 1e-8, 0.01)
    vg = value_and_grad(lm_loss(arch, how))
    step = make_step(vg if rows == ROWS else accumulate(vg, rows), optimizer, lambda s: LR, clip=1.0, donate=True)
    held = [State(0, params, optimizer.init(params))]
    del params
    ids = tokens(LENGTH + 1)
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "weight": torch.ones(ROWS, LENGTH)}

    def call() -> object:
        held[0], metrics = step(held[0], batch)
        return metrics

    return call


def their_step() -> Call:
    """Return a call that takes one step of a plain loop around `transformers`, with torch's fused AdamW."""
    theirs, ids = peer.llama(model()), tokens()
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=LR, fused=True)

    def call() -> object:
        loss = theirs(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return call


CALLS = MappingProxyType(
    {
        "forward": our_forward,
        "their_forward": their_forward,
        "step": our_step,
        "micro": lambda: our_step(rows=1),
        "remat": lambda: our_step(Forward(run=recompute)),
        "their_step": their_step,
    }
)


def figures(rounds: int = 5) -> Iterator[Figure]:
    """Yield the ratios of speed and memory, and what an import costs beside reading its file."""
    yield from _imports(rounds)
    seconds = alternate({"ours": our_forward(), "transformers": their_forward()}, rounds)
    yield Figure("forward_ratio", seconds["transformers"] / seconds["ours"], ">= 1.0", _tokens(seconds))
    calls = {"ours": our_step(), "transformers": their_step()}
    seconds = alternate(calls, max(3, rounds // 2))
    yield Figure("step_ratio", seconds["transformers"] / seconds["ours"], ">= 1.2", _tokens(seconds))
    calls.clear()
    used = {name: _alone(name) for name in ("step", "micro", "remat", "their_step")}
    note = ", ".join(f"{name} {size / 1e6:.0f} MB {seconds:.1f} s" for name, (seconds, size) in used.items())
    yield Figure("step_memory_ratio", used["step"][1] / used["their_step"][1], "<= 0.55", note)
    yield Figure("step_memory_ratio_remat", used["remat"][1] / used["their_step"][1], "<= 0.55", note)


def _tokens(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {ROWS * LENGTH / each:.0f} tok/s" for name, each in seconds.items())


def _alone(name: str, *arguments: str) -> tuple[float, float]:
    """Return the seconds of the last call and the peak bytes of a process of its own, mapped files not counted."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.interop", name, *arguments],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    seconds, size = map(float, done.stdout.split())
    return seconds, size


def _imports(rounds: int) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        _write(path)
        size = path.stat().st_size
        calls = {"import": lambda: _load(Path(folder)), "read": path.read_bytes}
        seconds = alternate(calls, 2 * rounds)
        note = ", ".join(f"{name} {each:.2f} s" for name, each in seconds.items()) + f" of {size / 1e6:.0f} MB"
        yield Figure("import_time_ratio", seconds["import"] / seconds["read"], "<= 1.3", note)
        before, after = (_alone(name, folder)[1] for name in ("nothing", "load"))
        note = f"{(after - before) / 1e6:.0f} MB above the {before / 1e6:.0f} MB of the imports alone"
        yield Figure("import_memory_ratio", (after - before) / size, "<= 1.2", note)


def _write(path: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: leaf.detach().clone() for name, leaf in peer.llama(model()).named_parameters()}, path)


def _load(folder: Path) -> object:
    return load_weights(folder, LLAMA, model(), table(False), SINGLE)


def _measure(name: str, folder: str) -> None:
    """Run one contender in this process, and print its last seconds and this process's peak bytes."""
    if name == "nothing":
        call: Call = model
    else:
        call = (lambda: _load(Path(folder))) if name == "load" else CALLS[name]()
    seconds: list[float] = []
    for _ in range(1 if folder else 2):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    mapped = int(status["RssFile"].split()[0]) * 1024
    print(seconds[-1], peak_memory(torch.device("cpu")) - mapped)


if __name__ == "__main__":
    _measure(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "")
