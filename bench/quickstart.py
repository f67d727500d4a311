"""Measure what a newcomer meets: the commands of ``make quickstart``, once the packages are installed."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.figure import Figure
from ironfn.report.rows import read_rows

SPEC = "pretrain/quickstart"


def figures() -> Iterator[Figure]:
    """Yield the seconds to the first loss line and to the end, and the validation bits a byte along the way."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start, first = time.monotonic(), 0.0
        _ironfn(folder, "prepare", SPEC)
        command = [sys.executable, "-m", "ironfn", "pretrain", SPEC]
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as training:
            assert training.stdout is not None
            for line in training.stdout:
                if not first and "step=1/" in line:
                    first = time.monotonic() - start
        if training.returncode:
            raise RuntimeError(f"the quickstart ended with code {training.returncode}")
        _ironfn(folder, "generate", "runs/quickstart")
        seconds = time.monotonic() - start
        rows = read_rows(folder / "runs" / "quickstart" / "metrics.jsonl")
    bits = [float(row["bits_per_byte"]) for row in rows if row["kind"] == "validation"]  # pyright: ignore[reportArgumentType]
    falls = sum(later < earlier for earlier, later in itertools.pairwise(bits)) / (len(bits) - 1)
    yield Figure("quickstart_first_loss_seconds", first, "<= 60")
    yield Figure("quickstart_seconds", seconds, "<= 360")
    yield Figure("quickstart_bits_per_byte", bits[-1], "< 2.6", " -> ".join(f"{value:.3f}" for value in bits))
    yield Figure("quickstart_share_of_falling_evaluations", falls, "== 1.0")


def _ironfn(folder: Path, *words: str) -> None:
    subprocess.run([sys.executable, "-m", "ironfn", *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)
