"""Talk with a trained model in a terminal: ``ironfn chat``."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import model_options, sampling_of, sampling_options

if TYPE_CHECKING:
    from ironfn.data.chat import Chat
    from ironfn.generate.sampling import Sampling

    from .trained import Trained
    from .writer import Writer

HELP = """\
/reset          forget what was said
/system TEXT    begin anew with this system prompt; without a text, with none
/quit           leave (so does the end of the input, Ctrl-D)
Ctrl-C          end the answer that is being written"""


@click.command("chat")
@model_options
@sampling_options
@click.option("--system", help="The system prompt to begin with.")
@click.option("--template", metavar="NAME|FILE", help="Another chat template: chatml, llama3, … or a Jinja file.")
def command(
    model: Path,
    tokens: int,
    stops: tuple[str, ...],
    system: str | None,
    template: str | None,
    dtype: str | None,
    int8: bool,
    **options: Any,
) -> None:
    """Talk with MODEL: a run or a checkpoint, a Hugging Face directory, or a GGUF file that has a chat template.

    Commands begin with a slash: /reset, /system TEXT, /quit, /help.
    """
    sampling = sampling_of(options)
    from ironfn.generate.engine import Limits

    from .writer import Writer, engine_of, for_writing

    trained = for_writing(model, dtype, int8)
    chat = trained.chat(template)
    if chat is None:
        raise ValueError(f"{model} has no chat template; give one with --template, or use ironfn generate")
    talk = Talk(trained, chat, Writer(engine_of(trained, Limits(rows=1))), sampling, tokens, stops, system)
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):  # with it, the line that is typed can be edited
            importlib.import_module("readline")
        click.echo(HELP, err=True)
    for line in _said(terminal):
        if not talk.hear(line):
            return


def _said(terminal: bool) -> Iterator[str]:
    """Yield the lines that are said, to their end."""
    while True:
        try:
            line = input("> " if terminal else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            click.echo(err=True)
            return
        if line.strip():
            yield line


class Talk:
    """Hold a conversation and go on with it."""

    def __init__(
        self, trained: Trained, chat: Chat, writer: Writer, sampling: Sampling, tokens: int, stops: tuple[str, ...],
        system: str | None,
    ) -> None:  # fmt: skip
        self.trained, self.chat, self.writer, self.sampling = trained, chat, writer, sampling
        self.tokens, self.stops = tokens, stops
        self.begin(system)

    def begin(self, system: str | None) -> None:
        """Forget what was said."""
        self.system = system
        self.turns: list[dict[str, str]] = [] if not system else [{"role": "system", "content": system}]

    def hear(self, line: str) -> bool:
        """Do what a line asks, or answer it. Return whether the talk goes on."""
        name, _, rest = line.strip().partition(" ")
        if not name.startswith("/"):
            self.answer(line)
        elif name in ("/quit", "/exit"):
            return False
        elif name == "/reset":
            self.begin(self.system)
        elif name == "/system":
            self.begin(rest.strip() or None)
        else:
            click.echo(HELP if name == "/help" else f"{name} is no command\n{HELP}", err=True)
        return True

    def answer(self, line: str) -> None:
        """Write the answer to a message. What cannot be answered is told and forgotten."""
        self.turns.append({"role": "user", "content": line})
        parts: list[str] = []
        finish = None
        try:
            with contextlib.closing(self._pieces()) as pieces:
                for text, why in pieces:
                    finish = why
                    parts.append(text)
                    click.echo(text, nl=False)
                    sys.stdout.flush()
        except KeyboardInterrupt:
            finish = "interrupted"
        except ValueError as error:
            self.turns.pop()
            click.echo(f"{error}; /reset forgets what was said", err=True)
            return
        click.echo()
        if finish == "length":
            click.echo("(the answer was cut: no room for more tokens, or --tokens reached)", err=True)
        self.turns.append({"role": "assistant", "content": "".join(parts)})

    def _pieces(self) -> Generator[tuple[str, str | None]]:
        from ironfn.generate.engine import Request
        from ironfn.generate.text import Words

        prompt = tuple(self.chat.encode(self.turns))
        request = Request(
            key=len(self.turns), prompt=prompt, limit=self.tokens, sampling=self.sampling, stop=self.trained.stop,
            stream=(len(self.turns),),
        )  # fmt: skip
        for piece in self.writer.write([(request, Words(self.trained.tokenizer, self.stops))]):
            yield piece.text, piece.finish
