"""Read what a client asks of OpenAI's API into records, or say what is wrong as that API does. Nothing is touched here.

The fields are those of `POST /v1/completions` and `POST /v1/chat/completions` in OpenAI's API reference, and three that
vLLM and others add: top_k, min_p and repetition_penalty.
"""

from __future__ import annotations

import secrets
from typing import Any, TypeVar, cast

from attrs import frozen

from ironfn.data.chat import messages_of
from ironfn.generate.sampling import Sampling

T = TypeVar("T", int, float, str, bool)

# Fields that change nothing of an answer.
_IGNORED = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "verbosity", "reasoning_effort", "parallel_tool_calls",
    }
)  # fmt: skip
# Fields that would, and their values that ask for nothing.
_ABSENT: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("presence_penalty", (0,), "use repetition_penalty"),
    ("frequency_penalty", (0,), "use repetition_penalty"),
    ("logit_bias", ({},), "leave it out"),
    ("suffix", ("",), "leave it out"),
    ("tools", ([],), "describe them in a message"),
    ("tool_choice", ("none", "auto"), "leave it out"),
    ("functions", ([],), "describe them in a message"),
    ("function_call", ("none", "auto"), "leave it out"),
    ("response_format", ({"type": "text"},), "ask for it in a message"),
    ("modalities", (["text"],), "this model writes text"),
    ("audio", (), "this model writes text"),
    ("prediction", (), "leave it out"),
    ("web_search_options", (), "leave it out"),
)
_STOPS, _STOP_LENGTH = 16, 1000
MOST = 128
"""Completions that one request may ask for."""


