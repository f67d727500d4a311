"""List, verify and show checkpoints: ``ironfn ckpt``."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from ironfn import checkpoint
from ironfn.checkpoint import DamagedCheckpoint
from ironfn.checkpoint.manifest import NAME, Leaf

EXIT_DAMAGED = 1

_DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)


@click.group()
def command() -> None:
    """List, verify and show checkpoints."""


@command.command()
@click.argument("run", type=_DIRECTORY)
def ls(run: Path) -> None:
    """List the checkpoints of a run, oldest first."""
    _print(("step", "bytes", "leaves", "saved", "path"), [_row(step, path) for step, path in _all(run).items()])


@command.command()
@click.argument("path", metavar="RUN_OR_CKPT", type=_DIRECTORY)
@click.pass_context
def verify(ctx: click.Context, path: Path) -> None:
    """Read every byte of a checkpoint, or of all those of a run, and hold it to its checksums.

    Exits with 1 where a checkpoint is damaged, naming each file and leaf.
    """
    damaged = False
    for found in [path] if _is_checkpoint(path) else _all(path).values():
        problems = checkpoint.verify(found)
        damaged = damaged or bool(problems)
        click.echo(f"{found}: {'damaged' if problems else 'whole'}")
        for problem in problems:
            click.echo(f"  {problem}")
    ctx.exit(EXIT_DAMAGED if damaged else 0)


@command.command()
@click.argument("path", metavar="RUN_OR_CKPT", type=_DIRECTORY)
def show(path: Path) -> None:
    """Show a checkpoint, or the newest of a run: its step, its leaves, and what was saved beside them."""
    if not _is_checkpoint(path):
        path = list(_all(path).values())[-1]
    try:
        manifest = checkpoint.read_manifest(path)
    except checkpoint.DamagedCheckpoint as error:
        raise ValueError(f"{path}: {error}; `ironfn ckpt ls` lists the others") from error
    size = sum(record.size for record in manifest.files.values())
    click.echo(f"{path}: step {manifest.step}, {len(manifest.leaves):,} leaves, {size:,} bytes\n")
    _print(
        ("leaf", "dtype", "shape", "bytes", "file"), [_describe(name, leaf) for name, leaf in manifest.leaves.items()]
    )
    for key, value in manifest.meta.items():
        text = value.rstrip() if isinstance(value, str) else json.dumps(value, indent=2, default=str)
        click.echo(f"\n{key}:" + (f"\n{text}" if "\n" in text else f" {text}"))


def _is_checkpoint(path: Path) -> bool:
    return (path / NAME).exists() or checkpoint.step_of(path.resolve().name) is not None


def _all(run: Path) -> dict[int, Path]:
    inner = run / "checkpoints"
    found = checkpoint.steps(inner if inner.is_dir() else run)
    if not found:
        raise click.ClickException(f"there are no checkpoints in {run}")
    return found


def _row(step: int, path: Path) -> list[str]:
    try:
        manifest = checkpoint.read_manifest(path)
    except DamagedCheckpoint as error:
        return [str(step), "?", "?", f"damaged: {error}", str(path)]
    size = sum(record.size for record in manifest.files.values())
    saved = datetime.datetime.fromtimestamp((path / NAME).stat().st_mtime).isoformat(" ", "seconds")
    return [str(step), f"{size:,}", f"{len(manifest.leaves):,}", saved, str(path)]


def _describe(name: str, leaf: Leaf) -> list[str]:
    files = ", ".join(dict.fromkeys(piece.file for piece in leaf.pieces))
    return [name, leaf.dtype, "x".join(map(str, leaf.shape)) or "-", f"{leaf.nbytes:,}", files]


def _print(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table: for a person on a terminal, as tab-separated lines for anything else."""
    console = Console()
    if not console.is_terminal:
        for row in (headings, *rows):
            click.echo("\t".join(row))
        return
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(
            heading, justify="right" if heading in ("step", "bytes", "leaves") else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*row)
    console.print(table, markup=False)
