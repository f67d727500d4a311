"""Write sums to learn: ``ironfn data sums``."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command("sums")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--below", default=30, show_default=True, type=click.IntRange(1, 1000), help="Both numbers are less.")
def command(file: Path, below: int) -> None:
    """Write all sums of two numbers to FILE, one a line, to try things without any download.

    A row has the text to read (12+7=19), and the prompt and the answer to be rewarded for.
    """
    if file.exists():
        raise ValueError(f"{file} is there already; give a new name, or remove it")
    sums = [(a, b) for a in range(below) for b in range(below)]
    rows = [{"text": f"{a}+{b}={a + b}", "prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    click.echo(f"{file}: {len(rows):,} sums")
