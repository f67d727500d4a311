"""Teach a model by examples, whole or through an adapter: ``ironfn sft``."""

from __future__ import annotations

import functools

import click

from ironfn.spec.records import RunSpec

from .launch import processes
from .modes import of_this_mode
from .pretrain import trains
from .specs import takes_spec


@click.command("sft")
@functools.partial(takes_spec, ranks=processes)
@click.option("--override", is_flag=True, help="Go on although the spec changed where a run may not change.")
@click.option("--restart", is_flag=True, help="Begin anew where there are checkpoints but none is whole.")
def command(spec: RunSpec, override: bool, restart: bool) -> None:
    """Teach a model by examples such as conversations, or resume such a run.

    The model is the one of model.init_from. With `adapter: {kind: lora}` it stays as it is and an adapter is trained
    beside it. The examples are prepared first, where they are not yet. All else is as in `ironfn pretrain`.
    """
    of_this_mode(spec, "sft")
    trains(spec, override, restart, prepared=True)
