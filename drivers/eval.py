"""Measure a trained model on files: ``ironfn eval``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ironfn.data.readers import Row
    from ironfn.evals.items import Question
    from ironfn.evals.texts import Subject, Text

    from .trained import Trained

_OUT = click.Path(dir_okay=False, path_type=Path)


@click.command("eval")
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option(
    "-t",
    "--tasks",
    "files",
    multiple=True,
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Questions or texts as .jsonl, or any text file; give it again for more.",
)
@click.option("--limit", type=click.IntRange(1), help="Take only so many items of each file.")
@click.option("--seed", type=int, help="Take them at random; without it, the first ones.")
@click.option("--delimiter", default=" ", show_default="a space", help="What stands between a context and a choice.")
@click.option("--window", type=click.IntRange(2), help="Tokens read at once for perplexity; else the model's context.")
@click.option(
    "--context", default=1, show_default=True, type=click.IntRange(1), help="Tokens before each token, at the least."
)
@click.option("--begin", metavar="TOKEN", help="What stands before a text; else the model's own token.")
@click.option("--out", type=_OUT, help="Write the results here, as jsonl.")
@click.option("--items", type=_OUT, help="Write the scores of every item here, as jsonl.")
def command(
    model: Path,
    files: tuple[Path, ...],
    limit: int | None,
    seed: int | None,
    delimiter: str,
    window: int | None,
    context: int,
    begin: str | None,
    out: Path | None,
    items: Path | None,
) -> None:
    """Measure MODEL, a run, a checkpoint, a Hugging Face directory or a GGUF file, on questions and on texts.

    The fields of a file's first row say what it holds: query, choices, gold (the likeliest choice is the answer);
    context_options, continuation, gold (the context that makes the continuation likeliest); text (perplexity).
    Tokens and scores are those of `lm-eval`.
    """
    from .trained import open_model, require_text

    require_text(delimiter, "--delimiter")
    _check_outputs(files, [path for path in (out, items) if path is not None])
    tasks = [(file, *_read(file, limit, seed, delimiter)) for file in files]  # a fault is told before a model is read
    trained = open_model(model, lambda line: click.echo(line, err=True))
    if trained.vectors:
        raise ValueError(f"{model} has trained vectors before its texts, which are not measured; use `ironfn export`")
    subject = _subject(trained, _begin(trained, begin))
    results: list[dict[str, Any]] = []
    details: list[dict[str, Any]] = []
    for file, schema, asked in tasks:
        if schema == "perplexity":
            result, each = _texts(subject, asked, window or subject.context, context)
        else:
            result, each = _questions(subject, asked)
        results.append({"task": file.name.split(".")[0], "file": str(file), "schema": schema, **result})
        details += each
    _show(results)
    for path, written in ((out, results), (items, details)):
        if path is not None:
            path.write_text("".join(json.dumps(_finite(row)) + "\n" for row in written), encoding="utf-8")


def _check_outputs(files: Sequence[Path], outputs: Sequence[Path]) -> None:
    """Refuse, before the work, a place that nothing can be written to, or where something else would be lost."""
    taken = [file.resolve() for file in files]
    for path in outputs:
        if path.resolve() in taken:
            raise ValueError(f"{path} is read, or written already, by this very command; give another name")
        if not path.parent.is_dir():
            raise ValueError(f"{path}: there is no directory {path.parent}; make it first")
        taken.append(path.resolve())


def _read(file: Path, limit: int | None, seed: int | None, delimiter: str) -> tuple[str, list[Any]]:
    """Return the schema of a file and what it asks, or as much as was asked for: questions, or (text, place)."""
    from ironfn.evals.items import document, question

    schema, rows = _rows(file, limit, seed)
    if schema == "perplexity":
        return schema, [(document(row), row.place) for row in rows]
    return schema, [question(row, delimiter) for row in rows]


def _rows(file: Path, limit: int | None, seed: int | None) -> tuple[str, list[Row]]:
    from ironfn.data.readers import Document, Row, read, rows
    from ironfn.data.sources import Source
    from ironfn.evals.items import good, schema_of

    if file.name.lower().removesuffix(".gz").endswith((".jsonl", ".ndjson")):
        found = good(rows(file))
        schema = schema_of(found[0]) if found else ""
    else:
        parts = read(Source(file, "text", code=False), "text", None)
        found = good(Row({"text": part.text}, part.place) if isinstance(part, Document) else part for part in parts)
        found, schema = [row for row in found if row.value["text"]], "perplexity"
    if not found:
        raise ValueError(f"{file} is empty: there is nothing to measure on")
    if limit is None or limit >= len(found):
        return schema, found
    if seed is None:
        return schema, found[:limit]
    import torch

    from ironfn import rng

    order = torch.randperm(len(found), generator=rng.generator(seed, "eval")).tolist()
    return schema, [found[i] for i in sorted(order[:limit])]


def _begin(trained: Trained, token: str | None) -> int:
    """Return the id that stands before a text: as asked, else the model's own."""
    found = trained.bos if token is None else trained.tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"--begin {token!r} is no token of this model; leave it out to take the model's own")
    return found


