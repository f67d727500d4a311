"""Show a run to the person at the terminal, or as one line of text a row where there is no such person."""

from __future__ import annotations

import io
import json
import math
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from ironfn.report.rows import EvaluationRow, TrainRow, Value
from ironfn.report.words import bytes_in_words, seconds_in_words, visible

if TYPE_CHECKING:
    from .live import Live


class Console:
    """Tell how a run goes: a live display on a terminal, one parseable line a row elsewhere or where TERM is dumb.

    Use it in a ``with``. speak: rank 0 speaks, the others are silent. A terminal or pipe that goes away silences the
    console; it never stops the run. NO_COLOR is respected.
    """

    def __init__(self, steps: int, *, speak: bool = True, stream: TextIO | None = None, title: str = "") -> None:
        self._stream = stream or sys.stdout or io.StringIO()  # a process without a terminal may have no stdout
        self._steps = steps
        self._speak = speak and not self._stream.closed
        self._live: Live | None = None
        if self._speak and is_interactive(self._stream):
            from .live import Live

            self._live = Live(self._stream, steps, title)

    def __enter__(self) -> Console:
        if self._live is not None:
            self._guard(self._live.start)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._guard(self._live.stop)

    def train(self, row: TrainRow) -> None:
        """Show how a step went."""
        if self._live is not None:
            live = self._live
            self._guard(lambda: live.show(row))
        else:
            self._print(train_line(row, self._steps))

    def evaluation(self, row: EvaluationRow) -> None:
        """Show what an evaluation gave."""
        self._print(evaluation_line(row, self._steps))

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Show a continuation of a prompt."""
        if self._live is not None:
            live = self._live
            self._guard(lambda: live.sample(step, visible(prompt), visible(text)))
        else:
            ascii_only = "utf" not in (self._stream.encoding or "").lower()
            self._print(sample_line(step, prompt, text, ascii_only))

    def note(self, text: str) -> None:
        """Say something else, such as where a checkpoint was saved."""
        self._print(visible(text))

    def warn(self, text: str) -> None:
        """Say something that the person should see to."""
        self._print(f"warning: {visible(text)}")

    def _print(self, line: str) -> None:
        line = encodable(line, self._stream)
        if self._live is not None:
            live = self._live
            self._guard(lambda: live.print(line))
        else:
            self._guard(lambda: print(line, file=self._stream, flush=True))

    def _guard(self, write: Callable[[], object]) -> None:
        if not self._speak:
            return
        try:
            write()
        except OSError:  # the terminal or the pipe's reader has gone
            self._speak = False
        except ValueError:
            if not self._stream.closed:
                raise
            self._speak = False


def is_interactive(stream: TextIO) -> bool:
    """Tell whether a person sees this stream on a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM", "dumb" if os.name == "posix" else "") not in ("dumb", "unknown")


def train_line(row: TrainRow, steps: int) -> str:
    """Return a training row as ``key=value`` words: a value holds no space. Bits a byte are left out where none are.

    >>> train_line(TrainRow(step=100, loss=3.21012, bits_per_byte=1.9312, lr=3e-4, grad_norm=0.912, tokens_per_s=2134.2,
    ...     mfu=0.712, memory=1288490189, seconds=141.0, left=192.4), 300)
    'step=100/300 loss=3.2101 bpb=1.9312 lr=3.0e-04 gnorm=0.91 tok/s=2134 mfu=0.712 mem=1.2GiB eta=3m12s'
    """
    words = {
        "step": f"{row.step}/{steps}",
        "loss": f"{row.loss:.4f}",
        **({} if math.isnan(row.bits_per_byte) else {"bpb": f"{row.bits_per_byte:.4f}"}),
        "lr": f"{row.lr:.1e}",
        "gnorm": f"{row.grad_norm:.2f}" if row.grad_norm < 1e6 else f"{row.grad_norm:.1e}",
        "tok/s": f"{row.tokens_per_s:.0f}",
        "mfu": "-" if row.mfu is None else f"{row.mfu:.3f}",
        "mem": bytes_in_words(row.memory),
        "eta": seconds_in_words(row.left),
    }
    if row.skipped:
        words["skipped"] = str(row.skipped)
    return _line(words | _extras(row.extra))


def evaluation_line(row: EvaluationRow, steps: int) -> str:
    """Return an evaluation as ``key=value`` words after the split's name."""
    words = {"step": f"{row.step}/{steps}"}
    if row.tokens:
        words |= {"loss": f"{row.loss:.4f}", "ppl": f"{row.perplexity:.4g}", "bpb": f"{row.bits_per_byte:.4f}"}
        words["tokens"] = str(row.tokens)
    return f"{row.kind} {_line(words | _extras(row.extra))}"


def sample_line(step: int, prompt: str, text: str, ascii_only: bool = False) -> str:
    """Return a sample in one line, its texts as JSON strings.

    >>> print(sample_line(5, "Once", " upon\\na time"))
    sample step=5 prompt="Once" text=" upon\\na time"
    """
    prompt, text = (visible(json.dumps(each, ensure_ascii=ascii_only)) for each in (prompt, text))
    return f"sample step={step} prompt={prompt} text={text}"


def encodable(text: str, stream: TextIO) -> str:
    """Return the text with what the stream's encoding lacks written out: a sample must not stop the run."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _extras(extra: dict[str, Value]) -> dict[str, str]:
    return {
        name: f"{value:.4g}" if isinstance(value, float) else "_".join(visible(str(value)).split())
        for name, value in extra.items()
    }


def _line(words: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in words.items())
