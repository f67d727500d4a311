"""Gather the commands under ``ironfn`` and turn their errors into exit codes.

A command is a row of `COMMANDS`; its module is imported when it is called, so that ``ironfn --help`` stays quick.
"""

from __future__ import annotations

import difflib
import importlib
import select
from types import MappingProxyType
from typing import NamedTuple

import click

from ironfn import __version__

from .failures import in_a_line
from .launch import Ranks, bound_kernels

EX_CONFIG = 78
"""The exit code of a faulty spec (sysexits.h)."""


class Entry(NamedTuple):
    """Say where a command lives (``module:attribute``, inside this package) and what it does, in a line."""

    target: str
    help: str


COMMANDS = MappingProxyType(
    {
        "prepare": Entry("prepare:command", "Train or take the tokenizer and write the token stores of a spec."),
        "pretrain": Entry("pretrain:command", "Train a language model from random weights, or resume one."),
        "sft": Entry("sft:command", "Teach a model by examples, whole or through an adapter, or resume that."),
        "dpo": Entry("dpo:command", "Teach a model what is preferred, by pairs or judged completions, or resume that."),
        "reward-model": Entry("reward_model:command", "Train a model to give what is preferred a higher reward."),
        "grpo": Entry("grpo:command", "Teach a model by rewards for what it writes itself, or resume that."),
        "generate": Entry("generate:command", "Continue prompts with a trained model."),
        "chat": Entry("chat:command", "Talk with a trained model."),
        "serve": Entry("serve:command", "Serve a trained model over HTTP, as OpenAI's API does, with a page to chat."),
        "convert": Entry("convert:command", "Take a model from a Hugging Face directory or a GGUF, or write one."),
        "merge": Entry("merge:command", "Make one model of an adapter and the model that it was trained beside."),
        "export": Entry("export:command", "Write a run as others load it: a model, or an adapter for peft."),
        "fetch": Entry("fetch:command", "Download a small model and make it ready to use and to train on."),
        "eval": Entry("eval:command", "Measure a trained model on questions and on texts."),
        "report": Entry("report:command", "Write a run's report.html and loss.png again from its metrics."),
        "data": Entry("data:command", "Look into data: inspect, check; write some: gym, programs, sums."),
        "optim": Entry("optim:command", "Show which optimizer gets which parameter."),
        "ckpt": Entry("ckpt:command", "List, verify and show checkpoints."),
        "specs": Entry("specs:command", "List and show the specs that come with ironfn."),
    }
)


class Modes(click.Group):
    """Be a click group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            near = difflib.get_close_matches(cmd_name, COMMANDS, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise click.UsageError(f"no command {cmd_name!r}{hint}", ctx)
        module, _, attribute = COMMANDS[cmd_name].target.partition(":")
        name = f"{__package__}.{module}"
        try:
            return getattr(importlib.import_module(name), attribute)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            raise click.UsageError(f"the command {cmd_name!r} is not part of this version", ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> object:
        bound_kernels()  # before the command's module is imported
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if isinstance(error, BrokenPipeError) and _unread():
                raise  # click ends without a word: who reads, such as `head`, has seen enough
            line = None if ctx.params["traceback"] else in_a_line(error)
            if line is None:
                if (ranks := Ranks.here()).size > 1:
                    click.echo(f"rank {ranks.rank}:", err=True)
                raise
            from ironfn.spec.errors import SpecError

            if isinstance(error, SpecError):
                _say_on_this_machine(line)
                ctx.exit(EX_CONFIG)
            raise click.ClickException(_signed(line)) from error


def _unread() -> bool:
    """Tell whether standard output is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _signed(line: str) -> str:
    """Put the rank before what is wrong with it alone."""
    name = f"rank {(ranks := Ranks.here()).rank}"
    return line if ranks.size == 1 or line.startswith(f"{name} ") else f"{name}: {line}"


def _say_on_this_machine(text: str) -> None:
    """Say what all the ranks of a machine find alike, each on its own, before they know of each other."""
    if Ranks.here().speaks:
        click.echo(text, err=True)


@click.group(cls=Modes, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--traceback", is_flag=True, help="Show where in the code an error was raised.")
@click.version_option(__version__, prog_name="ironfn")
def main(traceback: bool) -> None:
    """Train language models with pure functions that give the same result on every mesh.

    A run is described by one YAML file; `ironfn specs ls` lists those that come with ironfn.
    """
