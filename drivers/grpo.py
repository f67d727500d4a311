"""Teach a model by rewards for what it writes itself: ``ironfn grpo``."""

from __future__ import annotations

import functools

import click

from ironfn.spec.records import RunSpec

from .launch import processes
from .modes import of_this_mode
from .pretrain import trains
from .specs import takes_spec


@click.command("grpo")
@functools.partial(takes_spec, ranks=processes)
@click.option("--override", is_flag=True, help="Go on although the spec changed where a run may not change.")
@click.option("--restart", is_flag=True, help="Begin anew where there are checkpoints but none is whole.")
def command(spec: RunSpec, override: bool, restart: bool) -> None:
    """Teach a model by rewards for what it writes itself, or resume such a run.

    The model of model.init_from answers prompts (data.form: prompts), a group of completions each; the rewards of
    grpo.rewards grade them, and what is better than its group becomes likelier. All else is as in `ironfn pretrain`.
    """
    of_this_mode(spec, "grpo")
    trains(spec, override, restart)
