"""Turn rows into the points, scales and words of a chart."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TypeAlias

from attrs import frozen

from ironfn.report.rows import Row

Points: TypeAlias = list[tuple[int, float]]
"""(step, value), by rising step. A value may be NaN or infinite: a chart breaks its line there."""
HUGE = 1e290
"""What a scale reaches at most: its own arithmetic must not overflow."""


def columns(rows: Sequence[Row]) -> dict[tuple[str, str], Points]:
    """Return the values of every column of numbers, by kind and name; of two rows of a step the later counts."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        kind, step = str(row.get("kind")), row["step"]
        for name, value in row.items():
            if isinstance(value, float) or type(value) is int:
                found.setdefault((kind, name), {})[step] = float(value)
    return {place: sorted(values.items()) for place, values in found.items() if place[1] != "step"}


def smooth(series: Points, limit: int = 450) -> Points:
    """Return at most ``limit`` points of a line through the middle of the finite values: it neither lags nor jumps.

    Locally weighted regression on straight lines with tricube weights (Cleveland 1979) over a fortieth of the rows on
    either side. Fewer than 40 rows come back as they are.
    """
    series = _means(finite(series), 4 * limit)
    last, reach = len(series) - 1, len(series) // 40
    if reach == 0:
        return series
    every = sorted({round(at * last / (limit - 1)) for at in range(limit)}) if last >= limit else range(last + 1)
    smoothed: Points = []
    for at in every:
        first = min(max(at - reach, 0), last - 2 * reach)
        smoothed.append((series[at][0], _fitted(series[first : first + 2 * reach + 1], at - first)))
    return smoothed


def _means(series: Points, count: int) -> Points:
    """Return the means of ``count`` stretches of the series, or all of a shorter one."""
    if len(series) <= count:
        return series
    cuts = [at * len(series) // count for at in range(count + 1)]
    parts = (series[start:end] for start, end in itertools.pairwise(cuts))
    return [(part[len(part) // 2][0], math.fsum(value for _, value in part) / len(part)) for part in parts]


def _fitted(part: Points, at: int) -> float:
    """Return the height at the place ``at`` of the line of weighted least squares through these points."""
    width = max(at, len(part) - 1 - at) + 1
    weights = [(1 - (abs(place - at) / width) ** 3) ** 3 for place in range(len(part))]
    total = math.fsum(weights)
    middle = math.fsum(w * place for place, w in enumerate(weights)) / total
    mean = math.fsum(w * value for w, (_, value) in zip(weights, part, strict=True)) / total
    spread = math.fsum(w * (place - middle) ** 2 for place, w in enumerate(weights))
    lean = math.fsum(
        w * (place - middle) * (point[1] - mean) for place, (w, point) in enumerate(zip(weights, part, strict=True))
    )
    return mean + lean / spread * (at - middle)


def is_finite(value: object) -> bool:
    """Tell whether a value of a row is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def finite(series: Points) -> Points:
    """Return the points whose value is a finite number."""
    return [(step, value) for step, value in series if math.isfinite(value)]


def thin(series: Points, limit: int) -> Points:
    """Return at most ``limit`` points with the same outline: the lowest and the highest of each stretch.

    A stretch that holds a value that is not finite keeps one such, so that the gap stays.
    """
    if len(series) <= limit:
        return series
    buckets = max(limit // 3, 1)
    kept: Points = []
    for bucket in range(buckets):
        part = series[bucket * len(series) // buckets : (bucket + 1) * len(series) // buckets]
        real = finite(part)
        chosen = {min(real, key=lambda p: p[1]), max(real, key=lambda p: p[1])} if real else set[tuple[int, float]]()
        if len(real) < len(part):
            chosen.add(next(point for point in part if not math.isfinite(point[1])))
        kept += sorted(chosen)
    return kept


@frozen
class Scale:
    """Map the values between ``low`` and ``high`` to 0 .. 1, evenly or by their logarithm; the others to the edge."""

    low: float
    high: float
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Return the place of a value, in [0, 1].

        >>> Scale(1.0, 100.0, logarithmic=True).place(10.0)
        0.5
        """
        low, high = self._bend(self.low), self._bend(self.high)
        return min(max((self._bend(max(value, self.low)) - low) / (high - low), 0.0), 1.0)

    def ticks(self, count: int) -> list[float]:
        """Return about ``count`` round values inside the scale."""
        if self.logarithmic:
            return _decades(self.low, self.high, count)
        return _round_values(self.low, self.high, count)

    def _bend(self, value: float) -> float:
        return math.log10(value) if self.logarithmic else value


def fit(values: Sequence[float], outliers: float = 0.005) -> Scale:
    """Return the scale for these values, a share ``outliers`` of which may lie outside at either end.

    It is logarithmic where the values span more than a factor of 30.
    """
    known = sorted(min(max(value, -HUGE), HUGE) for value in values if math.isfinite(value))
    if not known:
        return Scale(0.0, 1.0)
    cut = int(len(known) * outliers)
    low, high = known[cut], known[-1 - cut]
    if low > 0 and high / low > 30:
        return Scale(low / 1.15, high * 1.15, logarithmic=True)
    room = max((high - low) * 0.06, abs(high) * 1e-9) if low < high else abs(high) * 0.1 or 1.0
    bottom = low - room
    return Scale(0.0 if low >= 0 > bottom else bottom, high + room)


def _round_values(low: float, high: float, count: int) -> list[float]:
    raw = (high - low) / max(count, 1)
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next((unit * times for times in (1, 2, 5) if unit * times >= raw), unit * 10)
    first = math.ceil(low / step - 1e-9)
    places = range(first, math.floor(high / step + 1e-9) + 1)
    values = [round(place * step, 12 - math.floor(math.log10(step))) for place in places]
    return [value for value in values if low <= value <= high]


def _decades(low: float, high: float, count: int) -> list[float]:
    exponents = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    marks = (1, 2, 5) if 3 * len(exponents) <= 2 * count else (1,)
    every = -(-len(exponents) // count)
    values = [10.0**exponent * mark for exponent in exponents[::every] for mark in marks]
    return [value for value in values if low <= value <= high]


def brief(value: object, digits: int = 4) -> str:
    """Return a number as a person reads it, to ``digits`` significant ones; a dash for what is none.

    >>> [brief(v) for v in (3.21042, 0.0003, 12.0, 12140000, float("nan"), None)]
    ['3.21', '0.0003', '12', '12.14 M', 'not finite', '–']
    """
    if not isinstance(value, int | float):
        return "–"
    if not math.isfinite(value):
        return "not finite"
    size = abs(value)
    for factor, word in ((1e15, " P"), (1e12, " T"), (1e9, " G"), (1e6, " M")):
        if size >= factor:
            return f"{value / factor:.{digits}g}{word}" if size < 1e18 else f"{value:.3g}"
    if size >= 1000:
        return f"{value:,.0f}"
    if 0 < size < 1e-4:
        mantissa, _, exponent = f"{value:.{digits - 2}e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.{digits}g}" if size >= 1 else f"{value:.{digits - 1}g}"
