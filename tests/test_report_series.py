"""Points, scales and numbers for a chart, whatever the values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ironfn.report.series import Points, Scale, brief, columns, finite, fit, smooth, thin
from ironfn.report.words import bytes_in_words, seconds_in_words

ANY = st.floats(allow_nan=True, allow_infinity=True)
SERIES = st.lists(ANY, max_size=400).map(lambda values: list(enumerate(values)))


def test_columns_sort_the_steps_and_take_the_later_of_two_rows() -> None:
    rows = [
        {"kind": "train", "step": 2, "loss": 2.0, "note": "text", "mfu": None, "flag": True},
        {"kind": "train", "step": 1, "loss": 1},
        {"kind": "train", "step": 2, "loss": 3.0},
        {"step": 1, "loss": 9.0},
    ]
    assert columns(rows) == {("train", "loss"): [(1, 1.0), (2, 3.0)], ("None", "loss"): [(1, 9.0)]}


@given(st.lists(ANY, min_size=10, max_size=60).map(lambda values: list(enumerate(values))), st.integers(3, 12))
def test_a_thinned_series_keeps_its_outline(series: Points, limit: int) -> None:
    kept = thin(series, limit)
    assert len(kept) <= max(limit, 3)
    assert [step for step, _ in kept] == sorted({step for step, _ in kept})
    assert {step for step, _ in kept} <= {step for step, _ in series}
    for extreme in (min, max):
        if finite(series):
            assert extreme(value for _, value in finite(kept)) == extreme(value for _, value in finite(series))
    assert (len(finite(kept)) < len(kept)) == (len(finite(series)) < len(series))


@pytest.mark.parametrize("count", [40, 80, 97, 400])
def test_the_smooth_line_is_locally_weighted_regression(count: int) -> None:
    """Against numpy's weighted polynomial fit around each point."""
    values = np.random.default_rng(count).normal(size=count).cumsum()
    reach = count // 40
    expected: list[float] = []
    for at in range(count):
        first = min(max(at - reach, 0), count - 1 - 2 * reach)
        places = np.arange(first, first + 2 * reach + 1)
        away = np.abs(places - at) / (np.abs(places - at).max() + 1)
        weights = (1 - away**3) ** 3
        expected.append(float(np.polyval(np.polyfit(places, values[places], 1, w=np.sqrt(weights)), at)))
    found = smooth(list(enumerate(values.tolist())))
    assert [value for _, value in found] == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert [step for step, _ in found] == list(range(count))


@pytest.mark.parametrize("count", [60, 1000, 50_000])
def test_a_smooth_line_follows_a_slope_to_both_ends_in_few_points(count: int) -> None:
    slope = [(step, 5.0 - 3.0 * step / count) for step in range(count)]
    found = smooth(slope)
    assert len(found) <= 450
    assert found[-1][0] - found[0][0] >= 0.997 * (count - 1)
    for step, value in found:
        assert value == pytest.approx(5.0 - 3.0 * step / count, abs=2e-4)


def test_one_enormous_value_bends_only_its_neighbourhood() -> None:
    series = [(step, 2.0) for step in range(4000)]
    series[2000] = (2000, 1e30)
    outside = [value for step, value in smooth(series) if abs(step - 2000) > 250]
    assert outside == pytest.approx([2.0] * len(outside), rel=1e-12)


@given(SERIES)
def test_a_smooth_line_is_made_of_anything(series: Points) -> None:
    assert len(smooth(series)) <= 450


@given(st.lists(ANY, max_size=50), st.integers(1, 8))
def test_a_scale_holds_any_values(values: list[float], count: int) -> None:
    scale = fit(values, outliers=0.0)
    assert scale.low < scale.high
    places = [scale.place(value) for value in values if math.isfinite(value)]
    assert all(0.0 <= place <= 1.0 for place in places)
    ticks = scale.ticks(count)
    assert all(scale.low <= tick <= scale.high for tick in ticks)
    assert len(ticks) <= 3 * count + 2
    assert ticks == sorted(set(ticks))


def test_ticks_are_round() -> None:
    assert Scale(0.0, 300.0).ticks(6) == [0, 50, 100, 150, 200, 250, 300]
    assert Scale(0.0, 0.00031).ticks(4) == [0.0, 0.0001, 0.0002, 0.0003]
    assert Scale(-1.1, 1.3).ticks(5) == [-1.0, -0.5, 0.0, 0.5, 1.0]
    assert Scale(1e-3, 1e3, logarithmic=True).ticks(4) == [1e-3, 1e-1, 1e1, 1e3]
    assert Scale(1.0, 60.0, logarithmic=True).ticks(4) == [1, 2, 5, 10, 20, 50]


def test_a_few_outliers_do_not_flatten_a_chart() -> None:
    scale = fit([*(2.0 + step / 1000 for step in range(1000)), 1e9])
    assert scale.high < 4
    assert scale.place(1e9) == 1.0
    assert fit([0.5, 100.0]).logarithmic
    assert not fit([0.0, 100.0]).logarithmic
    assert not fit([-0.5, 100.0]).logarithmic


@given(ANY)
def test_every_number_has_words(value: float) -> None:
    words = brief(value)
    assert 0 < len(words) <= 14
    if math.isfinite(value) and 1e-3 < abs(value) < 1000:
        assert float(words) == pytest.approx(value, rel=6e-3)
    assert seconds_in_words(value)
    assert bytes_in_words(value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "0"),
        (-2.5, "-2.5"),
        (999.96, "1000"),
        (12345.6, "12,346"),
        (9.99e8, "999 M"),
        (3.2e-7, "3.2e-7"),
        (1e25, "1e+25"),
    ],
)
def test_numbers_in_words(value: float, words: str) -> None:
    assert brief(value) == words
