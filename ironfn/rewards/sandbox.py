"""Run somebody's Python programs where they can do no harm: bubblewrap's namespaces, limits, a filter of calls.

A program sees an empty directory of its own, Python, and nothing else: no network, no environment, no other process,
no file of this machine that is not Python's. When a run is over, everything that it started is dead.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from ironfn.rewards import seccomp
from ironfn.rewards.values import Failure
from ironfn.rewards.waiting import readable

NOBODY = 65534
START = 60.0
"""Seconds that a place may take to come to be."""
LOOK = 0.05
"""Seconds between two looks at how many files there are."""
REMEDY = (
    "install bubblewrap (Debian, Ubuntu: apt-get install -y bubblewrap; Fedora: dnf install bubblewrap) on a Linux "
    "that lets users make namespaces (sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces > 0; in a "
    "container: --security-opt seccomp=unconfined), with a Python that everybody may read (/usr/bin/python3), or leave "
    "out the code reward"
)


@frozen
class Bounds:
    """Say what one run may take. seconds: of the processor, each process; wall: of the clock, all together.

    memory: bytes of each process; processes: also threads, so that 1 lets a program start none; files: bytes that may
    be written, in all; names: how many files there may be; output: bytes.
    """

    seconds: float = 5.0
    wall: float = 10.0
    memory: int = 256 << 20
    processes: int = 1
    files: int = 16 << 20
    names: int = 4096
    output: int = 1 << 20

    def __attrs_post_init__(self) -> None:
        if min(self.seconds, self.wall, self.memory, self.processes, self.files, self.names, self.output) <= 0:
            raise ValueError(f"a sandbox needs limits above 0; they are {self}")

    def limits(self) -> dict[str, int]:
        """Return the resource limits that the guard sets, by their names."""
        return {
            "CPU": math.ceil(self.seconds),
            "AS": self.memory,
            "NPROC": self.processes,
            "FSIZE": self.files,
            "NOFILE": 64,
            "CORE": 0,
            "MEMLOCK": 0,
            "MSGQUEUE": 0,
            "SIGPENDING": 64,
        }


@frozen
class Ran:
    """Hold what a program wrote. why: it has ended (``done``), or used up its ``time``, ``output`` or ``files``."""

    output: bytes
    code: int | None
    why: str


@frozen
class _First:
    """Hold the first process of a place, with which all others in it die: its number and a handle of it."""

    pid: int
    handle: int

    def files(self) -> int:
        """Return how many files are in its /tmp: each takes memory that is nobody's, and no option bounds them."""
        try:
            seen = os.statvfs(f"/proc/{self.pid}/root/tmp")
        except OSError:  # it has just ended
            return 0
        return seen.f_files - seen.f_ffree


class Sandbox:
    """Run programs, as many at a time as threads call. ValueError, with the remedy, where no sandbox can be had."""

    def __init__(self, bounds: Bounds | None = None) -> None:
        self.bounds = bounds or Bounds()
        found = shutil.which("bwrap")
        if found is None or not sys.platform.startswith("linux"):
            raise ValueError(f"the code reward needs a sandbox, and there is no bubblewrap here: {REMEDY}")
        self._filter = seccomp.program(platform.machine())
        self._guard = Path(__file__).with_name("guard.py").read_text(encoding="utf-8")
        said: list[str] = []
        for python in dict.fromkeys((_python(), "/usr/bin/python3")):
            self._command = [found, *_around(python, self.bounds), "--", *_inside(python, self._guard)]
            ran = self._run(_asked("print(6 * 7)", text=""), Bounds(seconds=60.0, wall=60.0))
            if ran == Ran(b"42\n", 0, "done"):
                return
            said.append(f"{python}: {ran.what if isinstance(ran, Failure) else ran}")
        tried = "; ".join(said)
        raise ValueError(f"the code reward needs a sandbox, and bubblewrap cannot make one here ({tried}): {REMEDY}")

    def call(self, program: str, entry: str, calls: Sequence[Sequence[Any]]) -> Ran | Failure:
        """Run a program, then call its function with JSON arguments. Output: a line of JSON for each call."""
        return self._run(_asked(program, entry=entry, calls=[list(each) for each in calls]), self.bounds)

    def feed(self, program: str, text: str) -> Ran | Failure:
        """Run a program that reads a text from standard input. Output: what it prints."""
        return self._run(_asked(program, text=text), self.bounds)

    def _run(self, asked: Mapping[str, Any], bounds: Bounds) -> Ran | Failure:
        with contextlib.ExitStack() as stack:
            given = stack.enter_context(tempfile.TemporaryFile())
            given.write(json.dumps({**asked, "limits": bounds.limits()}).encode())
            given.seek(0)
            told = stack.enter_context(tempfile.TemporaryFile())
            try:
                process, info = _start(self._command, self._filter, given.fileno(), told.fileno())
            except OSError as error:
                return Failure("refused", f"the sandbox did not start: {error}")
            stack.callback(_end, process, first := _first(info))
            output, why = _read(process, first, bounds)
            _end(process, first)
            told.seek(0)
            ready, began, rest = output.partition(b"\n")
            if ready != b"ready" or not began:
                last = told.read(4096).decode(errors="replace").strip() or f"code {process.returncode}, {why}"
                return Failure("refused", f"the sandbox did not start: {last.splitlines()[-1]}")
            return Ran(rest, process.returncode if why == "done" else None, why)


