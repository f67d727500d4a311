"""Print the figures of a part: ``python -m bench pretrain``, with ``--json`` one object a line."""

from __future__ import annotations

import importlib
import json
import sys
from types import MappingProxyType

import click

PARTS = MappingProxyType(
    {
        "pretrain": ("startup", "step", "optimizers", "prepare", "damage", "kills", "quickstart"),
        "mesh": ("states", "saving", "ledger", "experts", "reduction", "law"),
        "interop": ("interop", "evals"),
        "generate": ("decoding", "batching", "serving"),
        "sft": ("lessons", "quantized", "finetuning"),
        "dpo": ("preferring",),
        "rewards": ("rewards",),
        "grpo": ("rewards", "rewarding"),
    }
)
"""The modules whose figures make a part, the quick ones first."""


@click.command()
@click.argument("part", type=click.Choice(list(PARTS)))
@click.option("--json", "as_json", is_flag=True, help="Print one object a line: name, value, bar, met, note.")
@click.option("--only", multiple=True, metavar="MODULE", help="Measure these modules of the part only.")
def main(part: str, as_json: bool, only: tuple[str, ...]) -> None:
    """Measure ironfn against its peers, in one run, and print each figure beside its bar.

    Exit code 1 where a figure misses its bar.
    """
    if unknown := set(only) - set(PARTS[part]):
        raise click.UsageError(f"{part} has no {', '.join(sorted(unknown))}; it has {', '.join(PARTS[part])}")
    missed = 0
    for module in only or PARTS[part]:
        for figure in importlib.import_module(f"bench.{module}").figures():
            missed += not figure.met
            if as_json:
                row = {"name": figure.name, "value": figure.value, "bar": figure.bar, "met": figure.met}
                print(json.dumps(row | {"note": figure.note}), flush=True)
            else:
                mark = click.style("met   ", fg="green") if figure.met else click.style("MISSED", fg="red")
                click.echo(f"{mark} {figure.name:36} {figure.value:10.4g}  {figure.bar:10} {figure.note}")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
