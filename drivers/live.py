"""Draw a run on a terminal: a bar with the numbers of the last step below what has been said so far."""

from __future__ import annotations

from typing import TextIO

import rich.live
from rich.columns import Columns
from rich.console import Console as Terminal
from rich.console import Group, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from ironfn.report.rows import TrainRow
from ironfn.report.words import bytes_in_words, seconds_in_words

from .console import encodable


class Live:
    """Keep the display. Its methods raise OSError when the terminal has gone; texts are never read as markup."""

    def __init__(self, stream: TextIO, steps: int, title: str) -> None:
        self._stream = stream
        self._terminal = Terminal(file=stream, highlight=False, markup=False, emoji=False, force_terminal=True)
        self._bar = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}", style="default"),
            TextColumn("{task.fields[left]}", style="cyan"),
            expand=True,
        )
        self._task = self._bar.add_task(title or "training", total=steps, left="")
        self._live = rich.live.Live(
            self._bar, console=self._terminal, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )

    def start(self) -> None:
        """Take the last lines of the terminal."""
        self._live.start(refresh=True)

    def stop(self) -> None:
        """Leave the display as it stands and give the cursor back."""
        self._live.stop()

    def show(self, row: TrainRow) -> None:
        """Draw the row in place of the last one."""
        left = f"{seconds_in_words(row.left)} left" if row.left >= 1.0 else ""
        self._bar.update(self._task, completed=row.step, left=left)
        self._live.update(Group(self._bar, _numbers(row)), refresh=True)

    def print(self, text: str) -> None:
        """Say a line above the display."""
        head, blank, rest = text.partition(" ")
        style = {"warning:": "bold yellow", "validation": "bold green", "test": "bold green"}.get(head, "")
        self._terminal.print(Text.assemble((head, style), blank, rest), soft_wrap=True)

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Show a continuation as prose, the prompt dimmed."""
        prompt, text = (encodable(each, self._stream) for each in (prompt, text))
        self._terminal.print(Text.assemble((f"step {step}", "bold magenta"), "  ", (prompt, "dim"), text))


def _numbers(row: TrainRow) -> RenderableType:
    """Return the numbers of a step below their names, in as many lines as the terminal's width asks for."""
    cells = {
        "loss": f"{row.loss:.4f}",
        "bits/byte": f"{row.bits_per_byte:.3f}",
        "lr": f"{row.lr:.2e}",
        "grad norm": f"{row.grad_norm:.2f}",
        "tokens/s": f"{row.tokens_per_s:,.0f}",
        "MFU": "-" if row.mfu is None else f"{row.mfu:.1%}",
        "memory": bytes_in_words(row.memory),
    }
    if row.skipped:
        cells["skipped"] = str(row.skipped)
    texts = [Text.assemble((name, "dim"), "\n", (value, "bold")) for name, value in cells.items()]
    return Columns(texts, padding=(0, 3))
