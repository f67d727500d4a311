"""Choices keep what `transformers` keeps, as often as their probabilities say, whatever stands in the rows beside."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ironfn.generate.sampling import Ask, Sampling, draw, top_log_probs


def theirs(logits: Tensor, sampling: Sampling, seen: list[int]) -> Tensor:
    """Return the probabilities that `transformers`' processors leave, float64 [vocab]."""
    steps = LogitsProcessorList()
    if sampling.repetition_penalty != 1 and seen:
        steps.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    steps.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k is not None:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        steps.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        steps.append(MinPLogitsWarper(sampling.min_p))
    return steps(torch.tensor([seen]), logits.double()[None])[0].softmax(-1)  # pyright: ignore


def draws(logits: Tensor, sampling: Sampling, count: int, seen: tuple[int, ...] = ()) -> Counter[int]:
    asks = [Ask(sampling, (), number, seen) for number in range(count)]
    return Counter(draw(logits.expand(count, -1), asks).ids)


FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.5},
    {"temperature": 2.5},
    {"top_k": 3},
    {"top_k": 1000},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "temperature": 1.3},
    {"temperature": 1.6, "top_k": 9, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.2},
    {"temperature": 3.0, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9},
)


@pytest.mark.parametrize("fields", FILTERS, ids=str)
def test_frequencies_are_those_of_transformers(fields: dict[str, Any]) -> None:
    """A chi-square over 8,000 draws of a fixed seed; nothing that they rule out is ever drawn."""
    logits = torch.randn(24, generator=torch.Generator().manual_seed(5)) * 2
    seen = (3, 7, 7, 11, 0)
    sampling = Sampling(**fields, seed=1)
    expected = theirs(logits, sampling, list(seen)) * 8000
    counts = draws(logits, sampling, 8000, seen)
    assert set(counts) <= set(expected.nonzero()[:, 0].tolist())
    likely = [i for i in range(24) if expected[i] >= 5]
    assert len(likely) > 1
    assert float(expected[likely].sum()) > 7940, "hardly anything is left out"
    observed = torch.tensor([counts[i] for i in likely])
    wanted = expected[likely] * observed.sum() / expected[likely].sum()
    statistic, freedom = ((observed - wanted) ** 2 / wanted).sum(), torch.tensor(len(likely) - 1.0).double()
    assert torch.special.gammaincc(freedom / 2, statistic / 2) > 1e-3


class Steps:
    """Stands for the uniform numbers: 0, 1/count, 2/count … to walk through everything that may be drawn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.count = count
        monkeypatch.setattr("ironfn.generate.sampling._uniform", lambda ask: ask.number / count)  # pyright: ignore

    def shares(self, logits: Tensor, sampling: Sampling, seen: tuple[int, ...] = ()) -> Tensor:
        asks = [Ask(sampling, (), number, seen) for number in range(self.count)]
        ids = torch.tensor(draw(logits.expand(self.count, -1), asks).ids)
        return torch.bincount(ids, minlength=len(logits)) / self.count


@pytest.mark.parametrize("vocab", [1, 2, 40, 1500])
@pytest.mark.parametrize("fields", FILTERS, ids=str)
def test_each_kept_id_has_its_share_of_the_line(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], vocab: int
) -> None:
    """With evenly spaced numbers in place of random ones, an id's count is its probability to one step."""
    steps = Steps(monkeypatch, 512)
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(2)) * 3
    seen = tuple(range(0, vocab, 3))
    sampling = Sampling(**fields)
    assert (steps.shares(logits, sampling, seen) - theirs(logits, sampling, list(seen))).abs().max() <= 1.001 / 512


