"""Make a directory that is there whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_directory(path: Path) -> Generator[Path]:
    """Yield a new directory beside ``path`` to fill, which becomes ``path`` when the block ends without an error.

    ValueError where ``path`` is there already. What an earlier death left of the one beside it is removed.
    """
    if path.exists() or path.is_symlink():
        raise ValueError(f"{path} is there already; give a new name, or remove it")
    aside = path.with_name(f".tmp-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        os.rename(aside, path)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
