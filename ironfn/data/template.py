"""Render chat templates, which are programs of others, within limits of time, memory and length."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))  # Unicode keeps them for a program's own use; no text should hold one


@frozen
class Limits:
    """Say what a rendering may take: seconds of the processor, bytes of memory, characters of text."""

    seconds: float = 2.0
    memory: int = 1 << 29
    characters: int = 1 << 22


@frozen
class Rendered:
    """Hold what a template wrote, and which characters of it (from, to) its ``generation`` blocks did."""

    text: str
    generated: tuple[tuple[int, int], ...] = ()


class EndlessError(ValueError):
    """Tell of a rendering that overstepped a limit."""


class Renderer:
    """Render one template, in a process that starts with the first rendering and ends with this object.

    It may be called by several threads. A rendering that overstepped a limit takes the process with it; the next one
    starts another.
    """

    def __init__(self, template: str, limits: Limits | None = None) -> None:
        self.template = template
        self.limits = limits or Limits()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._end: weakref.finalize[Any, Any] | None = None

    def __call__(self, variables: Mapping[str, Any]) -> Rendered:
        """Return what the template makes of JSON values. ValueError with what is wrong: a fault, a refusal, a limit."""
        marks = unused(2, variables)
        line = json.dumps({"variables": dict(variables), "marks": marks}) + "\n"
        with self._lock:
            said = self._ask(line)
            if not said:
                self._close()
                raise EndlessError(
                    f"the chat template did not come to an end within {self.limits.seconds:g} s and "
                    f"{self.limits.memory >> 20} MiB; use another one"
                )
        answer = json.loads(said)
        if "error" in answer:
            raise ValueError(f"the chat template cannot write this conversation: {answer['error']}")
        return _without(answer["text"], marks)

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._close()

    def _ask(self, line: str) -> str:
        """Return the line that answers another, or none where the process died over it."""
        if self._process is None:
            self._process = _start(self.template, self.limits)
            self._end = weakref.finalize(self, _stop, self._process)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
            return self._process.stdout.readline()
        except BrokenPipeError:
            return ""

    def _close(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None


def _start(template: str, limits: Limits) -> subprocess.Popen[str]:
    worker = Path(__file__).with_name("template_worker.py")
    process = subprocess.Popen(  # -P: what lies beside the script is not for it to import
        [sys.executable, "-P", str(worker)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="ascii"
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps({"template": template, **asdict(limits)}) + "\n")
    return process


def _stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # what was still to be written has no reader any more
            pipe.close()
    process.wait()


def unused(count: int, value: object) -> tuple[str, ...]:
    """Return characters that stand nowhere in a value. ValueError where too few are left."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    free = [mark for mark in _MARKS if mark not in text][:count]
    if len(free) < count:
        raise ValueError("the text holds the characters U+FDD0 to U+FDEF, which are no text; remove them")
    return tuple(free)


def _without(text: str, marks: tuple[str, ...]) -> Rendered:
    """Take the marks out of a text and say where they were."""
    begin, end = marks
    parts: list[str] = []
    spans: list[tuple[int, int]] = []
    open_at: list[int] = []
    at = 0
    for part in _cut(text, begin, end):
        if part == begin:
            open_at.append(at)
        elif part == end:
            spans.append((open_at.pop(), at))
        else:
            parts.append(part)
            at += len(part)
    return Rendered("".join(parts), tuple(sorted(spans)))


def _cut(text: str, *marks: str) -> list[str]:
    if marks:
        first, *rest = marks
        pieces = [_cut(part, *rest) for part in text.split(first)]
        return pieces[0] + [each for piece in pieces[1:] for each in (first, *piece)]
    return [text]
