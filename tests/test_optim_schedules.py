"""The learning rate of every step, by value tables worked out by hand, and its edges."""

from __future__ import annotations

import math

import pytest

from ironfn.optim.schedules import constant, cosine, linear, make_schedule, polynomial, wsd
from ironfn.spec.records import ScheduleSpec
from ironfn.types import Schedule

THIRD = 1 / 3
# lr 1, 10 steps, warm-up 2, final 0.1: steps 3 to 9 are 1/7, 2/7 ... 7/7 of the way down.
TABLES: dict[str, tuple[Schedule, list[float]]] = {
    "constant": (constant(1.0, 10, 2), [THIRD, 2 * THIRD] + [1.0] * 8),
    "linear": (linear(1.0, 10, 2, 0.1), [THIRD, 2 * THIRD] + [1.0 - 0.9 * k / 7 for k in range(8)]),
    "cosine": (
        cosine(1.0, 10, 2, 0.1),
        [THIRD, 2 * THIRD] + [0.55 + 0.45 * math.cos(math.pi * k / 7) for k in range(8)],
    ),
    "polynomial": (
        polynomial(1.0, 10, 2, 0.1, 2.0),
        [THIRD, 2 * THIRD] + [0.1 + 0.9 * (7 - k) ** 2 / 49 for k in range(8)],
    ),
    "wsd": (wsd(1.0, 10, 2, 4, 0.1), [THIRD, 2 * THIRD, 1, 1, 1, 1, 0.775, 0.55, 0.325, 0.1]),
}
KINDS = list(TABLES)


def made(kind: str, lr: float, steps: int, warmup: int, final: float = 0.1) -> Schedule:
    return make_schedule(ScheduleSpec(kind=kind, warmup=warmup, final=final, decay_steps=1, power=2.0), lr, steps)


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_has_the_rate_of_the_table(kind: str) -> None:
    schedule, table = TABLES[kind]
    assert [schedule(step) for step in range(10)] == pytest.approx(table, abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_the_spec_makes_the_same_schedule(kind: str) -> None:
    spec = ScheduleSpec(kind=kind, warmup=2, final=0.1, decay_steps=4, power=2.0)
    schedule = make_schedule(spec, 1.0, 10)
    assert [schedule(step) for step in range(10)] == [TABLES[kind][0](step) for step in range(10)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("warmup", [0, 1, 5, 98])
def test_start_end_of_warm_up_and_last_step(kind: str, warmup: int) -> None:
    schedule = made(kind, 2.0, 100, warmup)
    assert schedule(0) == 2.0 / (warmup + 1)
    assert schedule(warmup) == 2.0
    assert schedule(99) == (2.0 if kind == "constant" else 2.0 * 0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_all_warm_up_only_rises(kind: str) -> None:
    spec = ScheduleSpec(kind=kind, warmup=4, decay_steps=0 if kind == "constant" else 1)
    if kind == "wsd":  # which was told to decay, and has no room for it
        with pytest.raises(ValueError, match="do not fit"):
            make_schedule(spec, 1.0, 4)
        schedule = wsd(1.0, 4, 4, 0)
    else:
        schedule = make_schedule(spec, 1.0, 4)
    assert [schedule(step) for step in range(4)] == pytest.approx([0.2, 0.4, 0.6, 0.8])


@pytest.mark.parametrize("kind", KINDS)
def test_a_warm_up_longer_than_the_run_is_an_error_that_names_the_keys(kind: str) -> None:
    with pytest.raises(ValueError, match=r"11.*10.*optim\.schedule\.warmup.*train\.steps"):
        made(kind, 1.0, 10, 11)


@pytest.mark.parametrize("kind", KINDS)
def test_no_rate_is_negative_or_not_finite_whatever_the_lengths(kind: str) -> None:
    for steps in range(1, 9):
        for warmup in range(steps + (kind != "wsd")):
            schedule = made(kind, 3.0, steps, warmup, final=0.0)
            rates = [schedule(step) for step in range(steps + 3)]
            assert all(0.0 <= rate <= 3.0 for rate in rates), (steps, warmup, rates)
            assert rates[steps - 1 :] == [rates[steps - 1]] * 4  # a loop that runs on keeps the last rate


def test_a_run_of_one_step_takes_it_at_the_peak() -> None:
    for schedule in (constant(1.0, 1), linear(1.0, 1), cosine(1.0, 1), polynomial(1.0, 1), wsd(1.0, 1, 0, 0)):
        assert schedule(0) == 1.0


def test_wsd_without_decay_is_constant_and_the_spec_refuses_it() -> None:
    assert [wsd(1.0, 6, 2, 0)(step) for step in range(6)] == [constant(1.0, 6, 2)(step) for step in range(6)]
    with pytest.raises(ValueError, match="decay_steps 0"):
        make_schedule(ScheduleSpec(kind="wsd"), 1.0, 10)
    with pytest.raises(ValueError, match="3 steps of warm-up and 8 of decay do not fit in a run of 10"):
        wsd(1.0, 10, 3, 8)


def test_linear_is_polynomial_of_power_one() -> None:
    assert [linear(1.0, 9, 3, 0.2)(t) for t in range(9)] == [polynomial(1.0, 9, 3, 0.2, 1.0)(t) for t in range(9)]


@pytest.mark.parametrize("stop", [0, 1, 2, 5])
def test_a_resumed_run_has_the_rates_of_the_whole_one(stop: int) -> None:
    """Each run makes its own schedule and continues from the step number alone."""
    before, after = cosine(1.0, 10, 2, 0.1), cosine(1.0, 10, 2, 0.1)
    rates = [before(step) for step in range(stop)] + [after(step) for step in range(stop, 10)]
    assert rates == pytest.approx(TABLES["cosine"][1], abs=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cosine(-1.0, 10), "lr is -1.0"),
        (lambda: cosine(math.nan, 10), "lr is nan"),
        (lambda: cosine(math.inf, 10), "lr is inf"),
        (lambda: linear(1.0, 10, -1), "warmup is -1"),
        (lambda: linear(1.0, 0), "a run of 0 steps"),
        (lambda: linear(1.0, 10, 0, 1.5), "final is 1.5"),
        (lambda: cosine(1.0, 10, 0, -0.1), "final is -0.1"),
        (lambda: wsd(1.0, 10, 0, -1), "-1 of decay"),
        (lambda: polynomial(1.0, 10, 0, 0.0, 0.0), "power is 0.0"),
    ],
)
def test_numbers_that_make_no_schedule_are_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
