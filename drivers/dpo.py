"""Teach a model what is preferred: ``ironfn dpo``."""

from __future__ import annotations

import functools

import click

from ironfn.spec.records import RunSpec

from .launch import processes
from .modes import of_this_mode
from .pretrain import trains
from .specs import takes_spec


@click.command("dpo")
@functools.partial(takes_spec, ranks=processes)
@click.option("--override", is_flag=True, help="Go on although the spec changed where a run may not change.")
@click.option("--restart", is_flag=True, help="Begin anew where there are checkpoints but none is whole.")
def command(spec: RunSpec, override: bool, restart: bool) -> None:
    """Teach a model what is preferred, or resume such a run.

    The data are pairs of a chosen and a rejected text (data.form: pairs), or completions that are liked or not
    (judged). dpo.objective chooses the loss: dpo, robust, hinge, ipo, simpo, orpo, or kto. The reference is the model
    that the run begins from. All else is as in `ironfn sft`.
    """
    of_this_mode(spec, "dpo")
    trains(spec, override, restart, prepared=True)
