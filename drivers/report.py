"""Write a run's report again from what its directory holds."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import click

from .launch import command as command_of


def next_commands(run_dir: Path, ranks: int = 1) -> dict[str, str]:
    """Return what a person types next in the directory of a run on so many ranks, by what it does."""
    here = shlex.quote(str(run_dir))
    return {
        "Go on with the run": command_of(run_dir / "spec.yaml", ranks),
        "Let it write": f"ironfn generate {here}",
        "Look at its checkpoints": f"ironfn ckpt ls {here}",
        "Write this page again": f"ironfn report {here}",
    }


def draw(run_dir: Path, say: Callable[[str], object], warn: Callable[[str], object]) -> bool:
    """Write report.html and loss.png of a run and say where; tell whether the page is there.

    What cannot be written is warned of: the run itself is done.
    """
    from ironfn.report.page import write_report
    from ironfn.report.plots import loss_png
    from ironfn.report.rows import read_rows

    runs = [row for row in read_rows(run_dir / "metrics.jsonl") if row.get("kind") == "run"]
    ranks = runs[-1].get("devices", 1) if runs else 1
    page = True
    try:
        say(str(write_report(run_dir, next_commands(run_dir, ranks))))
    except OSError as error:
        warn(f"no report.html: {error}")
        page = False
    try:
        say(str(loss_png(run_dir / "metrics.jsonl", run_dir / "loss.png")))
    except (ImportError, OSError) as error:
        warn(f"no loss.png: {error}")
    return page


@click.command()
@click.argument("run_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
def command(run_dir: Path) -> None:
    """Write report.html and loss.png of RUN_DIR again from its metrics."""
    if not (run_dir / "metrics.jsonl").exists():
        raise click.ClickException(f"{run_dir} holds no metrics.jsonl: name the directory of a run, such as runs/NAME")
    if not draw(run_dir, click.echo, lambda text: click.echo(f"warning: {text}", err=True)):
        raise click.exceptions.Exit(1)