class Refusal(Exception):
    """Refuse a request in the form of OpenAI's errors. wait: seconds after which it may be sent again."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, wait: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.wait = status, wait
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@frozen
class Asked:
    """Hold what a request asks for.

    messages: of a chat. prompts: of completions, as texts or as ids. n: answers to each. limit: new tokens; None: as
    many as there is room for. top: how many of the likeliest tokens to tell; None tells no log-probabilities.
    """

    model: str
    sampling: Sampling
    messages: tuple[dict[str, Any], ...] = ()
    prompts: tuple[str | tuple[int, ...], ...] = ()
    n: int = 1
    limit: int | None = None
    stops: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False
    top: int | None = None
    echo: bool = False

    @property
    def chat(self) -> bool:
        return bool(self.messages)


class _Fields:
    """Take the fields out of a body, one after the other, and refuse what is left."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.left = dict(body)

    def get(self, name: str, kind: type[T], default: T, low: float | None = None, high: float | None = None) -> T:
        found = self.maybe(name, kind, low, high)
        return default if found is None else found

    def maybe(self, name: str, kind: type[T], low: float | None = None, high: float | None = None) -> T | None:
        """Return a field's value; None where it is absent or null."""
        value: Any = self.left.pop(name, None)
        if value is None:
            return None
        if kind is float and type(value) is int and abs(value) < 2**53:
            value = float(value)
        if type(value) is not kind:
            names = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
            raise Refusal(400, f"{name}: {_shown(value)} is not {names[kind]}", param=name)
        found: Any = value
        if (low is not None and found < low) or (high is not None and found > high):
            bounds = f"at least {low}" if high is None else f"between {low} and {high}"
            raise Refusal(400, f"{name}: {_shown(found)} must be {bounds}", param=name)
        return found

    def any(self, name: str) -> Any:
        return self.left.pop(name, None)

    def done(self) -> None:
        """Refuse what this server does not know, or does not do."""
        for name, nothing, remedy in _ABSENT:
            value = self.left.pop(name, None)
            if value is not None and value not in nothing:
                raise Refusal(400, f"{name} is not supported here; {remedy}", param=name, code="unsupported_parameter")
        if unknown := [name for name in self.left if name not in _IGNORED]:
            name = unknown[0][:80]
            raise Refusal(400, f"unrecognized request argument supplied: {name}", param=name, code="unknown_parameter")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def asked_chat(body: dict[str, Any]) -> Asked:
    """Read the body of a chat completion. Refusal names the field that is wrong."""
    fields = _Fields(body)
    try:
        messages = messages_of(fields.any("messages"))
    except ValueError as error:
        raise Refusal(400, str(error), param=str(error).partition(":")[0].partition(" ")[0]) from error
    limit, older = fields.maybe("max_completion_tokens", int, 1), fields.maybe("max_tokens", int, 1)
    wanted, top = fields.get("logprobs", bool, False), fields.maybe("top_logprobs", int, 0, 20)
    if top is not None and not wanted:
        raise Refusal(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    common = _common(fields)
    fields.done()
    return Asked(messages=tuple(messages), limit=limit or older, top=(top or 0) if wanted else None, **common)


def asked_text(body: dict[str, Any]) -> Asked:
    """Read the body of a completion. Refusal names the field that is wrong."""
    fields = _Fields(body)
    prompts = _prompts(fields.any("prompt"))
    limit, top = fields.get("max_tokens", int, 16, 1), fields.maybe("logprobs", int, 0, 20)
    echo, common = fields.get("echo", bool, False), _common(fields)
    best = fields.maybe("best_of", int, 1)
    if best is not None and best != common["n"]:
        raise Refusal(400, "best_of is not supported here, but as large as n", param="best_of")
    if echo and top is not None:
        raise Refusal(400, "echo with logprobs is not supported here; use ironfn eval", param="echo")
    fields.done()
    return Asked(prompts=prompts, limit=limit, top=top, echo=echo, **common)


def _common(fields: _Fields) -> dict[str, Any]:
    """Read what both kinds of requests hold."""
    model = fields.maybe("model", str)
    if model is None:
        raise Refusal(400, "you must provide a model parameter", param="model")
    options, stream = fields.any("stream_options"), fields.get("stream", bool, False)
    if options is not None and (not stream or not isinstance(options, dict)):
        raise Refusal(400, "stream_options: an object, and only with stream", param="stream_options")
    seed = fields.maybe("seed", int, -(2**63), 2**63 - 1)
    top_k = fields.maybe("top_k", int, -1)
    try:
        sampling = Sampling(
            temperature=fields.get("temperature", float, 1.0),
            top_k=None if top_k in (0, -1) else top_k,  # what others write for all tokens
            top_p=fields.get("top_p", float, 1.0),
            min_p=fields.get("min_p", float, 0.0),
            repetition_penalty=fields.get("repetition_penalty", float, 1.0),
            seed=secrets.randbits(63) if seed is None else seed,
        )
    except ValueError as error:
        raise Refusal(400, str(error), param=str(error).partition(" ")[0]) from error
    usage = isinstance(options, dict) and cast("dict[str, Any]", options).get("include_usage") is True
    n = fields.get("n", int, 1, 1, MOST)
    return {
        "model": model, "sampling": sampling, "n": n, "stops": _stops(fields.any("stop")), "stream": stream,
        "usage": usage,
    }  # fmt: skip


def _stops(value: object) -> tuple[str, ...]:
    stops: Any = [value] if isinstance(value, str) else [] if value is None else value
    good = isinstance(stops, list) and len(cast("list[object]", stops)) <= _STOPS
    if not good or not all(isinstance(stop, str) and 0 < len(stop) <= _STOP_LENGTH for stop in stops):
        what = f"a string, or up to {_STOPS} of them, each of 1 to {_STOP_LENGTH} characters"
        raise Refusal(400, f"stop: {_shown(value)} is not {what}", param="stop")
    return tuple(cast("list[str]", stops))


def _prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
    """Return the prompts: a text, ids, or a list of texts or of lists of ids."""
    one = isinstance(value, str) or (isinstance(value, list) and all(type(each) is int for each in value))
    several = [value] if one else value
    found: list[str | tuple[int, ...]] = []
    for each in cast("list[object]", several) if isinstance(several, list) else [None]:
        if isinstance(each, str):
            found.append(each)
        elif isinstance(each, list) and each and all(type(i) is int for i in cast("list[object]", each)):
            found.append(tuple(cast("list[int]", each)))
        else:
            what = "a string, ids, or a list of strings or of lists of ids, none of them empty"
            raise Refusal(400, f"prompt: {_shown(value)} is not {what}", param="prompt")
    if not 0 < len(found) <= MOST:
        raise Refusal(400, f"prompt: {len(found)} prompts; between 1 and {MOST} can be given", param="prompt")
    return tuple(found)
