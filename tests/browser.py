"""Drive a real Chromium over a pair of pipes, by its DevTools protocol."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


class Page:
    """Be a page in a browser. said: what it wrote to the console, and errors that it did not catch."""

    def __init__(self, asks: int, answers: int) -> None:
        self._asks, self._answers, self._held = asks, answers, b""
        self._numbers, self._session = itertools.count(1), {}
        self.said: list[str] = []
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        number = next(self._numbers)
        asked = {"id": number, "method": method, "params": parameters, **self._session}
        os.write(self._asks, json.dumps(asked).encode() + b"\0")
        while True:
            told = self._next(30)
            if told.get("id") == number:
                assert "error" not in told, told
                return told["result"]

    def _next(self, seconds: float) -> dict[str, Any]:
        while b"\0" not in self._held:
            assert select.select([self._answers], [], [], seconds)[0], "the browser does not answer"
            self._held += os.read(self._answers, 1 << 20)
        message, _, self._held = self._held.partition(b"\0")
        told = json.loads(message)
        if told.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.said.append(json.dumps(told["params"]))
        return told

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        told = self("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def until(self, script: str, seconds: float = 60) -> Any:
        """Return the value of an expression as soon as it is true."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < end, (script, self.run("document.body.innerText"), self.said)
            time.sleep(0.02)
        return value

    def look(self, width: int, height: int, scheme: str) -> None:
        """Take a screen's size, and whether it is light or dark."""
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def key(self, name: str, code: int, text: str = "") -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            self(
                "Input.dispatchKeyEvent", type=kind, key=name, windowsVirtualKeyCode=code,
                **({"text": text} if text and kind == "keyDown" else {}),
            )  # fmt: skip

    def picture(self, path: Path) -> None:
        """Write what is to be seen as a PNG."""
        path.write_bytes(base64.b64decode(self("Page.captureScreenshot")["data"]))


@contextmanager
def browsing(profile: Path) -> Iterator[Page]:
    """Open a browser, and close it."""
    theirs, asks = os.pipe()
    answers, ours = os.pipe()
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (theirs, ours)]

    def wire() -> None:
        os.dup2(ends[0], 3)
        os.dup2(ends[1], 4)

    command = [BROWSER or "", *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe"]
    with (profile.parent / "browser.txt").open("wb") as said:
        process = subprocess.Popen(command, preexec_fn=wire, pass_fds=(3, 4), stdout=said, stderr=said)
    for end in (theirs, ours, *ends):
        os.close(end)
    try:
        yield Page(asks, answers)
    finally:
        process.terminate()
        process.wait(30)
        os.close(asks)
        os.close(answers)
