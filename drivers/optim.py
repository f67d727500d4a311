"""Show which optimizer gets which parameter: ``ironfn optim``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from ironfn.spec.records import RunSpec

from .specs import takes_spec

if TYPE_CHECKING:
    from ironfn.optim.presets import Group


@click.group()
def command() -> None:
    """Show which optimizer gets which parameter."""


@command.command()
@takes_spec
def groups(spec: RunSpec) -> None:
    """Print the groups of a spec's parameters: which optimizer moves them, with or without decay.

    One line for the leaves that differ only in their layer. Override with patterns, the first match wins:
    -s 'optim.groups={"attn/wk": adamw}'.
    """
    from ironfn.model.arch import complete
    from ironfn.optim.presets import groups_table

    from .places import trained_shapes

    arch = complete(spec.model, spec.model.vocab_size or spec.data.tokenizer.vocab_size)
    rows = groups_table(spec.optim, *trained_shapes(spec, arch))
    click.echo(_text(rows))
    if spec.model.vocab_size is None:
        click.echo(f"(for a vocabulary of {arch.vocab:,}; a prepared tokenizer may have fewer)", err=True)


def _text(rows: Sequence[Group]) -> str:
    """Lay the rows out in columns, with a sum for each group and for all."""
    cells = [("group", "parameter", "leaves", "shape", "numbers", "state_bytes")]
    for label in dict.fromkeys(row.label for row in rows):
        group = [row for row in rows if row.label == label]
        for row in group:
            shape = "x".join(map(str, row.shape)) or "-"
            cells.append((label, row.pattern, *_counts([row], shape)))
        cells.append((label, "(all)", *_counts(group, "")))
    cells.append(("total", "(all)", *_counts(rows, "")))
    widths = [max(len(line[column]) for line in cells) for column in range(6)]
    aligned = [
        "  ".join(
            cell.ljust(w) if column < 2 else cell.rjust(w)
            for column, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]
    return "\n".join(line.rstrip() for line in aligned)


def _counts(rows: Sequence[Group], shape: str) -> tuple[str, str, str, str]:
    leaves, numbers = sum(len(row.paths) for row in rows), sum(row.numbers for row in rows)
    return f"{leaves:,}", shape, f"{numbers:,}", f"{sum(row.state_bytes for row in rows):,}"
