"""Write rows to try things with to a new file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def write_new(file: Path, make: Callable[[], Sequence[Mapping[str, Any]]]) -> int:
    """Make rows and write them, a line of JSON each; return how many. ValueError, before, where the file is there."""
    if file.exists():
        raise ValueError(f"{file} is there already; give a new name, or remove it")
    rows = make()
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return len(rows)
