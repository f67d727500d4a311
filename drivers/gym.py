"""Write questions of reasoning-gym to learn from: ``ironfn data gym``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from .writing import write_new


@click.command("gym")
@click.argument("task")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--size", default=1000, show_default=True, type=click.IntRange(1), help="Questions.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Others for another seed.")
@click.option("-s", "--set", "settings", multiple=True, metavar="NAME=VALUE", help="A setting of the task's own.")
def command(task: str, file: Path, size: int, seed: int, settings: tuple[str, ...]) -> None:
    """Write questions of reasoning-gym's TASK, such as chain_sum, to FILE, one a line.

    A row has the prompt, the answer, and what a reward of kind gym knows the question by again. A question that was
    drawn before is left out: what is held out should not be among what is learned.
    """
    from ironfn.rewards.gym import Task, rows

    def unlike() -> list[dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for row in rows(Task(task, size, seed, dict(map(_setting, settings)))):
            found.setdefault(row["prompt"], row)
        return list(found.values())

    count = write_new(file, unlike)
    again = f", {size - count:,} that came again left out" if count < size else ""
    click.echo(f"{file}: {count:,} questions of {task}{again}")


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (equals and name.isidentifier()) or name in ("size", "seed"):
        raise click.BadParameter(f"{text!r} is not NAME=VALUE; write for example min_terms=2", param_hint="--set")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
