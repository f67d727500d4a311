"""Start `ironfn serve` as a process of its own, and ask it without any client library."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import frozen

ROOT = Path(__file__).parents[1]


@frozen
class Server:
    """Hold a server that runs. said: the file with what it has said."""

    process: subprocess.Popen[bytes]
    port: int
    said: Path

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def ask(
        self, path: str, body: Any = None, *, method: str | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """Return the status, the JSON and the headers of an answer. body: bytes as they are, others as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method or ("GET" if body is None else "POST"), path, data, headers or {})
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        return answer.status, json.loads(text), {name.lower(): value for name, value in answer.getheaders()}

    def idle(self) -> dict[str, Any]:
        """Wait until nothing is written any more, and return its health."""
        return until(
            lambda: self.ask("/health")[1], lambda told: told["held"] == told["running"] == told["waiting"] == 0
        )


def until(look: Callable[[], Any], good: Callable[[Any], bool], seconds: float = 60) -> Any:
    """Return the first thing seen that is good."""
    end = time.monotonic() + seconds
    while not good(seen := look()):
        assert time.monotonic() < end, seen
        time.sleep(0.01)
    return seen


@contextmanager
def serving(model: Path, folder: Path, *options: str, **environment: str) -> Iterator[Server]:
    """Run a server on a free port; it has to end by itself, with code 0, when it is asked to."""
    said = folder / "said.txt"
    command = [sys.executable, "-m", "ironfn", "serve", str(model), "--port", "0", *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    with said.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=env, cwd=folder)
    try:

        def look() -> re.Match[str] | None:
            assert process.poll() is None, said.read_text()
            return re.search(r"http://[^\s/]+:(\d+) \(a page", said.read_text())

        yield Server(process, int(until(look, bool)[1]), said)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, said.read_text()
    finally:
        process.kill()
        process.wait()
