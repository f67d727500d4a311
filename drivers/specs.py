"""Give the commands their spec arguments, and list the specs that come with ironfn."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from ironfn.model.families import NAMED
from ironfn.spec.load import dump_spec, load_spec
from ironfn.spec.records import RunSpec

from .launch import Ranks


def shipped() -> dict[str, Path]:
    """Return the specs that come with ironfn, by name: ``pretrain/quickstart``."""
    here = Path(__file__).resolve().parent
    folder = here / "shipped"  # in a wheel; in a source tree they lie in specs/ beside drivers/
    if not folder.is_dir():
        folder = here.parent / "specs"
    return {str(path.relative_to(folder).with_suffix("")): path for path in sorted(folder.rglob("*.yaml"))}


def find_spec(name: str) -> Path:
    """Return the file that a word on the command line names: a path, or the name of a shipped spec.

    Raise ValueError, listing the shipped specs, for a word that is neither.
    """
    path = Path(name)
    if path.exists():
        return path
    known = shipped()
    bare = name.removesuffix(".yaml")
    if bare in known:
        return known[bare]
    if path.suffix in (".yaml", ".yml") or path.is_absolute():
        return path  # the loader says that it is missing, beside what is wrong with the other files
    near = difflib.get_close_matches(bare, known, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise click.UsageError(f"{name!r} is neither a file nor a shipped spec ({', '.join(known)}){hint}")


def takes_spec(command: Callable[..., Any], *, ranks: Callable[[], int | None] = lambda: None) -> Callable[..., Any]:
    """Give a command ``SPEC... -s KEY=VALUE --dry-run`` and call it with the loaded `RunSpec` first.

    ``--dry-run`` prints the resolved spec and does not call it. ranks: how many processes the spec's mesh has to fill,
    where the command is one that the ranks run together.
    """

    @click.argument("specs", nargs=-1, required=True, metavar="SPEC...")
    @click.option(
        "-s", "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a field: optim.lr=1e-4."
    )
    @click.option("--dry-run", is_flag=True, help="Print the resolved spec and stop.")
    @functools.wraps(command)
    def with_spec(specs: tuple[str, ...], overrides: tuple[str, ...], dry_run: bool, **rest: Any) -> Any:
        spec = resolve(specs, overrides, None if dry_run else ranks())
        if dry_run:
            if Ranks.here().speaks:
                click.echo(dump_spec(spec), nl=False)
            return None
        return command(spec, **rest)

    return with_spec


def resolve(specs: tuple[str, ...], overrides: tuple[str, ...], ranks: int | None = None) -> RunSpec:
    """Load the spec that these words and overrides describe, for so many ranks. `SpecError` where it is faulty."""
    return load_spec([find_spec(name) for name in specs], overrides, NAMED, ranks, _model_at)


def _model_at(source: str) -> Mapping[str, object]:
    """Return the fields of ``model`` of the model that a path leads to, for a spec that begins from it."""
    from .origin import model_fields  # brings torch in

    return model_fields(Path(source))


@click.group()
def command() -> None:
    """List and show the specs that come with ironfn."""


@command.command("ls")
def list_shipped() -> None:
    """List the shipped specs: each one's name and its first comment line."""
    for name, path in shipped().items():
        first = path.read_text(encoding="utf-8").split("\n", 1)[0]
        click.echo(f"{name:24} {first.removeprefix('#').strip()}")


@command.command("check")
@click.argument("specs", nargs=-1, required=True, metavar="SPEC...")
@click.option("-s", "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a field: optim.lr=1e-4.")
def check_spec(specs: tuple[str, ...], overrides: tuple[str, ...]) -> None:
    """Say everything that is wrong with a spec, or print it with every default written out."""
    click.echo(dump_spec(resolve(specs, overrides)), nl=False)


@command.command("show")
@click.argument("name")
def show_shipped(name: str) -> None:
    """Print a shipped spec as it stands, to copy and change."""
    click.echo(find_spec(name).read_text(encoding="utf-8"), nl=False)