def _subject(trained: Trained, first: int) -> Subject:
    """Return how the model encodes and scores, with a bar on a terminal."""
    from rich.console import Console
    from rich.progress import track

    from ironfn.evals.likelihood import log_likelihoods
    from ironfn.evals.texts import Subject

    tokenizer = trained.tokenizer
    name = tokenizer.id_to_token(first) or ""

    def encode(text: str, around: bool) -> list[int]:
        # What the tokenizer puts before a text is not put before one that brings it along.
        return tokenizer.encode(text, add_special_tokens=around and not (name and text.startswith(name))).ids

    def score(groups: Sequence[Sequence[Text]]) -> Iterator[list[float]]:
        scores = log_likelihoods(trained.params, trained.arch, groups, how=trained.how)
        terminal = Console(stderr=True)
        hidden = not terminal.is_terminal
        yield from track(scores, "scoring", len(groups), console=terminal, disable=hidden, transient=True)

    return Subject(score, encode, first, trained.arch.context)


def _questions(subject: Subject, asked: list[Question]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    from ironfn.evals.accuracy import answer

    whole, answers = answer(asked, subject)
    result: dict[str, Any] = {"items": whole.items, "acc": whole.acc.value, "acc_stderr": whole.acc.stderr}
    if whole.acc_norm is not None:
        result |= {"acc_norm": whole.acc_norm.value, "acc_norm_stderr": whole.acc_norm.stderr}
    details = [
        {
            "place": each.question.place,
            "gold": each.question.gold,
            "by_sum": each.by_sum,
            "by_character": each.by_character,
            "tokens": each.tokens,
            "log_likelihoods": each.log_likelihoods,
        }
        for each in answers
    ]
    return result | {"cut": whole.cut}, details


def _texts(
    subject: Subject, asked: list[tuple[str, str]], window: int, context: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    from ironfn.evals.rolling import predict

    whole, texts = predict([text for text, _ in asked], subject, window, context)
    result = {
        "items": whole.documents,
        "token_perplexity": whole.token_perplexity,
        "byte_perplexity": whole.byte_perplexity,
        "bits_per_byte": whole.bits_per_byte,
        "tokens": whole.tokens,
        "bytes": whole.bytes,
        "nats": whole.nats,
        "window": whole.window,
        "context": whole.context,
    }
    details = [
        {"place": place, "tokens": text.tokens, "bytes": text.bytes, "nats": text.nats}
        for (_, place), text in zip(asked, texts, strict=True)
    ]
    return result, details


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """Write null for what JSON has no number for: the error of a single item, a perplexity beyond any float."""
    return {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in row.items()}


def _show(results: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("task", "items", "metric", "value", "±"):
        table.add_column(name, justify="left" if name in ("task", "metric") else "right")
    metrics = ("acc", "acc_norm", "token_perplexity", "byte_perplexity", "bits_per_byte")
    for result in results:
        for metric in metrics:
            if metric in result:
                error = f"{result[f'{metric}_stderr']:.4f}" if f"{metric}_stderr" in result else ""
                table.add_row(result["task"], str(result["items"]), metric, f"{result[metric]:.4f}", error)
    Console(soft_wrap=True).print(table)
    for result in results:
        if result.get("cut"):
            click.echo(
                f"{result['task']}: {result['cut']} texts lost their beginning: longer than the context", err=True
            )
