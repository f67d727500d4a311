"""Log-probabilities and entropies of tokens: what autograd makes of the logits, however much of it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ironfn.loss import scores
from ironfn.loss.scores import token_log_probs, token_scores
from ironfn.mesh import fake
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.model.weights import Weight

ROWS, WIDTH, IDS, TABLE = 7, 6, 9, 12
WARMTH = torch.tensor([0.5, 0.8, 1.0, 0.7, 1.3, 0.5, 2.0], dtype=torch.float64)
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


class Case:
    """Hold hidden states, a head whose last rows are padding, and factors for what comes of them."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        draw = torch.Generator().manual_seed(0)
        shapes = (ROWS, WIDTH), (TABLE, WIDTH), (TABLE,)
        self.x, self.w, self.b = (torch.randn(*s, generator=draw).to(dtype).requires_grad_() for s in shapes)
        self.targets = torch.randint(0, IDS, (ROWS,), generator=draw)
        self.factors = torch.randn(2, ROWS, dtype=torch.float64, generator=draw)
        self.factors[:, 2] = 0.0  # of what does not count, nothing is computed

    def expected(self, cap: float | None) -> tuple[Tensor, Tensor]:
        logits = (self.x @ self.w.t()).to(torch.promote_types(self.x.dtype, torch.float32)) + self.b
        logits = logits[:, :IDS] if cap is None else cap * (logits[:, :IDS] / cap).tanh()
        log_p = (logits / WARMTH.to(logits)[:, None]).log_softmax(-1)
        return log_p.gather(1, self.targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    def grads(self, found: tuple[Tensor, Tensor], learned: bool, *by: Tensor) -> tuple[Tensor, ...]:
        total = (found[0] * self.factors[0].to(found[0])).sum()
        if learned:
            total = total + (found[1] * self.factors[1].to(found[1])).sum()
        return torch.autograd.grad(total, by, retain_graph=True)


def same(found: Any, expected: Any, **close: float) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, **(close or CLOSE))


@pytest.mark.parametrize("cap", [None, 5.0], ids=["plain", "capped"])
@pytest.mark.parametrize("learned", [True, False], ids=["learned", "told"])
@pytest.mark.parametrize("form", ["trained", "frozen", "by pieces"])
def test_scores_are_those_of_the_logits_at_the_temperature(form: str, learned: bool, cap: float | None) -> None:
    case = Case()
    how: dict[str, Any] = {"vocab": IDS, "softcap": cap, "temperature": WARMTH, "chunk": 3}
    w, b = (case.w, case.b) if form == "trained" else (case.w.detach(), case.b.detach())
    by = (case.x, case.w, case.b) if form == "trained" else (case.x,)

    def pieces(dtype: torch.dtype) -> Iterator[Tensor]:
        return iter(case.w.detach().to(dtype).split(5))

    head = Weight(lambda x: x @ case.w.t(), (TABLE,), pieces=pieces) if form == "by pieces" else w
    expected = case.expected(cap)
    found = token_scores(case.x, head, case.targets, SINGLE.tp, bias=b, learned=learned, **how)
    same(found, expected)
    assert found[1].requires_grad == learned
    same(case.grads(found, learned, *by), case.grads(expected, learned, *by))
    alone = token_log_probs(case.x, head, case.targets, SINGLE.tp, bias=b, **how)
    same((alone, *case.grads((alone, alone), False, *by)), (expected[0], *case.grads(expected, False, *by)))
    with torch.no_grad():
        same(token_scores(case.x, head, case.targets, SINGLE.tp, bias=b, **how), expected)


@pytest.mark.parametrize("learned", [True, False], ids=["learned", "told"])
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_ranks_that_share_the_ids_score_as_one_does(frozen: bool, learned: bool) -> None:
    """A rank's gradient by x is the part of its ids: they add up."""
    case = Case()
    by = (case.x,) if frozen else (case.x, case.w, case.b)
    expected = case.expected(5.0)
    theirs = case.grads(expected, learned, *by)

    def part(mesh: Mesh) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        x = case.x.detach().clone().requires_grad_()
        w, b = (t.detach().chunk(2)[mesh.tp.index].clone().requires_grad_(not frozen) for t in (case.w, case.b))
        found = token_scores(
            x, w, case.targets, mesh.tp, vocab=IDS, bias=b, softcap=5.0, temperature=WARMTH, chunk=3, learned=learned
        )
        return tuple(t.detach() for t in found), case.grads(found, learned, *((x,) if frozen else (x, w, b)))

    one, other = fake.run(part, tp=2)
    for rank in (one, other):
        same(rank[0], (t.detach() for t in expected))
    same((one[1][0] + other[1][0],), theirs[:1])
    same((torch.cat(pair) for pair in zip(one[1][1:], other[1][1:], strict=True)), theirs[1:])


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_scores_in_bfloat16_are_those_of_its_logits(frozen: bool) -> None:
    case = Case(torch.bfloat16)
    w, b = (case.w.detach(), case.b.detach()) if frozen else (case.w, case.b)
    by = (case.x,) if frozen else (case.x, case.w, case.b)
    expected = case.expected(None)
    found = token_scores(case.x, w, case.targets, SINGLE.tp, vocab=IDS, bias=b, temperature=WARMTH, chunk=3)
    assert found[0].dtype == found[1].dtype == torch.float32
    same(found, expected, rtol=1e-5, atol=1e-5)
    same(case.grads(found, True, *by), case.grads(expected, True, *by), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("frozen", "times"), [(True, 1), (False, 2)], ids=["frozen", "trained"])
def test_a_frozen_heads_logits_are_made_once(frozen: bool, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counted(x: Tensor, *rest: Any) -> Any:
        made.append(len(x))
        return logits_of(x, *rest)

    logits_of = scores.logits_of
    monkeypatch.setattr(scores, "logits_of", counted)
    case = Case()
    case.factors[:, 2] = 1.0
    w = case.w.detach() if frozen else case.w
    case.grads(token_scores(case.x, w, case.targets, SINGLE.tp, vocab=IDS, chunk=3), True, case.x)
    assert sum(made) == times * ROWS


@pytest.mark.parametrize("learned", [True, False], ids=["learned", "told"])
def test_torch_func_sees_scores(learned: bool) -> None:
    case = Case()

    def total(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        found = token_scores(
            x, w, case.targets, SINGLE.tp, vocab=IDS, bias=b, softcap=5.0, temperature=WARMTH, learned=learned
        )
        return (found[0] * case.factors[0]).sum() + (found[1] * case.factors[1]).sum()

    leaves = tuple(t.detach() for t in (case.x, case.w, case.b))
    grads = torch.func.grad(total, (0, 1, 2))(*leaves)
    expected = case.grads(case.expected(5.0), learned, case.x, case.w, case.b)
    same(grads, expected)
    along = tuple(torch.randn_like(t) for t in leaves)
    _, change = torch.func.jvp(total, leaves, along)
    same((change,), (sum((g * d).sum() for g, d in zip(expected, along, strict=True)),))


def test_the_temperature_is_in_the_log_probability() -> None:
    w = torch.tensor([[2.0], [0.0]])
    found, _ = token_scores(torch.ones(1, 1), w, torch.tensor([0]), SINGLE.tp, vocab=2, temperature=torch.tensor([0.5]))
    assert float(found) == pytest.approx(-0.018150, abs=1e-6)
