"""The options that several commands share: which model, and how its tokens are chosen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from ironfn.generate.sampling import Sampling

F = TypeVar("F", bound=Callable[..., Any])
NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")

_MODEL = (
    click.argument("model", type=click.Path(exists=True, path_type=Path)),
    click.option(
        "--dtype",
        type=click.Choice(("float32", "bfloat16", "float16")),
        help="Of the parameters; else a run's own, float32 on a CPU.",
    ),
    click.option("--int8", is_flag=True, help="Matrices in 8 bits: faster, and a little less like the model."),
)
_SAMPLING = (
    click.option("--tokens", default=256, show_default=True, type=click.IntRange(1), help="New tokens at the most."),
    click.option("-t", "--temperature", default=0.8, show_default=True, type=click.FloatRange(0), help="0 is greedy."),
    click.option("-k", "--top-k", default=50, show_default=True, type=click.IntRange(0), help="0 takes all tokens."),
    click.option("--top-p", default=1.0, show_default=True, type=float, help="The likeliest that reach this together."),
    click.option("--min-p", default=0.0, show_default=True, type=float, help="Those this share as likely as the best."),
    click.option("--repetition-penalty", default=1.0, show_default=True, type=float, help="Above 1 repeats less."),
    click.option("--seed", default=0, show_default=True, type=int),
    click.option("--stop", "stops", multiple=True, help="End where this text comes; give it again for more."),
)


def model_options(command: F) -> F:
    """Give a command its ``model``, ``dtype`` and ``int8``."""
    for option in reversed(_MODEL):
        command = option(command)
    return command


def sampling_options(command: F) -> F:
    """Give a command the options of `sampling_of`, and ``tokens`` and ``stops``."""
    for option in reversed(_SAMPLING):
        command = option(command)
    return command


def sampling_of(options: dict[str, Any]) -> Sampling:
    """Take the sampling out of a command's options. ValueError for values that mean nothing."""
    from ironfn.generate.sampling import Sampling

    values = {name: options.pop(name) for name in NAMES}
    values["top_k"] = values["top_k"] or None
    return Sampling(**values)
