"""Turn SIGTERM, SIGINT and SIGUSR1 into a question that the loop asks at the edge of each step."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from types import FrameType

EXIT_STOPPED = 75
"""The exit code of a run that saved because it was told to stop: start it again (sysexits.h: EX_TEMPFAIL)."""
EXIT_INTERRUPTED = 130
"""The exit code of a run that was interrupted twice and left at once, as the shells have it: 128 + SIGINT."""
SAME_KEYSTROKE = 1.0
"""Seconds in which a second SIGINT counts as the first again: wrappers such as `make` pass on what the terminal has
sent to the whole process group already."""

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@contextmanager
def stop_requested(resume: str = "", *, speak: bool = True) -> Generator[Callable[[], str | None]]:
    """Catch the signals that stop a run; the function yielded returns the name of the first one received, or None.

    resume: the command that resumes the run, shown on standard error when the first signal comes. speak: of several
    ranks, one says so. Signals after the first change nothing, so that nothing disturbs the save; only a SIGINT that
    comes more than `SAME_KEYSTROKE` after another leaves at once with code 130, without a save. That is safe: a
    checkpoint is whole or not there at all.

    The handlers of before are back when the block ends. Outside the main thread, where Python allows no handlers, no
    signal is caught.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    say = _say if speak else _say_nothing
    received: list[str] = []
    interrupted: list[float] = []

    def handle(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGINT:
            interrupted.append(time.monotonic())
            if interrupted[-1] - interrupted[0] > SAME_KEYSTROKE:
                say("\nleaving at once, without a save" + (f"; to go on: {resume}" if resume else ""))
                os._exit(EXIT_INTERRUPTED)
        if not received:
            received.append(name)
            again = "; Ctrl-C again leaves at once" if number == signal.SIGINT else ""
            say(f"\n{name}: saving at the end of this step{again}" + (f"\nto go on: {resume}" if resume else ""))

    before = {number: signal.signal(number, handle) for number in STOPPING}
    try:
        yield lambda: received[0] if received else None
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def ignore_signals() -> None:
    """Let the process end with its own code, whatever it is sent from now on."""
    if threading.current_thread() is threading.main_thread():
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN)


def _say(text: str) -> None:
    """Write to standard error past Python's buffers, which a handler may have interrupted in the middle of a write."""
    with suppress(OSError):  # the terminal may be gone, which is what a signal often means
        os.write(2, (text + "\n").encode())


def _say_nothing(text: str) -> None:
    pass
