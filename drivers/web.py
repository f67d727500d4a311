"""The HTTP application of `ironfn serve`: who may ask, what is asked, and where it is answered."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from attrs import field, frozen
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ironfn.data.chat import Chat
from ironfn.hf.untrusted import parse_json

from .asked import Asked, Refusal, asked_chat, asked_text
from .exchange import Exchange, refused
from .service import Service
from .trained import Trained

BODY = 4 << 20
"""Bytes that a request may have."""
BODY_SECONDS = 30.0
"""How long a client may take to send them."""
PAGE = Path(__file__).with_name("page.html")


@frozen(eq=False)
class Site:
    """Hold what the application serves. name: what clients call the model. hosts: names that it answers to; none: any.

    key: what clients have to bring, if anything.
    """

    service: Service
    model: Trained
    name: str
    chat: Chat | None
    hosts: frozenset[str] = frozenset()
    key: str | None = field(default=None, repr=False)
    began: int = field(factory=lambda: int(time.time()))

    def application(self) -> ASGIApp:
        """Return the ASGI application."""
        routes = [
            Route("/", self.page),
            Route("/health", self.health),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.models),
            Route("/v1/chat/completions", self.complete_chat, methods=["POST"]),
            Route("/v1/completions", self.complete_text, methods=["POST"]),
        ]
        handlers: dict[Any, Any] = {HTTPException: _plainly, Refusal: _refusal, Exception: _fault}
        return Guard(Starlette(routes=routes, exception_handlers=handlers), self)

    async def page(self, request: Request) -> Response:
        """Return the page, whose policy lets it run its own script and ask this server, and nothing else."""
        text = PAGE.read_text(encoding="utf-8")
        policy = "default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        for tag, kind in (("script", "script-src"), ("style", "style-src")):
            (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
            policy += f"; {kind} 'sha256-{digest}'"
        headers = {"content-security-policy": policy, "referrer-policy": "no-referrer", "cache-control": "no-cache"}
        return HTMLResponse(text, headers=headers)

    async def health(self, request: Request) -> Response:
        told = self.service.health()
        return JSONResponse(told, 200 if told["status"] == "ok" else 503)

    async def models(self, request: Request) -> Response:
        wanted = request.path_params.get("name")
        card = {
            "id": self.name, "object": "model", "created": self.began, "owned_by": "ironfn",
            "max_model_len": self.model.arch.context, "chat": self.chat is not None,
        }  # fmt: skip
        if wanted is None:
            return JSONResponse({"object": "list", "data": [card]})
        self._require(wanted)
        return JSONResponse(card)

    async def complete_chat(self, request: Request) -> Response | ASGIApp:
        body = await _body(request)
        if self.chat is None:
            raise Refusal(400, f"{self.name} has no chat template; use /v1/completions")
        return Exchange(self.service, self.model, *await asyncio.to_thread(self._read_chat, body, self.chat))

    async def complete_text(self, request: Request) -> Response | ASGIApp:
        return Exchange(self.service, self.model, *await asyncio.to_thread(self._read_text, await _body(request)))

    def _read_chat(self, body: bytes, chat: Chat) -> tuple[Asked, list[list[int]]]:
        asked = asked_chat(_object(body))
        self._require(asked.model)
        try:
            return asked, [self._fitting(chat.encode(asked.messages))]
        except ValueError as error:
            raise Refusal(400, str(error), param="messages") from error

    def _read_text(self, body: bytes) -> tuple[Asked, list[list[int]]]:
        asked = asked_text(_object(body))
        self._require(asked.model)
        vocabulary = self.model.arch.vocab
        prompts: list[list[int]] = []
        for prompt in asked.prompts:
            ids = self.model.encode(prompt) if isinstance(prompt, str) else list(prompt)
            if not all(0 <= i < vocabulary for i in ids):
                raise Refusal(400, f"prompt: an id is outside the model's vocabulary of {vocabulary}", param="prompt")
            prompts.append(self._fitting(ids))
        return asked, prompts

    def _require(self, name: str) -> None:
        if name != self.name:
            what = f"the model {name[:100]!r} does not exist; this server has {self.name!r}"
            raise Refusal(404, what, param="model", code="model_not_found")

    def _fitting(self, ids: list[int]) -> list[int]:
        context = self.model.arch.context
        if len(ids) > context:
            what = f"the prompt has {len(ids)} tokens, and the model's context is {context}; shorten it"
            raise Refusal(400, what, code="context_length_exceeded")
        return ids


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = parse_json(body, "the body")
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise Refusal(400, "the body holds half of a surrogate pair, which is no text") from error
    except ValueError as error:
        raise Refusal(400, str(error)) from error
    return found


async def _body(request: Request) -> bytes:
    """Read a request's body. Refusal where it is too long, or too slow."""
    length = request.headers.get("content-length", "0")
    parts, size = list[bytes](), int(length) if length.isdecimal() else 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            if size <= BODY:
                size = 0
                async for part in request.stream():
                    parts.append(part)
                    size += len(part)
                    if size > BODY:
                        break
    except TimeoutError:
        raise Refusal(408, f"the body did not come within {BODY_SECONDS:g} s") from None
    except ClientDisconnect:
        raise Refusal(400, "the client went away") from None
    if size > BODY:
        raise Refusal(413, f"the body has more than {BODY:,} bytes; send less")
    return b"".join(parts)


class Guard:
    """Let through what is meant for this server, and comes from whom it may come."""

    def __init__(self, inner: ASGIApp, site: Site) -> None:
        self.inner, self.site = inner, site

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        why = self._why_not(Request(scope)) if scope["type"] == "http" else None
        await (self.inner if why is None else refused(why))(scope, receive, send)

    def _why_not(self, request: Request) -> Refusal | None:
        """Return why a request is refused, if it is.

        A page of another site may have its name point to this machine (DNS rebinding), or send a request whose answer
        it cannot read: the first is known by the name, the second by its origin.
        """
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if self.site.hosts and _name(host) not in self.site.hosts:
            return Refusal(403, f"this server does not answer to the name {host[:100]!r}; use 127.0.0.1 or --host")
        if origin is not None and urlsplit(origin).netloc != host:
            return Refusal(403, f"pages of {origin[:100]!r} may not use this server")
        if self.site.key is None or not request.url.path.startswith("/v1/"):
            return None
        given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if hmac.compare_digest(given.encode("latin-1"), self.site.key.encode()):
            return None
        return Refusal(401, "a key is needed: Authorization: Bearer KEY", code="invalid_api_key")


def _name(host: str) -> str:
    """Return a host without its port."""
    return re.sub(r":\d+$", "", host).lower()


async def _plainly(request: Request, error: HTTPException) -> Response:
    response = refused(Refusal(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))
    response.headers.update(error.headers or {})
    return response


async def _refusal(request: Request, error: Refusal) -> Response:
    return refused(error)


async def _fault(request: Request, error: Exception) -> Response:
    return refused(Refusal(500, f"a fault of the server ({type(error).__name__}); its output says more"))