@settings(deadline=None)
@given(st.data())
def test_the_kept_set_is_that_of_transformers(data: st.DataObject) -> None:
    """Drawn at 0 and just below 1, the first and the last kept id come out; their order is that of the ids."""
    vocab = data.draw(st.sampled_from([1, 2, 5, 30, 1100, 1300]))
    chances = st.sampled_from([0.01, 0.1, 0.3, 0.5, 0.9, 0.99, 1.0])
    sampling = Sampling(
        temperature=data.draw(st.sampled_from([1e-6, 0.3, 1.0, 4.0, 1e6])),
        top_k=data.draw(st.sampled_from([None, 1, 2, 7, 1050, 5000])),
        top_p=data.draw(chances),
        min_p=data.draw(st.one_of(st.just(0.0), chances)),
    )
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    logits = torch.randn(vocab, generator=generator) * data.draw(st.sampled_from([0.1, 1.0, 5.0]))
    kept = theirs(logits, sampling, []).nonzero()[:, 0]
    with pytest.MonkeyPatch.context() as patch:
        for u, expected in ((0.0, kept[0]), (1 - 2**-53, kept[-1])):
            patch.setattr("ironfn.generate.sampling._uniform", lambda ask, u=u: u)  # pyright: ignore
            assert draw(logits[None], [Ask(sampling, (), 0)]).ids == [int(expected)]


EQUALS = ({"top_k": 3}, {"top_p": 0.2}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 2, "top_p": 0.5})


@pytest.mark.parametrize("fields", EQUALS, ids=str)
@pytest.mark.parametrize("vocab", [12, 3000])
def test_equals_are_kept_or_dropped_together(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], vocab: int
) -> None:
    """One likeliest id and four equal ones behind it, which top-k 3 and top-p 0.5 would cut in two."""
    steps = Steps(monkeypatch, 500)
    logits = torch.full((vocab,), -30.0)
    logits[[1, 4, 5, 9]] = 4.0
    logits[7] = 4.5
    places = steps.shares(logits, Sampling(**fields)).nonzero()[:, 0].tolist()
    assert places == ([7] if fields == {"top_p": 0.2} else [1, 4, 5, 7, 9])
    flat = steps.shares(torch.zeros(vocab), Sampling(**fields))
    assert int((flat > 0).sum()) == min(vocab, 500)


def test_the_first_of_equals_is_the_greedy_choice() -> None:
    logits = torch.zeros(3, 5000)
    logits[1, [4000, 17]] = 1
    logits[2, 4999] = 1
    assert draw(logits, [Ask(Sampling(temperature=0), (), 0)] * 3).ids == [0, 17, 4999]


COMPANY = (
    *FILTERS,
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.5},
    {"temperature": 1e-6},
    {"top_k": 1},
)


@pytest.mark.parametrize("vocab", [7, 1024, 1025, 20000])
def test_a_row_is_the_same_in_any_company(vocab: int) -> None:
    """Ids and log-probabilities, bit for bit: alone, beside all the others, and in another order."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3 * len(COMPANY), vocab, generator=generator) * 2
    asks = [
        Ask(Sampling(**fields, seed=seed), ("a", seed), 5 * seed, (1, 2, seed))
        for seed in range(3) for fields in COMPANY
    ]  # fmt: skip
    together = draw(logits, asks)
    alone = [draw(logits[r : r + 1], asks[r : r + 1]) for r in range(len(asks))]
    assert together.ids == [one.ids[0] for one in alone]
    assert together.log_probs == [one.log_probs[0] for one in alone]
    order = torch.randperm(len(asks), generator=generator).tolist()
    mixed = draw(logits[order], [asks[r] for r in order])
    assert mixed.ids == [together.ids[r] for r in order]
    assert mixed.log_probs == [together.log_probs[r] for r in order]


def test_a_draw_depends_on_seed_stream_and_number_alone() -> None:
    logits = torch.zeros(1, 100000)

    def one(seed: int, stream: tuple[int | str, ...], number: int) -> int:
        return draw(logits, [Ask(Sampling(seed=seed), stream, number)]).ids[0]

    torch.manual_seed(1)
    first = one(0, ("x", 1), 2)
    torch.manual_seed(2)
    assert one(0, ("x", 1), 2) == first
    others = [one(1, ("x", 1), 2), one(0, ("x", 2), 2), one(0, ("y", 1), 2), one(0, ("x", 1), 3), one(0, ("x", "1"), 2)]
    assert len({first, *others}) == 6


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 0.5, 1.0, 3.0, 1e6])
def test_log_probabilities_are_those_of_the_untouched_distribution(temperature: float) -> None:
    """At the row's temperature, before penalty and filters: 0 counts as 1."""
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(1)) * 5
    sampling = Sampling(temperature=temperature, top_k=4, min_p=0.01, repetition_penalty=2.0)
    asks = [Ask(sampling, (), n, (1, 2, 3)) for n in range(4)]
    drawn = draw(logits, asks)
    exact = logits.double() - logits.double().amax(1, keepdim=True)
    exact = (exact / (temperature or 1.0)).log_softmax(-1)
    for row, (i, value) in enumerate(zip(drawn.ids, drawn.log_probs, strict=True)):
        assert value == pytest.approx(float(exact[row, i]), rel=1e-6, abs=1e-6)
    for row, best in enumerate(top_log_probs(logits, 5, asks)):
        likeliest = logits[row].topk(5).indices
        assert [i for i, _ in best] == likeliest.tolist()
        assert [value for _, value in best] == pytest.approx(exact[row, likeliest].tolist(), rel=1e-6, abs=1e-6)


