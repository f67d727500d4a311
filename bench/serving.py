"""Send a thousand requests to `ironfn serve`, of which many are wrong or given up, and count what is left of them."""

from __future__ import annotations

import http.client
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from attrs import define, field

from bench import peer
from bench.figure import Figure
from ironfn.data.tokenizer import train
from ironfn.model.arch import complete
from ironfn.spec.records import ModelSpec, TokenizerSpec

REQUESTS, CLIENTS, TWINS, WARM = 1000, 24, 25, 300
MODEL = ModelSpec(width=64, layers=2, heads=4, ffn=128, context=256)
WRONG: tuple[tuple[int, dict[str, Any]], ...] = (
    (400, {"temperature": -1}),
    (400, {"prompt": []}),
    (400, {"prompt": [10**6]}),
    (400, {"prompt": "word " * 2000}),
    (400, {"stop": ""}),
    (400, {"unheard_of": 1}),
    (404, {"model": "another"}),
    (413, {"prompt": "x" * (5 << 20)}),
)
"""What is to be refused, and with which status."""


@define
class Log:
    """Collect what came of the requests. texts: by twin, what was answered to the same question."""

    right: int = 0
    wrong: list[str] = field(factory=list)
    texts: dict[int, set[str]] = field(factory=dict)
    lock: threading.Lock = field(factory=threading.Lock)

    def good(self, twin: int | None = None, text: str = "") -> None:
        """Count an answer that is as it should be; the answers to twins are compared in the end."""
        with self.lock:
            self.right += 1
            if twin is not None:
                self.texts.setdefault(twin, set()).add(text)

    def bad(self, why: str) -> None:
        """Keep what was wrong with an answer."""
        with self.lock:
            self.wrong.append(why)


def figures() -> Iterator[Figure]:
    """Yield how many requests were lost, how many blocks were not given back, and how much the memory has grown."""
    log, sizes = Log(), list[float]()
    with tempfile.TemporaryDirectory() as folder, _server(Path(folder)) as (process, port):
        start = time.perf_counter()
        for first, last in ((0, WARM), (WARM, REQUESTS)):
            with ThreadPoolExecutor(CLIENTS) as clients:
                list(clients.map(lambda n: _one(port, n, log), range(first, last)))
            health = _idle(port)
            status = Path(f"/proc/{process.pid}/status").read_text()
            sizes.append(int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024)
        seconds, blocks = time.perf_counter() - start, health["blocks"]
    differing = sum(len(texts) > 1 for texts in log.texts.values())
    note = f"{REQUESTS} requests of {CLIENTS} clients in {seconds:.0f} s; wrong: {log.wrong[:3] or 'none'}"
    yield Figure("serve_lost_requests", REQUESTS - log.right, "== 0", note)
    yield Figure("serve_differing_twins", differing, "== 0", f"{len(log.texts)} questions, each asked many times")
    lost = blocks["count"] - blocks["free"] - blocks["idle"] + health["held"] + health["running"] + health["waiting"]
    yield Figure("serve_blocks_not_returned", lost, "== 0", f"{blocks}")
    note = f"{sizes[0]:.0f} MB after {WARM} requests, {sizes[1]:.0f} MB after all"
    yield Figure("serve_memory_growth", sizes[1] / sizes[0], "<= 1.03", note)


@contextmanager
def _server(folder: Path) -> Generator[tuple[subprocess.Popen[str], int]]:
    """Serve a small random model from a process of its own, and end it as Ctrl-C does."""
    tokenizer = train(iter(topics.values()), TokenizerSpec(kind="bpe", vocab_size=512))
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    peer.llama(complete(MODEL, 512)).save_pretrained(folder)
    command = [sys.executable, "-m", "ironfn", "serve", str(folder), "--port", "0", "--name", "small"]
    process = subprocess.Popen([*command, "--cache-gb", "0.02"], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said: list[str] = []
    try:
        for line in process.stderr:
            said.append(line)
            if found := re.search(r"http://[^/]*:(\d+)", line):
                threading.Thread(target=process.stderr.read, daemon=True).start()  # or it would wait for a reader
                yield process, int(found[1])
                break
        else:
            raise RuntimeError(f"ironfn serve did not start: {''.join(said)}")
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        finally:
            process.kill()


def _idle(port: int) -> dict[str, Any]:
    """Wait until nothing is being written, at most half a minute; return what the server says of itself."""
    end = time.monotonic() + 30
    while (health := json.loads(_ask(port, None, "/health")[1]))["held"] or health["running"]:
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    return health


def _one(port: int, number: int, log: Log) -> None:
    """Send one request, of a kind that its number decides, and look at the answer."""
    draw = random.Random(number)
    twin = draw.randrange(TWINS)
    same = random.Random(twin)
    question = {
        "model": "small", "prompt": topics["assert"][: same.randrange(4, 300)], "max_tokens": same.randrange(1, 40),
        "temperature": same.choice([0, 0.7, 1.5]), "seed": twin, "n": same.choice([1, 1, 1, 3]),
        "top_p": same.choice([1, 0.9]), "stop": same.choice([None, "e", ["zz", "the"]]),
    }  # fmt: skip
    kind = draw.choices(("whole", "stream", "give up", "wrong"), (4, 2, 2, 2))[0]
    try:
        if kind == "wrong":
            status, fields = draw.choice(WRONG)
            found, text = _ask(port, question | fields)
            log.good() if found == status and "error" in json.loads(text) else log.bad(f"{found}: {text[:99]}")
        elif kind == "give up":
            _give_up(port, question | {"stream": draw.random() < 0.8, "max_tokens": 200, "stop": None}, draw)
            log.good()
        else:
            status, text = _ask(port, question | {"stream": kind == "stream"})
            choices = _choices(text, kind == "stream") if status == 200 else {}
            if len(choices) == question["n"]:
                log.good(twin, json.dumps(choices, sort_keys=True))
            else:
                log.bad(f"{status}: {text[:99]}")
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        log.bad(f"{kind}: {error!r}")


def _ask(port: int, body: dict[str, Any] | None, path: str = "/v1/completions") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def _give_up(port: int, body: dict[str, Any], draw: random.Random) -> None:
    """Go away at once, after a moment, or in the middle of a stream."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body))
        if body["stream"]:
            answer = connection.getresponse()
            for _ in range(draw.randrange(4)):
                answer.readline()
        else:
            time.sleep(draw.random() / 10)
    finally:
        connection.close()


def _choices(text: str, stream: bool) -> dict[int, tuple[str, str]]:
    """Return the text and the reason of the end of each completion."""
    if not stream:
        return {choice["index"]: (choice["text"], choice["finish_reason"]) for choice in json.loads(text)["choices"]}
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    if lines[-1] != "[DONE]":
        raise ValueError(f"a stream ends with {lines[-1][:99]}")
    found: dict[int, tuple[str, str]] = {}
    for choice in (choice for line in lines[:-1] for choice in json.loads(line)["choices"]):
        found[choice["index"]] = (found.get(choice["index"], ("", ""))[0] + choice["text"], choice["finish_reason"])
    return {index: each for index, each in found.items() if each[1]}
