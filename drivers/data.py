"""Look into data: ``ironfn data inspect``, and ``ironfn data check`` of its own file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.text import Text

from ironfn.spec.records import RunSpec

from .check import command as check
from .gym import command as gym
from .programs import command as programs
from .specs import takes_spec
from .sums import command as sums

if TYPE_CHECKING:
    from ironfn.data import Dataset, Lesson
    from ironfn.data.tokenizer import Vocabulary
    from ironfn.data.view import Span
    from ironfn.types import Batch

# A mark, the style it is shown in, and what it means.
_LEGEND = (
    ("text", "trained", "trained"),
    ("{{text}}", "masked", "masked: read, not trained"),
    ("[document n]", "document", "a document begins; it sees none before it"),
    ("[end]", "control", "its end token"),
    ("[fim prefix]", "control", "a document cut for fill-in-the-middle: prefix, suffix and middle follow their marks;"),
    ("", "control", "where [fim suffix] comes at once, prefix and middle stand joined after [fim middle]"),
    ("[pair n]", "document", "a prompt, once; after it two completions, each of which sees it and not the other"),
    ("[padding x n]", "padding", "fills what no text does"),
)
_STYLES = {"trained": "", "masked": "dim", "control": "bold magenta", "document": "bold blue", "padding": "dim cyan"}
_PARTS = {"": "", "prefix": "green", "middle": "yellow", "suffix": "cyan"}
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}


@click.group("data")
def command() -> None:
    """Look into data: examples before they are trained on, rows that were prepared; or write some to try things."""


command.add_command(check)
command.add_command(gym)
command.add_command(programs)
command.add_command(sums)


@command.command("inspect")
@takes_spec
@click.option("--split", type=click.Choice(["train", "validation", "test"]), default="train", show_default=True)
@click.option("--rows", type=click.IntRange(1), default=3, show_default=True, help="How many rows to show.")
@click.option("--step", type=click.IntRange(0), default=0, show_default=True, help="The training step whose rows.")
@click.option("--tokens", is_flag=True, help="Show a line for every token.")
def inspect(spec: RunSpec, split: str, rows: int, step: int, tokens: bool) -> None:
    """Show rows as a person would read them: what is trained, masked, padding, and where documents and FIM parts begin.

    Rows of the training split are those that the given step of the run sees.
    """
    from ironfn.data import open_dataset
    from ironfn.data.tokenizer import load
    from ironfn.data.view import spans

    from .taught import taught

    spec, lesson = taught(spec)
    console = Console(soft_wrap=True, highlight=False)
    if spec.data.form == "prompts":
        console.print(_prompts(spec, split, lesson, step, rows))
        return
    data = open_dataset(spec.data, split, lesson)
    vocabulary = load(data.tokenizer, spec.data.tokenizer.eos)
    console.print(Text("\n".join(_summary(data, split))))
    if not tokens:
        console.print(_legend())
    batch, titles = _rows(data, spec, split, step, rows)
    for row, title in enumerate(titles):
        console.print(Text(f"\n{title}: {_counts(batch, row)}", style="bold"))
        console.print(
            _tokens(batch, row, vocabulary)
            if tokens
            else _text(spans(batch, row, vocabulary, packed=lesson is not None, scored=bool(lesson and lesson.scored)))
        )


def _prompts(spec: RunSpec, split: str, lesson: Lesson | None, step: int, rows: int) -> Text:
    """Write prompts as the model is asked them, each with what its answers are graded by."""
    from tokenizers import Tokenizer

    from ironfn.data.prompts import Prompts

    from .build import opened

    data = opened(spec, split, lesson)
    assert isinstance(data, Prompts)
    first = step // spec.grpo.updates * spec.grpo.prompts * (1 + spec.grpo.refill)
    numbers = range(first, first + rows)
    chosen = data.at(numbers, spec.train.seed) if split == "train" else data.prompts[:rows]
    tokenizer = Tokenizer.from_file(str(data.tokenizer))
    text = Text(f"{split}: {data.rows:,} prompts, {data.cut:,} longer than a row has room for\n")
    for prompt in chosen:
        told = ", ".join(f"{name}: {value}" for name, value in prompt.row.items() if name != "prompt")
        text.append(f"\n{len(prompt.ids)} tokens; {told}\n".translate(_PICTURES), "bold")
        text.append(tokenizer.decode(list(prompt.ids), skip_special_tokens=False).translate(_PICTURES) + "\n")
    return text


def _rows(data: Dataset, spec: RunSpec, split: str, step: int, rows: int) -> tuple[Batch, list[str]]:
    """Return the rows to show, and a title for each."""
    import numpy as np

    from ironfn.data import eval_batches, rows_at
    from ironfn.data.dataset import place

    if split != "train":
        batch = next(eval_batches(data, rows))
        return batch, [f"row {number}" for number in batch["row"].tolist()]
    first = step * spec.train.batch
    numbers = np.arange(first, first + rows)
    sets, windows = place(data, numbers, spec.train.seed)
    titles = [
        f"row {number} (step {number // spec.train.batch}), window {window} of {data.windows[k]} of {data.names[k]}"
        for number, k, window in zip(numbers.tolist(), sets.tolist(), windows.tolist(), strict=True)
    ]
    return rows_at(data, numbers.tolist(), spec.train.seed), titles


def _summary(data: Dataset, split: str) -> list[str]:
    lines = [f"{split}: {data.tokens:,} tokens, {data.rows:,} rows of {data.length}, attending to the {data.attend}"]
    for name, store, share, windows in zip(data.names, data.stores, data.shares, data.windows, strict=True):
        drawn = f", {share:.1%} of the rows" if split == "train" else ""
        lines.append(f"  {name}: {store.documents:,} documents, {store.tokens:,} tokens, {windows:,} rows{drawn}")
    return lines


def _counts(batch: Batch, row: int) -> str:
    trained = int((batch["weight"][row] > 0).sum())
    padding = int((batch["segment"][row] == -1).sum()) if "segment" in batch else 0
    return f"{trained} tokens trained, {batch['weight'].shape[1] - trained - padding} masked, {padding} padding"


def _legend() -> Text:
    legend = Text("\n")
    for mark, kind, meaning in _LEGEND:
        legend.append(f"  {mark:14}", _STYLES[kind]).append(f" {meaning}\n")
    return legend


def _text(stretches: Iterable[Span]) -> Text:
    """Write a row as text with marks that say the same without colours."""
    text = Text()
    for span in stretches:
        shown = span.text.translate(_PICTURES)  # nothing that is in the data drives the terminal
        if span.kind == "document":
            fresh = not text or text.plain.endswith("\n")
            text.append(f"{'' if fresh else chr(10)}[{shown}]\n", _STYLES["document"])
        elif span.kind == "padding":
            text.append(f"\n[padding x {span.tokens}]", _STYLES["padding"])
        elif span.kind == "control":
            text.append(f"[{shown}]", _STYLES["control"])
        elif span.kind == "masked":
            text.append("{{" + shown + "}}", _STYLES["masked"])
        else:
            text.append(shown, _PARTS[span.part])
    return text


def _tokens(batch: Batch, row: int, vocabulary: Vocabulary) -> Text:
    """Write a row as a table: what goes in, what has to come out, and what is known of each place."""

    def name_of(token: int) -> str:
        decoded = repr(vocabulary.tokenizer.decode([token], skip_special_tokens=False))
        return vocabulary.controls.get(token, decoded)

    names = ("tokens", "targets", "weight", "position", "segment")
    columns = [batch[name][row].tolist() if name in batch else [0] * batch["tokens"].shape[1] for name in names]
    columns.append(batch["until"][row].tolist() if "until" in batch else columns[-1])
    text = Text(f"{'place':>6} {'input':>7} {'target':>7} {'weight':>7} {'position':>9} {'segment':>8}  text\n")
    for place, (given, target, weight, position, segment, until) in enumerate(zip(*columns, strict=True)):
        asked = name_of(target) if until == segment else f"reads {name_of(given)}"  # in a prompt that two share
        style = _STYLES["padding" if segment == -1 else "masked"] if not weight else ""
        style = _STYLES["control"] if weight and target in vocabulary.controls else style
        text.append(f"{place:6} {given:7} {target:7} {weight:7g} {position:9} {segment:8}  {asked}\n", style)
    return text
