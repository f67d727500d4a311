"""Write sums to learn: ``ironfn data sums``."""

from __future__ import annotations

import random
from pathlib import Path

import click

from .writing import write_new

_TOLD = (
    "{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?",
    "There are {a} {things} in a box. {name} puts {b} more into it. How many {things} are in the box?",
    "{name} found {a} {things} in the morning and {b} in the evening. How many {things} did {name} find?",
    "{name} had {a} {things}. A friend gave {name} {b} {things}. How many {things} does {name} have?",
)
_NAMES = ("Ada", "Ben", "Mia", "Tom", "Lena", "Omar", "Ruth", "Yuki")
_THINGS = ("apples", "books", "coins", "eggs", "pens", "shells", "stamps", "stones")


@click.command("sums")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--below", default=100, show_default=True, type=click.IntRange(1, 1000), help="Both numbers are less.")
@click.option(
    "--wrong",
    default=0.75,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="Share of texts that carry once too often.",
)
@click.option("--seed", default=0, show_default=True, help="Draws which are wrong.")
@click.option("--words", is_flag=True, help="Ask with a little story.")
def command(file: Path, below: int, wrong: float, seed: int, words: bool) -> None:
    """Write all sums of two numbers to FILE, one a line, to try things without any download.

    A row has the prompt (12+7=), the answer to be rewarded for (19), and a text to read, which is wrong more often than
    not: it carries a one that there is not, and says 29. Who has read the texts can add, and believes what most of them
    say; nothing but the reward tells that it is wrong.
    """
    count = write_new(file, lambda: _rows(below, wrong, random.Random(seed), words))
    click.echo(f"{file}: {count:,} sums")


def _rows(below: int, wrong: float, draw: random.Random, words: bool) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = []
    for a in range(below):
        for b in range(below):
            read, asked = a + b + 10 * (draw.random() < wrong), f"{a}+{b}="
            if words:
                asked = draw.choice(_TOLD).format(a=a, b=b, name=draw.choice(_NAMES), things=draw.choice(_THINGS))
            rows.append({"text": f"{asked}{' ' * words}{read}", "prompt": asked, "answer": str(a + b)})
    return rows