def test_the_log_probability_of_the_field_notes() -> None:
    """Logits [2, 0] at temperature 0.5, id 0: -0.018150."""
    value = top_log_probs(torch.tensor([[2.0, 0.0]]), 9, [Ask(Sampling(0.5), (), 0)])[0]
    assert value[0] == (0, pytest.approx(-0.018150, abs=1e-6))
    assert len(value) == 2


def test_extreme_temperatures_neither_overflow_nor_freeze() -> None:
    logits = torch.tensor([3e4, -3e4, 2.9e4, 0.0])
    assert set(draws(logits, Sampling(temperature=1e-6), 200)) == {0}
    least = Ask(Sampling(temperature=1e-320, top_p=0.9), (), 0)
    assert (draw(logits[None], [least]).ids, draw(logits[None], [least]).log_probs) == ([0], [0.0])
    assert set(draws(torch.tensor([2.0, 2.0, 1.0]), Sampling(temperature=1e-6), 200)) == {0, 1}
    assert set(draws(logits, Sampling(temperature=1e6), 200)) == {0, 1, 2, 3}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("fields", [{"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.5}], ids=str)
def test_logits_that_are_no_distribution_are_refused(value: float, fields: dict[str, Any]) -> None:
    logits = torch.zeros(3, 2000)
    logits[1, 1500] = value
    with pytest.raises(ValueError, match="logits of row 1 hold NaN or infinity"):
        draw(logits, [Ask(Sampling(**fields), (), 0)] * 3)
    with pytest.raises(ValueError, match=r"row 0 .* rule every token out"):
        draw(torch.full((1, 9), -math.inf), [Ask(Sampling(**fields), (), 0)])


def test_an_id_that_is_ruled_out_is_never_drawn() -> None:
    logits = torch.full((2000,), -math.inf)
    logits[[3, 1999]] = 0
    for fields in ({}, {"top_k": 3}, {"top_k": 1}, {"top_p": 0.99}, {"temperature": 1e6, "min_p": 0.1}):
        assert set(draws(logits, Sampling(**fields), 100)) == {3, 1999}


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"temperature": -0.1}, r"temperature -0.1 .* greedy"),
        ({"temperature": math.nan}, "temperature nan"),
        ({"temperature": math.inf}, "temperature inf"),
        ({"top_k": 0}, r"top_k 0 .* leave it out"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"top_p": 1.1}, "top_p 1.1"),
        ({"top_p": math.nan}, "top_p nan"),
        ({"min_p": -0.1}, "min_p -0.1"),
        ({"min_p": 1.5}, "min_p 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty 0.0"),
        ({"repetition_penalty": math.nan}, "repetition_penalty nan"),
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(fields: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        Sampling(**fields)
