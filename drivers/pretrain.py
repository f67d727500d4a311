"""Train a language model from random weights, or resume a run: ``ironfn pretrain``."""

from __future__ import annotations

import functools
import sys
from typing import NoReturn

import click

from ironfn.spec.records import RunSpec

from .launch import launched, processes, quieten
from .modes import of_this_mode
from .signals import ignore_signals
from .specs import takes_spec


@click.command("pretrain")
@functools.partial(takes_spec, ranks=processes)
@click.option("--override", is_flag=True, help="Go on although the spec changed where a run may not change.")
@click.option("--restart", is_flag=True, help="Begin anew where there are checkpoints but none is whole.")
def command(spec: RunSpec, override: bool, restart: bool) -> None:
    """Train a language model from random weights, or resume one.

    The run lives in OUT/NAME of the spec. Called again, it goes on from its newest whole checkpoint, bit for bit.
    SIGTERM, SIGINT and SIGUSR1 save at the end of the step and exit with code 75. Several ranks are started by
    torchrun --nproc-per-node N -m ironfn pretrain SPEC, N being the product of the mesh.
    """
    of_this_mode(spec, "pretrain")
    trains(spec, override, restart)


def trains(spec: RunSpec, override: bool, restart: bool, *, prepared: bool = False) -> NoReturn:
    """Train as a spec says, on this process's part of the mesh, and exit. prepared: prepare the data where needed."""
    quieten()
    from .prepare import prepare_on_first
    from .run import run

    with launched(spec) as (mesh, device):
        if prepared:
            prepare_on_first(spec, mesh, device)
        code = run(spec, mesh=mesh, device=device, override=override, restart=restart)
        ignore_signals()  # all is saved: one more, while the ranks part, may not change the code that says so
    sys.exit(code)
