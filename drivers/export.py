"""Write what a run has trained as others load it: ``ironfn export``."""

from __future__ import annotations

from pathlib import Path

import click

from .convert import DTYPES

_EXISTS = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command("export")
@click.argument("source", type=_EXISTS)
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--merged", is_flag=True, help="Of a run with an adapter, write the whole model.")
@click.option("--base", type=_EXISTS, help="The model under the adapter; else the one that the run names.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Of a model: cast every tensor; else each keeps its own.")
@click.option("--architecture", help="Of a model: the class of transformers, such as LlamaForCausalLM.")
def command(
    source: Path, target: Path, merged: bool, base: Path | None, dtype: str | None, architecture: str | None
) -> None:
    """Write a run, or one of its checkpoints, into a new directory that others load.

    A model becomes a Hugging Face directory, an adapter one of peft's; with --merged the adapter's model is written.
    """
    import torch

    from .exported import export_run
    from .merging import export_adapter, has_adapter

    if target.exists():
        raise ValueError(f"{target} is there already; give a new name, or remove it")
    alone = has_adapter(source) and not merged
    if alone and (dtype is not None or architecture is not None):
        raise click.UsageError("an adapter is written as it is; --dtype and --architecture are for models (--merged)")
    if alone:
        click.echo(export_adapter(source, target, base, click.echo))
    else:
        kind = None if dtype is None else getattr(torch, dtype)
        click.echo(export_run(source, target, kind, architecture, 5_000_000_000, click.echo, base))
