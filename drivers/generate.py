"""Continue prompts with a trained model: ``ironfn generate``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import model_options, sampling_of, sampling_options

if TYPE_CHECKING:
    from ironfn.generate.engine import Token

    from .telling import Piece
    from .trained import Trained


@click.command("generate")
@model_options
@click.option("-p", "--prompt", "prompts", multiple=True, help="Text to continue, - for standard input; repeatable.")
@click.option(
    "-f",
    "--file",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    help="A prompt a line, or .jsonl with the field prompt; - for standard input.",
)
@click.option("-n", "completions", default=1, show_default=True, type=click.IntRange(1), help="Completions a prompt.")
@sampling_options
@click.option("--chat", "asked", is_flag=True, help="Each prompt is a message, as the chat template has it.")
@click.option("--jsonl", is_flag=True, help="Write a line of JSON for each completion.")
@click.option("--log-probs", is_flag=True, help="With --jsonl: each token's log-probability.")
def command(
    model: Path,
    prompts: tuple[str, ...],
    file: Path | None,
    completions: int,
    tokens: int,
    stops: tuple[str, ...],
    asked: bool,
    jsonl: bool,
    log_probs: bool,
    dtype: str | None,
    int8: bool,
    **options: Any,
) -> None:
    """Continue prompts with MODEL: a run or a checkpoint, a Hugging Face directory, or a GGUF file.

    Without -p and --file it continues the prompts that the run's spec names, or begins a text of its own.
    """
    sampling = sampling_of(options)
    texts = [sys.stdin.read() if text == "-" else text for text in prompts] + ([] if file is None else _lines(file))
    from ironfn.generate.engine import Limits, Request
    from ironfn.generate.text import Words

    from .trained import require_text
    from .writer import Writer, engine_of, for_writing

    for text in (*texts, *stops):
        require_text(text, "the prompt")
    trained = for_writing(model, dtype, int8)
    texts = texts or list(trained.prompts) or [""]
    words = Words(trained.tokenizer, stops)
    encode = _as_message(trained, model) if asked else trained.encode
    requests = [
        Request(
            key=key, prompt=tuple(encode(text)), limit=tokens, n=completions, stop=trained.stop, sampling=sampling,
            stream=(key,),
        )
        for key, text in enumerate(texts)
    ]  # fmt: skip
    limits = Limits(rows=min(32, len(texts) * completions))
    engine = engine_of(trained, limits, longest=tokens + max(len(request.prompt) for request in requests))
    pieces = Writer(engine).write((request, words) for request in requests)
    if len(texts) == completions == 1 and not jsonl:
        _stream(texts[0], pieces)
        return
    for key, number, found in _in_order(pieces, len(texts), completions):
        if jsonl:
            more = {"index": number} if completions > 1 else {}
            click.echo(json.dumps(_row(texts[key], found, log_probs) | more, ensure_ascii=False))
        else:
            click.secho(texts[key], bold=True, nl=False)
            click.echo("".join(piece.text for piece in found) + "\n")


def _lines(file: Path) -> list[str]:
    """Return the prompts of a file. ValueError with the place of a row that has none."""
    from ironfn.data.readers import rows
    from ironfn.evals.items import good

    if str(file) == "-":
        return sys.stdin.read().splitlines()
    if not file.name.lower().removesuffix(".gz").endswith((".jsonl", ".ndjson")):
        return file.read_text(encoding="utf-8").splitlines()
    found = good(rows(file))
    for row in found:
        if not isinstance(row.value, dict) or not isinstance(row.value.get("prompt"), str):
            raise ValueError(f"{row.place}: has no text in the field prompt")
    return [row.value["prompt"] for row in found]


def _as_message(trained: Trained, model: Path) -> Callable[[str], list[int]]:
    chat = trained.chat()
    if chat is None:
        raise ValueError(f"{model} has no chat template; leave --chat out, and it continues the prompts as they are")
    return lambda text: chat.encode([{"role": "user", "content": text}])


def _stream(prompt: str, pieces: Iterator[Piece]) -> None:
    """Write a single continuation as it comes."""
    click.secho(prompt, bold=True, nl=False)
    for piece in pieces:
        click.echo(piece.text, nl=False)
        sys.stdout.flush()
    click.echo("\n")


def _in_order(pieces: Iterator[Piece], prompts: int, completions: int) -> Iterator[tuple[int, int, list[Piece]]]:
    """Yield (prompt, number, its pieces) of each completion that is done, in the order in which they were asked."""
    told: dict[tuple[int, int], list[Piece]] = {}
    done: set[tuple[int, int]] = set()
    order = ((key, number) for key in range(prompts) for number in range(completions))
    awaited = next(order)
    for piece in pieces:
        name = (int(str(piece.key)), piece.number)
        told.setdefault(name, []).append(piece)
        if piece.finish is not None:
            done.add(name)
        while awaited in done:
            yield awaited[0], awaited[1], told.pop(awaited)
            awaited = next(order, (-1, -1))


def _row(prompt: str, pieces: Sequence[Piece], log_probs: bool) -> dict[str, Any]:
    tokens: list[Token] = [token for piece in pieces for token in piece.tokens]
    row: dict[str, Any] = {
        "prompt": prompt,
        "completion": "".join(piece.text for piece in pieces),
        "finish_reason": pieces[-1].finish,
        "tokens": [token.id for token in tokens],
    }
    return row | ({"log_probs": [token.log_prob for token in tokens]} if log_probs else {})
