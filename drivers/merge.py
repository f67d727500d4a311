"""Make one model of an adapter and the model that it was trained beside: ``ironfn merge``."""

from __future__ import annotations

from pathlib import Path

import click

_EXISTS = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command("merge")
@click.argument("source", type=_EXISTS)
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--base", type=_EXISTS, help="The model under the adapter; else the one that SOURCE names.")
def command(source: Path, target: Path, base: Path | None) -> None:
    """Write the model that an adapter and its base make together, as a new run directory.

    SOURCE is a run with an adapter, one of its checkpoints, or a directory of peft's. The sum is made in float32 and
    cast once to what the base has.
    """
    from .merging import merge_peft, merge_run

    if target.exists():
        raise ValueError(f"{target} is there already; give a new name, or remove it")
    make = merge_peft if (source / "adapter_config.json").exists() else merge_run
    click.echo(make(source, target, base, lambda line: click.echo(line)))
