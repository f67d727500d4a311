"""Write the tokenizer and the token stores of a spec: ``ironfn prepare``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from ironfn.spec.records import RunSpec

from .specs import takes_spec

if TYPE_CHECKING:
    import torch

    from ironfn.mesh.axis import Mesh


@click.command("prepare")
@takes_spec
@click.option("--force", is_flag=True, help="Write everything anew, even where nothing changed.")
def command(spec: RunSpec, force: bool) -> None:
    """Train or take the tokenizer and write the token stores of a spec.

    What is there already is taken as it is when settings, sources (by content) and checksums are the same.
    """
    _prepare(spec, click.echo, force)


def prepare_on_first(spec: RunSpec, mesh: Mesh, device: torch.device) -> None:
    """Prepare on rank 0 what is not prepared yet, while the other ranks wait. All ranks call this together."""
    from .failures import together

    together(mesh, device, lambda: _prepare(spec, _line, False) if mesh.world.index == 0 else None)


def _line(line: str) -> None:
    click.echo(line, err=True)


def _prepare(spec: RunSpec, say: Callable[[str], None], force: bool) -> None:
    from ironfn.data import prepare
    from ironfn.data.prompts import Prompts

    from .build import opened
    from .taught import taught

    spec, lesson = taught(spec)
    if spec.data.form == "prompts":
        found = opened(spec, "train", lesson)
        assert isinstance(found, Prompts)
        say(f"{found.rows:,} prompts to train on, {found.cut:,} longer than there is room; nothing has to be prepared")
        return
    prepare(spec.data, seed=spec.train.seed, say=say, force=force, lesson=lesson)
