"""Stop a training loop of twenty lines at every step, and hold what it does after a resume to the bits of before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ironfn import rng, tree
from ironfn.checkpoint import load, load_newest, save
from ironfn.types import Params

STEPS = 8


def first_state() -> Params:
    params: Params = {"up": rng.normal((6, 4), 0.5, 0, "up"), "down": rng.normal((2, 6), 0.5, 0, "down")}
    zeros = tree.map(torch.zeros_like, params)
    half = tree.map(lambda leaf: leaf.to(torch.bfloat16), params)
    return {"params": params, "opt": {"m": zeros, "v": tree.clone(zeros), "half": half}, "extra": {}}


def step(state: Params, number: int) -> tuple[Params, float]:
    """Take a step of AdamW, written out, on a batch and under a dropout that the number of the step determines."""
    params = tree.map(lambda leaf: leaf.detach().requires_grad_(), state["params"])  # type: ignore[arg-type]
    x = torch.randn(16, 4, generator=rng.generator(0, "batch", number))
    hidden = torch.tanh(x @ params["up"].T)  # type: ignore[union-attr]
    rows, units = torch.arange(16), torch.arange(6)
    hidden = rng.dropout(hidden, 0.5, rng.key(0, "dropout", number), (rows, units))
    loss = ((hidden @ params["down"].T - x[:, :2]) ** 2).mean()  # type: ignore[union-attr]
    grads = tree.rebuild(params, torch.autograd.grad(loss, tree.leaves(params)))
    opt: Params = state["opt"]  # type: ignore[assignment]
    m = tree.map(lambda m, g: 0.9 * m + 0.1 * g, opt["m"], grads)  # type: ignore[arg-type]
    v = tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, opt["v"], grads)  # type: ignore[arg-type]
    rate = 0.1 * (1 - number / STEPS)
    new = tree.map(lambda p, m, v: (p - rate * (m / (v.sqrt() + 1e-8) + 0.1 * p)).detach(), params, m, v)
    half = tree.map(lambda leaf: leaf.to(torch.bfloat16), new)
    return {"params": new, "opt": {"m": m, "v": v, "half": half}, "extra": {}}, loss.item()


def go_on(state: Params, begin: int, end: int) -> tuple[Params, list[str]]:
    losses = []
    for number in range(begin, end):
        state, loss = step(state, number)
        losses.append(loss.hex())
    return state, losses


def bits(state: Params) -> dict:
    return {p: (x.dtype, x.reshape(-1).view(torch.uint8).tolist()) for p, x in tree.flatten(state).items()}


@pytest.mark.parametrize("stop", range(STEPS + 1))
@pytest.mark.parametrize("in_place", [False, True])
def test_resume_is_bitwise_wherever_it_stopped(tmp_path: Path, stop: int, in_place: bool) -> None:
    whole, losses = go_on(first_state(), 0, STEPS)
    half, before = go_on(first_state(), 0, stop)
    save(tmp_path, stop, half, {"seed": 0})
    found = load_newest(tmp_path, pytest.fail, into=tree.clone(half) if in_place else None)
    assert found is not None
    assert bits(found.tree) == bits(half)
    resumed, after = go_on(found.tree, found.meta["step"], STEPS)
    assert before + after == losses
    assert bits(resumed) == bits(whole)


def test_the_moments_keep_their_dtype_beside_parameters_of_another(tmp_path: Path) -> None:
    state: Params = {
        "params": {"w": torch.randn(4, 4).to(torch.bfloat16)},
        "opt": {"m": {"w": torch.randn(4, 4)}, "v": {"w": torch.rand(4, 4, dtype=torch.float64)}, "n": torch.tensor(3)},
    }
    loaded, _ = load(save(tmp_path, 1, state, {}))
    assert bits(loaded) == bits(state)
    into = tree.map(torch.zeros_like, state)
    into["opt"]["m"]["w"] = into["opt"]["m"]["w"].to(torch.bfloat16)  # type: ignore[index, call-overload, union-attr]
    with pytest.raises(ValueError, match=r"opt/m/w is .*float32.* in the checkpoint, .*bfloat16"):
        load(tmp_path / "step-00000001", into=into)
