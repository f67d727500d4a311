"""Plot a run as one picture, ``loss.png``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ironfn.report.run import Run
from ironfn.report.series import Points, finite, fit, smooth, thin

TRAIN, VALIDATION, TEST, INK, GRID = "#2457d6", "#c2410c", "#0f766e", "#5b6475", "#e3e6ec"


def loss_png(metrics: str | Path, target: str | Path) -> Path:
    """Draw a run's metrics file as a PNG at ``target`` and return its path; the file there is replaced atomically.

    Above, the loss of each row (the reward, where there are rewards), its smooth course and the evaluations; below,
    learning rate and gradient norm.
    ImportError where matplotlib is absent. OSError where the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"loss.png is drawn by matplotlib ({error}): pip install 'ironfn[plots]'") from error
    target = Path(target)
    run = Run.read(Path(metrics).parent)
    figure = Figure(figsize=(9, 6.4), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    subject, rate = figure.subplots(2, 1, sharex=True, height_ratios=(2.4, 1))
    _draw_subject(subject, run)
    _draw_rate(rate, run)
    aside = target.with_name(f"{target.name}.{os.getpid()}.new")
    figure.savefig(aside, format="png")
    aside.replace(target)
    return target


def _draw_subject(axes: Any, run: Run) -> None:
    subject = run.subject
    raw = run.column("train", subject.train)
    _line(axes, thin(raw, 2000), color=TRAIN, linewidth=0.8, alpha=0.28)
    _line(axes, smooth(raw), color=TRAIN, linewidth=1.8, label="train")
    for kind in run.kinds:
        evaluated = run.column(kind, subject.held)
        marker = "o" if len(evaluated) <= 60 else ""
        color = VALIDATION if kind == "validation" else TEST
        label = _with_last(kind, evaluated)
        _line(axes, evaluated, color=color, linewidth=1.2, marker=marker, markersize=4, label=label)
    drawn = (raw, *(run.column(kind, subject.held) for kind in run.kinds))
    shown = fit([value for points in drawn for _, value in points], subject.outliers)
    axes.set_ylim(shown.low, shown.high)
    axes.set_yscale("log" if shown.logarithmic else "linear")
    axes.set_ylabel(f"{subject.title.lower()} ({subject.unit})", color=INK)
    axes.set_title(run.name.replace("$", r"\$"), loc="left", fontsize=13, fontweight="bold")
    _dress(axes)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False)


def _draw_rate(axes: Any, run: Run) -> None:
    _line(axes, run.column("train", "lr"), color=TRAIN, linewidth=1.6)
    axes.set_ylabel("learning rate", color=TRAIN)
    axes.set_ylim(bottom=0.0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    axes.set_xlabel("step", color=INK)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.margins(x=0.01)
    _dress(axes)
    beside, norms = axes.twinx(), run.column("train", "grad_norm")
    _line(beside, thin(norms, 2000), color=INK, linewidth=0.8, alpha=0.3)
    _line(beside, smooth(norms), color=INK, linewidth=1.2)
    shown = fit([value for _, value in norms])
    beside.set_ylim(shown.low, shown.high)
    beside.set_yscale("log" if shown.logarithmic else "linear")
    beside.set_ylabel("gradient norm", color=INK)
    _dress(beside, grid=False)


def _line(axes: Any, series: Points, **look: Any) -> None:
    """Draw the series, a lone point as a dot; values that are not finite break the line."""
    if len(finite(series)) == 1:
        look["marker"] = "o"
    axes.plot([step for step, _ in series], [value for _, value in series], **look)


def _with_last(kind: str, evaluated: Points) -> str:
    known = finite(evaluated)
    return f"{kind}, {known[-1][1]:.3f} at the end" if known else kind


def _dress(axes: Any, grid: bool = True) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.tick_params(colors=INK, length=0)
    axes.set_axisbelow(True)
    if grid:
        axes.grid(axis="y", color=GRID, linewidth=0.8)
    else:
        axes.grid(False)
