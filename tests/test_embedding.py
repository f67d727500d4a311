"""The step lives in anybody's loop: the page's code runs, leaves nothing behind, and equals a plain loop of torch."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from ironfn import tree
from ironfn.algo.step import State, Step, make_step
from ironfn.grad.value_and_grad import accumulate, value_and_grad
from ironfn.loss.lm import lm_loss
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.model.attention import Dropout
from ironfn.model.forward import Forward
from ironfn.model.init import init
from ironfn.model.tables import table
from ironfn.optim.adamw import adamw
from ironfn.optim.optimizer import Optimizer
from ironfn.types import Batch, Loss, LossSum, Params
from property_tests.strategies import optimizer as optimizer_of
from tests.peers import make_arch

PAGE = Path(__file__).parents[1] / "docs/embedding.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)


def surroundings(folder: Path) -> dict[str, Any]:
    """Return what a library has no business changing."""
    return {
        "files": sorted(folder.rglob("*")),
        "environment": dict(os.environ),
        "handlers": [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)],
        "threads": (threading.active_count(), torch.get_num_threads()),
        "torch": (torch.get_default_dtype(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()),
        "hooks": (sys.excepthook, sys.stdout, sys.stderr),
    }


def test_the_page_runs_as_it_stands_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(BLOCKS) == 3
    before, page = surroundings(tmp_path), {"__name__": "page"}
    for number, block in enumerate(BLOCKS):
        exec(compile(block, f"{PAGE.name}, block {number + 1}", "exec"), page)
    assert surroundings(tmp_path) == before
    assert re.fullmatch(r"step 30: loss \d\.\d{3}, gradient norm \d\.\d{3}\n", capsys.readouterr().out)
    assert page["metrics"]["loss"] < 2.0, "from ln 256 = 5.5"
    assert page["llama_metrics"]["loss"] < 4.5
    assert torch.equal(page["model"].lm_head.weight, page["llama_state"].params["lm_head.weight"])


def test_the_first_block_is_a_loop_of_about_fifteen_lines() -> None:
    lines = [line for line in BLOCKS[0].splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(lines) <= 15
    assert not re.search(r"open\(|signal|Path|environ|global", BLOCKS[0])


def test_a_step_moves_no_generator() -> None:
    arch = make_arch("llama", 50, dropout=0.5)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    trainer("adamw", arch, 0).take(2)
    assert torch.equal(torch.rand(4), expected)


# Two trainers in one process.


class Trainer:
    """Be somebody's loop: a state, a step, and a number."""

    def __init__(self, step: Step, state: State, vocab: int) -> None:
        self.step, self.state, self.vocab = step, state, vocab
        self.losses: list[str] = []

    def take(self, steps: int) -> list[str]:
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.state.step)
            tokens = torch.randint(0, self.vocab, (4, 17), generator=generator)
            batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weight": torch.ones(4, 16)}
            self.state, metrics = self.step(self.state, batch | {"row": torch.arange(4) + 4 * self.state.step})
            self.losses.append(metrics["loss"].hex())
        return self.losses


def trainer(name: str, arch: Any, seed: int) -> Trainer:
    optimizer = optimizer_of(name)
    how = Forward(dropout=Dropout(arch.dropout, seed) if arch.dropout else None)
    vg = accumulate(value_and_grad(lm_loss(arch, how, chunk=20)), 3)
    step = make_step(vg, optimizer, lambda step: 1e-2 / (step + 1), clip=0.5, donate=True)
    params = init(arch, seed, table(False), SINGLE)
    return Trainer(step, State(0, params, optimizer.init(params)), arch.vocab)


def two() -> tuple[Trainer, Trainer]:
    """Make two trainers that share nothing but the library: another family, optimizer, seed, size and dropout."""
    return (
        trainer("muon", make_arch("llama", 50, kv_heads=2), 1),
        trainer("adamw", make_arch("gpt2", 70, width=32, dropout=0.3), 2),
    )


ALONE = 6


def alone() -> list[list[str]]:
    return [each.take(ALONE) for each in two()]


def test_interleaved_trainers_give_the_losses_that_each_gives_alone() -> None:
    a, b = two()
    for turns in (1, 2, 1, 2):
        a.take(turns)
        b.take(turns)
    assert [a.losses, b.losses] == alone()


def test_trainers_in_two_threads_give_the_losses_that_each_gives_alone() -> None:
    """Twice the same trainer as well: threads that run the same code at the same time."""
    expected = alone()
    for turn in (two(), (two()[0], two()[0]), (two()[1], two()[1])):
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda each: each.take(ALONE), turn))
        assert all(losses in expected for losses in found)


# Modules of others.


