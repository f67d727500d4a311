"""Examine examples before they are trained on: ``ironfn data check``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ironfn.data.check import Findings, Plan

    from .wording import Wording

_EXISTS = click.Path(exists=True, path_type=Path)


@click.command("check")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--model", type=_EXISTS, help="A run, a Hugging Face directory or a GGUF file: count its tokens.")
@click.option("--tokenizer", type=_EXISTS, help="A tokenizer.json: count tokens without a model.")
@click.option("--template", metavar="NAME|FILE", help="A chat template to take instead of the model's own.")
@click.option("--length", type=click.IntRange(2), help="Tokens a row of training: count longer examples, and pack.")
@click.option("--batch", type=click.IntRange(1), default=8, show_default=True, help="Rows a step, to count steps.")
@click.option("--field", "renamed", multiple=True, metavar="OURS=THEIRS", help="A name: prompt=question.")
@click.option("--train-on", type=click.Choice(["all", "last"]), default="all", show_default=True, help="The answers.")
@click.option("--json", "as_json", is_flag=True, help="Write the findings as JSON.")
def command(
    files: tuple[Path, ...],
    model: Path | None,
    tokenizer: Path | None,
    template: str | None,
    length: int | None,
    batch: int,
    renamed: tuple[str, ...],
    train_on: Any,
    as_json: bool,
) -> None:
    """Examine FILES of examples for fine-tuning: JSON Lines, a JSON list, parquet.

    Without a model, sizes are in characters and the form of the rows alone is checked. Exit code 1 where rows are
    faulty, or where there is nothing to train on.
    """
    from ironfn.data.check import check, suggest

    from .wording import open_wording

    if model is not None and tokenizer is not None:
        raise click.UsageError("give --model or --tokenizer, not both")
    source = model or tokenizer
    if source is None and (length is not None or template is not None):
        raise click.UsageError("--length and --template count tokens: give --model or --tokenizer as well")
    wording = None if source is None else open_wording(source)
    teaching = None if wording is None else wording.teaching(template, train_on, "split")
    found = check(files, _fields(renamed), teaching, length)
    plan = suggest(found, batch, length)
    if as_json:
        click.echo(json.dumps(_plain(found, plan), indent=1))
    else:
        for line in _lines(found, plan, wording, length, batch):
            click.echo(line)
    if found.faulty or not found.examples:
        click.get_current_context().exit(1)


def _fields(renamed: tuple[str, ...]) -> dict[str, str]:
    pairs = [each.partition("=") for each in renamed]
    if wrong := ["".join(each) for each in pairs if not (each[0] and each[2])]:
        raise click.UsageError(f"--field {wrong[0]!r}: write our name and theirs, as in prompt=question")
    return {ours: theirs for ours, _, theirs in pairs}


def _lines(found: Findings, plan: Plan, wording: Wording | None, length: int | None, batch: int) -> Iterator[str]:
    """Yield what people read."""
    unit = "characters" if wording is None else "tokens"
    forms = ", ".join(f"{count:,} {form}" for form, count in found.forms.most_common())
    blank = f", {found.blank:,} blank lines" if found.blank else ""
    yield f"{found.examples:,} examples ({forms or 'none'}), {found.faulty:,} faulty rows{blank}"
    if found.mixed:
        yield "a run takes examples, pairs or judged completions: part the files by what they hold"
    for kind, kept in sorted(found.faults.items(), key=lambda item: -item[1].count):
        yield from _told(f"faulty, {kind}", kept.count, kept.first)
    yield from _told("repeats of an earlier example", found.duplicates.count, found.duplicates.first)
    yield from _told("nothing would be trained", found.untaught.count, found.untaught.first)
    if found.messages:
        spread = ", ".join(f"{number}: {count:,}" for number, count in sorted(found.messages.items()))
        yield f"messages a conversation: {spread}"
    if found.sizes:
        numbers = {name: f"{value:,}" for name, value in _spread(found.sizes).items()}
        trained = f", {found.trained / sum(found.sizes):.1%} of them trained" if wording is not None else ""
        yield f"{unit}: {sum(found.sizes):,}{trained}; each text " + ", ".join(f"{n} {v}" for n, v in numbers.items())
    if length is not None:
        yield from _told(f"longer than a row of {length}", found.over.count, found.over.first)
        yield from _told("nothing trained would be left of", found.cut_away.count, found.cut_away.first)
        if plan.efficiency is not None:
            yield f"packed into {plan.rows:,} rows of {length}, {plan.efficiency:.1%} of their places used"
    if not found.examples:
        yield "nothing to train on: give files with rows that can be used"
    if found.examples:
        yield f"to begin with: {plan.epochs} epochs, {plan.steps:,} steps of {batch} rows"


def _told(what: str, count: int, first: list[str]) -> Iterator[str]:
    if count:
        yield f"{what}: {count:,}"
        yield from (f"  {each}" for each in first)
        if count > len(first):
            yield f"  and {count - len(first):,} more"


def _spread(sizes: list[int]) -> dict[str, int]:
    """Return the least, the middle, the 95th percentile and the most."""
    ranked = sorted(sizes)
    at = {"least": 0.0, "median": 0.5, "95 %": 0.95, "most": 1.0}
    return {name: ranked[round(share * (len(ranked) - 1))] for name, share in at.items()}


def _plain(found: Findings, plan: Plan) -> Mapping[str, Any]:
    """Return the findings as JSON values."""
    from attrs import asdict

    told = asdict(found, filter=lambda attribute, _: attribute.name not in ("sizes", "texts"))
    told |= {name: dict(value) for name, value in told.items() if isinstance(value, Counter)}
    sizes = {"total": sum(found.sizes), **_spread(found.sizes)} if found.sizes else {}
    return told | {"examples": found.examples, "faulty": found.faulty, "sizes": sizes, "plan": asdict(plan)}