def _asked(program: str, *, entry: str | None = None, calls: Any = (), text: str = "") -> dict[str, Any]:
    return {"program": program, "entry": entry, "calls": calls, "text": text}


def _python() -> str:
    """Return this Python itself, not that of a virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def _around(python: str, bounds: Bounds) -> list[str]:
    """Return the options that make the place: read-only, with what Python needs, and a bounded /tmp."""
    options = ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"]
    options += ["--as-pid-1"]  # so all others die with the program, and bubblewrap waits for that
    options += ["--cap-drop", "ALL", "--clearenv", "--setenv", "PYTHONHASHSEED", "0", "--hostname", "sandbox"]
    options += ["--uid", str(NOBODY), "--gid", str(NOBODY)]
    for folder in ("/usr/lib", "/usr/lib64", "/lib", "/lib64"):
        if os.path.islink(folder):
            options += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            options += ["--ro-bind", folder, folder]
    home = Path(python).parents[1]
    options += ["--ro-bind", python, python]
    if home != Path("/usr"):
        options += ["--ro-bind", str(home / "lib"), str(home / "lib")]
    for device in ("/dev/null", "/dev/urandom"):
        options += ["--dev-bind", device, device]
    return [*options, "--size", str(bounds.files), "--tmpfs", "/tmp", "--chdir", "/tmp", "--remount-ro", "/"]


def _inside(python: str, guard: str) -> list[str]:
    return [python, "-s", "-S", "-P", "-B", "-X", "utf8", "-c", guard]


def _start(command: Sequence[str], rules: bytes, given: int, told: int) -> tuple[subprocess.Popen[bytes], int]:
    """Start a run. Returns its process and the file from which the place's first process is known."""
    filter_out, filter_in = os.pipe()
    info_out, info_in = os.pipe()
    try:
        os.write(filter_in, rules)
        os.close(filter_in)
        # The kernel puts no limit on how many processes root has.
        user, groups = (NOBODY, ()) if os.geteuid() == 0 else (None, None)
        process = subprocess.Popen(
            [command[0], "--seccomp", str(filter_out), "--info-fd", str(info_in), *command[1:]],
            stdin=given, stdout=subprocess.PIPE, stderr=told, bufsize=0, env={}, cwd="/",
            pass_fds=(filter_out, info_in), user=user, group=user, extra_groups=groups,
        )  # fmt: skip
    except OSError:
        os.close(info_out)
        raise
    finally:
        os.close(filter_out)
        os.close(info_in)
    return process, info_out


def _first(info: int) -> _First | None:
    """Return the first process of the place. None where none came to be."""
    said = b""
    end = time.monotonic() + START
    with os.fdopen(info, "rb", buffering=0) as file:
        while b"}" not in said:
            if not readable([file.fileno()], end - time.monotonic()) or not (got := file.read(4096)):
                return None
            said += got
    pid = json.loads(said)["child-pid"]
    with contextlib.suppress(ProcessLookupError):
        return _First(pid, os.pidfd_open(pid))
    return None


def _read(process: subprocess.Popen[bytes], first: _First | None, bounds: Bounds) -> tuple[bytes, str]:
    """Read what is written until the program has ended, is late, or has written too much.

    Its clock starts with the first word of the guard: how long a busy machine takes to get there is not its fault.
    """
    assert process.stdout is not None
    over, out = os.pidfd_open(process.pid), process.stdout.fileno()
    end = time.monotonic() + START
    output = bytearray()
    ended, open_still = False, True
    try:
        while True:
            left = end - time.monotonic()
            if not ended and left <= 0:
                return bytes(output), "time"
            if not ended and output and first is not None and first.files() > bounds.names:
                return bytes(output), "files"
            ready = readable([out, over] if open_still else [over], 0.0 if ended else min(left, LOOK))
            if out in ready:
                if not output:
                    end = time.monotonic() + bounds.wall
                got = process.stdout.read(1 << 16)
                open_still = bool(got)
                output += got
                if len(output) > bounds.output:
                    return bytes(output), "output"
            elif over in ready:
                if ended:
                    return bytes(output), "done"
                ended = True  # once more around for what was written just before
    finally:
        os.close(over)


def _end(process: subprocess.Popen[bytes], first: _First | None) -> None:
    """Kill all that is left, and wait until it is gone: the first process of a place ends after all others."""
    if process.stdout is None or process.stdout.closed:
        return
    process.stdout.close()
    if first is None:
        process.kill()
    else:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(first.handle, signal.SIGKILL)
        readable([first.handle], None)
        os.close(first.handle)
    process.wait()
