"""What is made is there whole or not at all: whoever dies, whoever else makes it, however full the disk."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from ironfn.hf.whole import whole_directory, whole_file

from .test_convert import done, ironfn, source

__all__ = ["source"]
ROOT = Path(__file__).parents[1]
CHILD = """
import signal, sys, time
from pathlib import Path
from ironfn.hf import whole
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started this may ignore it
with getattr(whole, sys.argv[1])(Path(sys.argv[2])) as aside:
    (aside / "half" if aside.is_dir() else aside).write_bytes(b"half")
    print("writing", flush=True)
    time.sleep(60)
"""
KINDS: dict[str, Callable[[Path], AbstractContextManager[Path]]] = {
    "whole_directory": whole_directory, "whole_file": whole_file,
}  # fmt: skip


@contextmanager
def writing(kind: str, path: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a process that is in the middle of making ``path``."""
    command = [sys.executable, "-c", CHILD, kind, str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "writing\n"
        try:
            yield child
        finally:
            child.kill()


def make(kind: str, path: Path) -> bytes:
    """Make it, and return what is there."""
    with KINDS[kind](path) as aside:
        file = aside / "file" if kind == "whole_directory" else aside
        file.write_bytes(b"whole")
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    if kind == "whole_file":
        return path.read_bytes()
    assert [entry.name for entry in path.iterdir()] == ["file"]
    return (path / "file").read_bytes()


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_a_death_in_the_middle_leaves_nothing_that_looks_whole(kind: str, death: int, tmp_path: Path) -> None:
    path = tmp_path / "to" / "there"
    with writing(kind, path) as child:
        child.send_signal(death)
        child.wait()
        assert not path.exists()
        assert [entry.name for entry in path.parent.iterdir()] == ([".tmp-there"] if death == signal.SIGKILL else [])
        assert make(kind, path) == b"whole"


@pytest.mark.parametrize("kind", list(KINDS))
def test_two_do_not_make_the_same_at_once(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "to" / "there"
    with writing(kind, path) as child:
        with pytest.raises(ValueError, match=f"another process is making {path}"), KINDS[kind](path):
            pass
        child.kill()
        child.wait()
        assert make(kind, path) == b"whole"
    with pytest.raises(ValueError, match="is there already"), KINDS[kind](path):
        pass


@pytest.fixture
def full() -> Iterator[Callable[[int], None]]:
    """Let no file grow beyond some bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("what", ["a run", "a directory", "a GGUF file"])
def test_a_full_disk_leaves_nothing(what: str, source: Path, full: Callable[[int], None]) -> None:
    done("convert", source, "run")
    words = {"a run": (source, "new"), "a directory": ("run", "new"), "a GGUF file": ("run", "new.gguf")}[what]
    before = set(os.listdir())
    full(20_000)
    result = ironfn("convert", *words)
    why = "safetensors: File too large" if what == "a run" else f"{words[1]} could not be made, and nothing is left"
    assert (result.exit_code, why in result.output) == (1, True), result.output
    assert set(os.listdir()) == before
    full(resource.RLIM_INFINITY)
    done("convert", *words)