def loss_of(module: nn.Module) -> Loss:
    def loss(params: Params, batch: Batch, mesh: Mesh) -> LossSum:
        logits = functional_call(module, tree.flatten(params), batch["tokens"])
        logits = getattr(logits, "logits", logits)
        nats = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="none")
        return LossSum((nats * batch["weight"].flatten()).sum(), batch["weight"].sum())

    return loss


def rows_at(number: int, vocab: int = 64) -> torch.Tensor:
    """Return rows of a text with something to learn: each id is followed by one of two."""
    generator = torch.Generator().manual_seed(number)
    start, jumps = (
        torch.randint(0, vocab, (4, 1), generator=generator),
        torch.randint(1, 3, (4, 20), generator=generator),
    )
    return (start + jumps.cumsum(1)) % vocab


def batch_at(number: int, dtype: torch.dtype) -> Batch:
    rows = rows_at(number)
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:], "weight": torch.ones(4, 19, dtype=dtype)}


def by_ours(module: nn.Module, steps: int, dtype: torch.dtype, clip: float | None, micro: int) -> list[float]:
    optimizer: Optimizer = adamw(0.9, 0.95, 1e-8, 0.1)
    step = make_step(accumulate(value_and_grad(loss_of(module)), micro), optimizer, lambda n: 3e-3, clip=clip)
    params: Params = {name: p.detach().clone() for name, p in module.named_parameters()}
    state, seen = State(0, params, optimizer.init(params)), []
    for number in range(steps):
        state, metrics = step(state, batch_at(number, dtype))
        seen.append(metrics["loss"])
    return seen


def by_torch(module: nn.Module, steps: int, clip: float | None) -> list[float]:
    """Train as everybody does. In float32 a model of `transformers` shifts its labels and takes the mean by itself; in
    float64 it would round its logits to float32 first, so the loss is taken outside.
    """
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    seen: list[float] = []
    for number in range(steps):
        rows = rows_at(number)
        if isinstance(module, LlamaForCausalLM) and module.dtype == torch.float32:
            loss = module(input_ids=rows, labels=rows).loss
        else:
            logits = module(rows[:, :-1])
            loss = F.cross_entropy(getattr(logits, "logits", logits).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        seen.append(loss.item())
    return seen


def small_llama(tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.mark.parametrize(
    ("dtype", "clip", "close"),
    [(torch.float64, None, 1e-7), (torch.float32, None, 1e-5), (torch.float64, 0.1, 1e-6), (torch.float64, 1e9, 1e-7)],
)
@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_of_transformers_trains_as_in_a_plain_loop(
    dtype: torch.dtype, clip: float | None, close: float, tied: bool
) -> None:
    """Twenty steps. In float64, 1e-7: its norms round to float32 inside, and a last bit of difference may tip one.
    With clipping, 1e-6: that is what `clip_grad_norm_` adds to the norm that it divides by.
    """
    found = by_ours(small_llama(tied).to(dtype), 20, dtype, clip, 99)
    expected = by_torch(small_llama(tied).to(dtype), 20, clip)
    assert found == pytest.approx(expected, rel=close)
    assert found[-1] < found[0] - 0.5


def test_accumulation_serves_a_module_too() -> None:
    whole = by_torch(small_llama().double(), 8, None)
    for micro in (1, 3):
        assert by_ours(small_llama().double(), 8, torch.float64, None, micro) == pytest.approx(whole, rel=1e-7)


class Reader(nn.Module):
    """Be no transformer at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.read, self.head = nn.Embedding(64, 16), nn.GRU(16, 24, batch_first=True), nn.Linear(24, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.read(self.embed(tokens))[0])


def test_any_module_will_do() -> None:
    found = by_ours(Reader().double(), 20, torch.float64, None, 2)
    assert found == pytest.approx(by_torch(Reader().double(), 20, None), rel=1e-9)


def test_a_module_on_a_mesh_is_the_module_alone() -> None:
    """Two ranks, each with a module of its own, share the rows of a step."""
    from ironfn.mesh import fake

    def rank(mesh: Mesh) -> list[float]:
        module, optimizer = modules[mesh.dp.index], adamw(0.9, 0.95, 1e-8, 0.1)
        step = make_step(value_and_grad(loss_of(module)), optimizer, lambda n: 3e-3, mesh=mesh)
        params: Params = {name: p.detach().clone() for name, p in module.named_parameters()}
        state, seen = State(0, params, optimizer.init(params)), []
        for number in range(5):
            batch = {n: x.tensor_split(2)[mesh.dp.index] for n, x in batch_at(number, torch.float64).items()}
            state, metrics = step(state, batch)
            seen.append(metrics["loss"])
        return seen

    modules = [Reader().double(), Reader().double()]
    expected = by_torch(Reader().double(), 5, None)
    for found in fake.run(rank, dp=2):
        assert found == pytest.approx(expected, rel=1e-9)
