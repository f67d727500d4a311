"""Write the tokenizer and the token stores of a spec: ``ironfn prepare``."""

from __future__ import annotations

import click

from ironfn.spec.records import RunSpec

from .specs import takes_spec


@click.command("prepare")
@takes_spec
@click.option("--force", is_flag=True, help="Write everything anew, even where nothing changed.")
def command(spec: RunSpec, force: bool) -> None:
    """Train or take the tokenizer and write the token stores of a spec.

    What is there already is taken as it is when settings, sources (by content) and checksums are the same.
    """
    from ironfn.data import prepare

    prepare(spec.data, seed=spec.train.seed, say=click.echo, force=force)
