"""Train a model to give what is preferred a higher reward: ``ironfn reward-model``."""

from __future__ import annotations

import functools

import click

from ironfn.spec.records import RunSpec

from .launch import processes
from .modes import of_this_mode
from .pretrain import trains
from .specs import takes_spec


@click.command("reward-model")
@functools.partial(takes_spec, ranks=processes)
@click.option("--override", is_flag=True, help="Go on although the spec changed where a run may not change.")
@click.option("--restart", is_flag=True, help="Begin anew where there are checkpoints but none is whole.")
def command(spec: RunSpec, override: bool, restart: bool) -> None:
    """Train a model that ends in a reward (model.score: true) on pairs, or resume such a run.

    It may begin from a model that predicts text: its head is left out. `ironfn convert RUN NEW` writes it as a
    sequence classifier of transformers.
    """
    of_this_mode(spec, "reward-model")
    trains(spec, override, restart, prepared=True)
