"""Draw charts as HTML that needs no script: an SVG that stretches, with its words beside it in the page's own type."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Literal

from attrs import frozen

from ironfn.report.series import Points, Scale, brief, finite, fit, thin
from ironfn.report.words import safe, visible

LINE_POINTS, FAINT_POINTS = 450, 900
"""As many points of a line as a screen shows."""
DOTS = 60
"""As many points are dotted before they would run into a line."""


@frozen
class Series:
    """One line of a chart. look: a ``line``, a ``faint`` one behind it, or ``dots`` on a line.

    tone: its colour, one of the page's.
    """

    name: str
    points: Points
    tone: str
    look: Literal["line", "faint", "dots"] = "line"


@frozen
class Chart:
    """A chart over the steps. note: what a reader needs besides its title. wide: it takes the page's whole width.

    outliers: the share of values that may lie on the edge.
    """

    title: str
    series: list[Series]
    note: str = ""
    wide: bool = False
    outliers: float = 0.005


def draw(chart: Chart, steps: tuple[int, int]) -> str:
    """Return the chart as a ``figure`` over these steps, from the first to the last.

    Values that are not finite break the line; a few far outliers lie on the edge.
    """
    drawn = [_thinned(each) for each in chart.series if each.points]
    across = Scale(steps[0], max(steps[1], steps[0] + 1))
    up = fit([value for each in chart.series for _, value in each.points], chart.outliers)
    paths = "".join(_path(each, across, up) for each in drawn)
    x_ticks, y_ticks = across.ticks(6 if chart.wide else 4), up.ticks(5 if chart.wide else 4)
    grid = "".join(f"M0 {_y(up, value)}H1000" for value in y_ticks)
    data = json.dumps(_data(drawn, across, up), separators=(",", ":"), allow_nan=False)
    words = safe(_describe(chart))
    note = f'<p class="note">{safe(chart.note)}</p>' if chart.note else ""
    return (
        f'<figure class="chart{" wide" if chart.wide else ""}" tabindex="0" data-chart="{safe(data)}">'
        f"<figcaption><h3>{safe(chart.title)}</h3>{_legend(drawn)}</figcaption>"
        f'<div class="plot"><svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img" aria-label="{words}">'
        f'<path class="grid" d="{grid}"/>{paths}</svg>'
        f"{_y_labels(up, y_ticks)}{_x_labels(across, x_ticks)}"
        f'<div class="cursor" hidden></div><output class="readout" hidden></output></div>'
        f"{note}</figure>"
    )


def _thinned(series: Series) -> Series:
    """Return the series with no more points than show; dots that would run into one another become a line."""
    look = "line" if series.look == "dots" and len(series.points) > DOTS else series.look
    return Series(series.name, thin(series.points, FAINT_POINTS if look == "faint" else LINE_POINTS), series.tone, look)


def _path(series: Series, across: Scale, up: Scale) -> str:
    """Return the line: a point with no finite neighbour becomes a dot."""
    commands: list[str] = []
    dots: list[str] = []
    pen_down = False
    for at, (step, value) in enumerate(series.points):
        if not math.isfinite(value):
            pen_down = False
            continue
        place = f"{across.place(step) * 1000:.5g} {_y(up, value)}"
        commands.append(f"{'L' if pen_down else 'M'}{place}")
        alone = at + 1 == len(series.points) or not math.isfinite(series.points[at + 1][1])
        if series.look == "dots" or (alone and not pen_down):
            dots.append(f"M{place}h0")
        pen_down = True
    line = f'<path class="{series.look} {series.tone}" d="{"".join(commands)}"/>' if commands else ""
    return line + (f'<path class="points {series.tone}" d="{"".join(dots)}"/>' if dots else "")


def _y(up: Scale, value: float) -> int:
    return round((1 - up.place(value)) * 1000)


def _x_labels(across: Scale, ticks: Sequence[float]) -> str:
    labels = "".join(
        f'<span style="left:{across.place(value) * 100:.4g}%">{value:,.0f}</span>' for value in ticks if value % 1 == 0
    )
    return f'<div class="x" aria-hidden="true">{labels}</div>'


def _y_labels(up: Scale, ticks: Sequence[float]) -> str:
    labels = "".join(f'<span style="bottom:{up.place(value) * 100:.4g}%">{brief(value)}</span>' for value in ticks)
    return f'<div class="y" aria-hidden="true">{labels}</div>'


def _legend(drawn: list[Series]) -> str:
    if len(drawn) < 2:
        return ""
    items = "".join(f'<li><i class="{each.look} {each.tone}"></i>{safe(each.name)}</li>' for each in drawn)
    return f'<ul class="legend">{items}</ul>'


def _data(drawn: list[Series], across: Scale, up: Scale) -> dict[str, object]:
    """Return what the read-out under the pointer shows: of the faint line nothing, where there is a smooth one."""
    shown = [each for each in drawn if each.look != "faint"] or drawn
    return {
        "x": [across.low, across.high],
        "y": [up.low, up.high, int(up.logarithmic)],
        "series": [
            {
                "name": visible(each.name),
                "tone": each.tone,
                "x": [step for step, _ in finite(each.points)],
                "y": [float(f"{value:.5g}") for _, value in finite(each.points)],
            }
            for each in shown
        ],
    }


def _describe(chart: Chart) -> str:
    """Say in words what the chart shows, for who cannot see it."""
    parts: list[str] = []
    for each in chart.series:
        known = finite(each.points)
        if known and each.look != "faint":
            (first, start), (last, end) = known[0], known[-1]
            parts.append(f"{each.name} from {brief(start)} at step {first:,} to {brief(end)} at step {last:,}")
    return f"{chart.title} by step: {'; '.join(parts) or 'no finite value'}."
