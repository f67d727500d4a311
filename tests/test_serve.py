"""The server as its clients see it: `openai`'s own one, and those that ask for rubbish, go away, or dawdle."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from drivers.trained import Trained
from drivers.writer import Writer, engine_of, for_writing
from ironfn.generate.engine import Request
from ironfn.generate.sampling import Sampling
from ironfn.generate.text import Words

from .servers import Server, serving
from .tiny_model import END, POISON, START, tiny_model

ROOM = 64
CHAT = [{"role": "system", "content": "quick"}, {"role": "user", "content": "the lazy dog 🙂"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(model, tmp_path_factory.mktemp("server"), "--queue", str(ROOM)) as running:
        yield running
        assert running.ask("/health")[0] == 200


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base, api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def trained(model: Path) -> Trained:
    return for_writing(model, None, False)


def written(trained: Trained, prompt: list[int], limit: int, n: int = 1, stop: str = "", **sampling: Any) -> list[str]:
    """Return what the model writes, without a server."""
    request = Request(key=0, prompt=tuple(prompt), limit=limit, n=n, stop=trained.stop, sampling=Sampling(**sampling))
    texts = [""] * n
    for piece in Writer(engine_of(trained)).write([(request, Words(trained.tokenizer, (stop,) if stop else ()))]):
        texts[piece.number] += piece.text
    return texts


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    (card,) = client.models.list().data
    assert (card.id, card.owned_by, card.object) == ("tiny", "ironfn", "model")
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="the model 'gpt-4' does not exist; this server has 'tiny'"):
        client.models.retrieve("gpt-4")


def test_a_completion_is_what_the_model_writes(client: openai.OpenAI, trained: Trained) -> None:
    ids = trained.encode("the quick")
    done = client.completions.create(model="tiny", prompt="the quick", max_tokens=20, temperature=0)
    assert done.choices[0].text == written(trained, ids, 20, temperature=0)[0]
    assert (done.choices[0].finish_reason, done.object) == ("length", "text_completion")
    assert done.usage is not None
    usage = done.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (len(ids), 20, len(ids) + 20)
    same = client.completions.create(model="tiny", prompt=ids, max_tokens=20, temperature=0, echo=True)
    assert same.choices[0].text == "the quick" + done.choices[0].text
    assert len(client.completions.create(model="tiny", prompt="", temperature=0).choices[0].text) > 0


def test_several_completions_of_several_prompts_by_chance(client: openai.OpenAI, trained: Trained) -> None:
    asked: dict[str, Any] = {
        "model": "tiny", "prompt": ["fox", "jumps"], "n": 3, "max_tokens": 12, "seed": 5, "top_p": 0.9,
        "extra_body": {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.2},
    }  # fmt: skip
    done = client.completions.create(**asked)
    sampling: dict[str, Any] = {"seed": 5, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.2}
    right = [text for prompt in asked["prompt"] for text in written(trained, trained.encode(prompt), 12, 3, **sampling)]
    assert [choice.index for choice in done.choices] == list(range(6))
    assert [choice.text for choice in done.choices] == right
    assert len(set(right)) == 6
    texts = [""] * 6
    for chunk in client.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == right
    other = client.completions.create(**asked | {"seed": 6})
    assert [choice.text for choice in other.choices] != right
    free = [client.completions.create(model="tiny", prompt="fox", max_tokens=20).choices[0].text for _ in range(2)]
    assert free[0] != free[1], "without a seed each request has one of its own"


def test_a_stop_string_ends_and_is_not_told(client: openai.OpenAI, trained: Trained, server: Server) -> None:
    whole = written(trained, trained.encode("fox"), 200, temperature=0)[0]
    stop = whole[60:63]
    assert whole.index(stop) == 60
    asked: dict[str, Any] = {
        "model": "tiny",
        "prompt": "fox",
        "max_tokens": 200,
        "temperature": 0,
        "stop": ["no such", stop],
    }
    done = client.completions.create(**asked)
    assert (done.choices[0].text, done.choices[0].finish_reason) == (whole[:60], "stop")
    chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole[:60]
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "stop"]
    assert done.usage is not None
    assert done.usage.completion_tokens < 200
    assert server.idle()["running"] == 0, "the engine does not go on with it"


@pytest.mark.parametrize("chance", [{"temperature": 0}, {"seed": 11}], ids=["greedy", "by-chance"])
def test_a_chat_is_answered_whole_or_as_a_stream(
    client: openai.OpenAI, trained: Trained, chance: dict[str, Any]
) -> None:
    chat = trained.chat()
    assert chat is not None
    prompt = chat.encode(CHAT)
    chat.renderer.close()
    right = written(trained, prompt, 30, **chance)[0]
    asked: dict[str, Any] = {"model": "tiny", "messages": CHAT, "max_completion_tokens": 30, **chance}
    done = client.chat.completions.create(**asked)
    message = done.choices[0].message
    assert (message.role, message.content, done.choices[0].finish_reason) == ("assistant", right, "length")
    assert done.usage is not None
    assert done.usage.prompt_tokens == len(prompt)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == right
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-2:] == [None, "length"]
    assert (chunks[-1].choices, chunks[-1].usage) == ([], done.usage)
    assert len({chunk.id for chunk in chunks}) == 1


def test_log_probabilities(client: openai.OpenAI, trained: Trained) -> None:
    done = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=40, seed=3, logprobs=True, top_logprobs=3
    )  # pyright: ignore[reportCallIssue, reportArgumentType]
    told = done.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert len(told.content) == 40
    spelled = bytes(byte for token in told.content for byte in token.bytes or [])
    assert spelled.decode(errors="replace") == done.choices[0].message.content
    for token in told.content:
        best = [each.logprob for each in token.top_logprobs]
        assert best == sorted(best, reverse=True)
        assert token.logprob <= best[0] + 1e-6
    plain = client.completions.create(model="tiny", prompt="fox", max_tokens=20, temperature=0, logprobs=2)
    log_probs = plain.choices[0].logprobs
    assert log_probs is not None
    assert log_probs.token_logprobs is not None
    assert log_probs.top_logprobs is not None
    assert len(log_probs.token_logprobs) == len(log_probs.text_offset or []) == len(log_probs.tokens or []) == 20
    for value, top in zip(log_probs.token_logprobs, log_probs.top_logprobs, strict=True):
        assert value == max(top.values()), "greedy takes the likeliest"
        assert len(top) == 2
    assert any(name.startswith("bytes:\\x") for name in log_probs.tokens or [])


@pytest.mark.parametrize(
    ("changes", "param", "what"),
    [
        ({"temperature": -1}, "temperature", "temperature -1.0 must be finite and at least 0"),
        ({"temperature": "hot"}, "temperature", "'hot' is not a number"),
        ({"temperature": True}, "temperature", "True is not a number"),
        ({"temperature": 10**400}, "temperature", "is not a number"),
        ({"top_p": 0}, "top_p", "must be above 0"),
        ({"top_k": 1.5}, "top_k", "1.5 is not an integer"),
        ({"n": 0}, "n", "must be between 1 and 128"),
        ({"n": 100}, None, "this server takes 64 at a time"),
        ({"max_tokens": 0}, "max_tokens", "must be at least 1"),
        ({"seed": 2**70}, "seed", "must be between"),
        ({"stop": [""]}, "stop", "each of 1 to 1000 characters"),
        ({"stop": list("abcdefghijklmnopq")}, "stop", "up to 16"),
        ({"stream": "yes"}, "stream", "not true or false"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only with stream"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not supported here"),
        ({"presence_penalty": 0.5}, "presence_penalty", "use repetition_penalty"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported here"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported here"),
        ({"temprature": 1}, "temprature", "unrecognized request argument supplied: temprature"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"model": None}, "model", "you must provide a model"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "none of"),
        ({"messages": [{"role": "user", "content": "fox " * 2000}]}, None, "the model's context is 512; shorten it"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_cannot_be_done_is_refused_with_its_field(
    server: Server, changes: dict[str, Any], param: str | None, what: str
) -> None:
    status, told, _ = server.ask("/v1/chat/completions", {"model": "tiny", "messages": CHAT, "max_tokens": 2} | changes)
    assert (status, told["error"]["param"]) == (400, param), told
    assert what in told["error"]["message"]
    assert told["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": []}, {"prompt": [[]]}, {"prompt": [1, "a"]}, {"prompt": {"a": 1}}, {}, {"prompt": [303]},
        {"prompt": [-1]}, {"prompt": ["a"] * 200}, {"prompt": "a", "best_of": 3}, {"prompt": "a", "suffix": "b"},
        {"prompt": "a", "echo": True, "logprobs": 1}, {"prompt": [5] * 600},
    ],
    ids=lambda body: str(body)[:30],
)  # fmt: skip
def test_prompts_that_are_none_are_refused(server: Server, body: dict[str, Any]) -> None:
    status, told, _ = server.ask("/v1/completions", {"model": "tiny"} | body)
    assert status == 400, told
    assert told["error"]["message"]


def test_fields_that_change_nothing_are_taken(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=2, user="me", store=False, metadata={"a": "b"}, tools=[],
        presence_penalty=0, logit_bias={}, response_format={"type": "text"}, parallel_tool_calls=True,
    )  # pyright: ignore  # fmt: skip
    assert done.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400), (b"{", 400), (b"[1]", 400), (b"null", 400), (b'{"a": NaN}', 400), (b'{"a":1,"a":2}', 400),
        (b"\xff\xfe", 400), (b"[" * 100_000, 400), (b'{"model":"tiny","prompt":"\\ud800"}', 400),
        (b'{"model":"tiny","prompt":"' + b"a" * (5 << 20) + b'"}', 413),
    ],
    ids=["empty", "half", "list", "null", "nan", "twice", "bytes", "deep", "surrogate", "long"],
)  # fmt: skip
def test_rubbish_is_told_so(server: Server, body: bytes, status: int) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        found, told, _ = server.ask(path, body)
        assert found == status, told
        assert told["error"]["type"] == "invalid_request_error"


def test_a_long_body_without_a_length_is_cut_off(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as line:
        line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        try:
            for _ in range(200):
                line.sendall(chunk)
        except OSError:
            pass
        assert b" 413 " in line.recv(1000)


def test_ways_that_lead_nowhere(server: Server) -> None:
    assert server.ask("/v2/models")[0] == 404
    status, told, headers = server.ask("/v1/completions", method="GET")
    assert (status, headers["allow"]) == (405, "POST")
    assert told["error"]["message"]
    assert server.ask("/v1/models", {}, method="DELETE")[0] == 405
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as line:
        line.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
        assert line.recv(1000).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403), ({"Host": "evil.example:80"}, 403), ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "localhost"}, 200), ({"Host": "LOCALHOST:1"}, 200), ({"Host": "[::1]:8000"}, 200),
        ({"Origin": "https://evil.example"}, 403), ({"Origin": "null"}, 403),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else next(iter(value.values())),
)  # fmt: skip
def test_pages_of_others_get_nothing(server: Server, headers: dict[str, str], status: int) -> None:
    found, told, answer = server.ask("/v1/models", headers=headers)
    assert found == status, told
    assert not [name for name in answer if name.startswith("access-control")]
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
    assert server.ask("/v1/completions", body, headers=headers)[0] == status


def test_fifty_at_once_are_each_as_if_alone(client: openai.OpenAI, trained: Trained, server: Server) -> None:
    prompts = [f"{'the quick brown fox ' * (n % 7)}{n}" for n in range(50)]

    def ask(number: int) -> str:
        chance: dict[str, Any] = {"temperature": 0} if number % 2 else {"seed": number}
        limit = 5 + number % 11
        done = client.completions.create(model="tiny", prompt=prompts[number], max_tokens=limit, **chance)
        return done.choices[0].text

    with ThreadPoolExecutor(50) as pool:
        found = list(pool.map(ask, range(50)))
    for number, text in enumerate(found):
        chance: dict[str, Any] = {"temperature": 0} if number % 2 else {"seed": number}
        right = written(trained, trained.encode(prompts[number]), 5 + number % 11, **chance)[0]
        assert text == right, number
    blocks = server.idle()["blocks"]
    assert blocks["free"] + blocks["idle"] == blocks["count"]


def test_who_goes_away_is_not_written_to(client: openai.OpenAI, server: Server) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "fox", "max_tokens": 480, "temperature": 0}
    stream = client.completions.create(**asked, stream=True, n=4)
    next(iter(stream))
    assert server.ask("/health")[1]["held"] == 4
    stream.close()
    told = server.idle()
    assert told["blocks"]["free"] + told["blocks"]["idle"] == told["blocks"]["count"]
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as line:
        line.sendall(head + body)
        while server.ask("/health")[1]["held"] == 0:
            time.sleep(0.005)
    server.idle()


def test_a_full_queue_says_when_to_come_again(client: openai.OpenAI, server: Server) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "fox", "max_tokens": 400, "temperature": 0}
    stream = client.completions.create(**asked, stream=True, n=ROOM)
    next(iter(stream))
    status, told, headers = server.ask("/v1/completions", asked)
    assert (status, headers["retry-after"], told["error"]["type"]) == (429, "1", "rate_limit_error")
    with pytest.raises(openai.RateLimitError, match="and 64 is the most"):
        client.completions.create(**asked)
    stream.close()
    server.idle()
    assert client.completions.create(**asked | {"max_tokens": 1}).choices[0].finish_reason == "length"


def test_a_fault_fails_who_was_there_and_nobody_else(client: openai.OpenAI, server: Server) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "fox", "max_tokens": 480, "temperature": 0}
    stream = client.completions.create(**asked, stream=True)
    first = next(iter(stream))
    with pytest.raises(openai.InternalServerError, match="the engine failed over this or another request"):
        client.completions.create(model="tiny", prompt=[5, POISON], max_tokens=3, temperature=0)
    with pytest.raises(openai.APIError, match="the engine failed over this or another request"):
        list(stream)
    stream.close()
    again = client.completions.create(**asked | {"max_tokens": 5})
    assert again.choices[0].text.startswith(first.choices[0].text)
    assert server.idle()["status"] == "ok"


def test_slow_clients_are_served_and_hold_nobody_up(client: openai.OpenAI, server: Server) -> None:
    body = json.dumps(
        {"model": "tiny", "prompt": "fox", "max_tokens": 300, "temperature": 0, "stream": True, "n": 8}
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.settimeout(60)
        line.connect(("127.0.0.1", server.port))
        for byte in (head + body)[:40]:
            line.sendall(bytes([byte]))
            time.sleep(0.002)
        line.sendall((head + body)[40:])
        server.idle()  # it is all written before anything of it is read
        quick = client.completions.create(model="tiny", prompt="fox", max_tokens=2)
        assert quick.choices[0].finish_reason == "length"
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            part = line.recv(3000)
            assert part, data[-200:]
            data += part
    assert data.count(b'"finish_reason":"length"') == 8
    assert b"data: [DONE]" in data


def test_memory_stays_what_it_is(client: openai.OpenAI, server: Server) -> None:
    process = psutil.Process(server.process.pid)

    def ask(number: int) -> None:
        asked: dict[str, Any] = {"model": "tiny", "prompt": f"{number} fox " * 9, "max_tokens": 6, "temperature": 0}
        try:
            if number % 3 == 0:
                stream = client.completions.create(**asked | {"max_tokens": 200}, stream=True)
                next(iter(stream))
                stream.close()
            else:
                client.completions.create(**asked | ({"temperature": -1} if number % 3 == 1 else {}))
        except (openai.BadRequestError, openai.RateLimitError):
            pass

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(90)))
        server.idle()
        before, threads = process.memory_info().rss, process.num_threads()
        list(pool.map(ask, range(90, 330)))
    blocks = server.idle()["blocks"]
    assert blocks["free"] + blocks["idle"] == blocks["count"]
    assert process.memory_info().rss - before < 16 << 20
    assert process.num_threads() <= threads + 4, (
        "a busy machine may want a worker more; a thread a request would be 240"
    )
    assert len([c for c in process.net_connections() if c.status == psutil.CONN_ESTABLISHED]) < 40


def test_ctrl_c_ends_it_when_what_is_being_written_is_complete(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path, "--api-key-env", "TINY_KEY", "--name", "it", TINY_KEY="wörd") as server:
        assert server.ask("/v1/models")[0] == 401
        assert server.ask("/v1/models", headers={"Authorization": "Bearer nope"})[0] == 401
        assert server.ask("/health")[0] == 200
        secret = {"Authorization": "Bearer wörd".encode().decode("latin-1")}
        assert server.ask("/v1/models", headers=secret)[1]["data"][0]["id"] == "it"
        asked = {"model": "it", "prompt": "fox", "max_tokens": 100, "temperature": 0}
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(server.ask("/v1/completions", asked, headers=secret)))
        thread.start()
        while server.ask("/health")[1]["held"] == 0:
            time.sleep(0.005)
        server.process.send_signal(signal.SIGINT)
        refused = None
        while refused is None and server.process.poll() is None:
            try:
                status, told, headers = server.ask("/v1/completions", asked, headers=secret)
                refused = (status, headers.get("retry-after"), told["error"]["message"])
            except OSError:
                break
        thread.join(60)
        assert found[0][0] == 200
        assert found[0][1]["usage"]["completion_tokens"] == 100
        assert refused in (None, (503, "10", "the server is closing"))
    assert "Traceback" not in server.said.read_text()


def test_the_ids_that_end_an_answer_do_and_are_not_told(client: openai.OpenAI, trained: Trained) -> None:
    assert trained.stop == {END}
    assert trained.bos == START
    done = client.chat.completions.create(model="tiny", messages=CHAT, temperature=50, seed=3, max_tokens=480)
    text = done.choices[0].message.content or ""
    assert "<|im_end|>" not in text
    assert done.choices[0].finish_reason == "stop"
    assert done.usage is not None
    assert done.usage.completion_tokens < 480


def test_the_code_of_the_page_runs(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[1] / "docs/generation.md").read_text("utf-8")
    exec(re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)[0], {"ADDRESS": server.base.removesuffix("/v1")})
    assert len(capsys.readouterr().out) > 1


def test_a_model_without_a_template_continues_texts_and_says_so(tmp_path: Path) -> None:
    with serving(tiny_model(tmp_path / "bare", template=False), tmp_path, "--host", "0.0.0.0") as server:
        assert server.ask("/v1/models")[1]["data"][0]["chat"] is False
        status, told, _ = server.ask("/v1/chat/completions", {"model": "bare", "messages": CHAT})
        assert (status, told["error"]["message"]) == (400, "bare has no chat template; use /v1/completions")
        done = server.ask("/v1/completions", {"model": "bare", "prompt": "fox"}, headers={"Host": "my.machine"})
        assert done[1]["choices"][0]["finish_reason"] == "length"
        assert "anyone who reaches 0.0.0.0 can use this server" in server.said.read_text()
