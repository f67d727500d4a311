"""Answer one HTTP request with what an engine writes: as a whole or as a stream, or not at all where nobody waits."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from ironfn.generate.engine import Event, Request
from ironfn.generate.text import Words

from .answers import Answer
from .asked import Asked, Refusal
from .service import Service
from .telling import Piece, Teller
from .trained import Trained

SEND_SECONDS = 60.0
"""How long a client may leave what it is sent unread."""


def refused(error: Refusal) -> JSONResponse:
    """Return a refusal as a response."""
    headers = {} if error.wait is None else {"retry-after": str(error.wait)}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error.body, error.status, headers)


class Exchange:
    """Be the response to a request for completions."""

    def __init__(self, service: Service, model: Trained, asked: Asked, prompts: list[list[int]]) -> None:
        self.service, self.asked = service, asked
        self.prompt_tokens = sum(map(len, prompts))
        kind = "chatcmpl" if asked.chat else "cmpl"
        self.answer = Answer(f"{kind}-{uuid.uuid4().hex}", int(time.time()), asked, model.tokenizer)
        words = Words(model.tokenizer, asked.stops)
        self.teller = Teller()
        self.requests = [
            Request(
                key=service.key(), prompt=tuple(ids), limit=asked.limit or model.arch.context, n=asked.n,
                sampling=asked.sampling, stop=model.stop, top=asked.top or 0,
            )
            for ids in prompts
        ]  # fmt: skip
        self.first = {request.key: number * asked.n for number, request in enumerate(self.requests)}
        for request in self.requests:
            self.teller.expect(request, words)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, unless the client goes away: then whatever it asked for is given up."""
        answer = self._stream if self.asked.stream else self._whole
        work = asyncio.ensure_future(answer(scope, receive, send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        except TimeoutError:  # a client that reads nothing is as one that has gone away
            return
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            for request in self.requests:
                self.service.cancel(request.key)

    async def _pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yield (index of the completion, piece) to the end of all. Refusal where there is none to come."""
        loop, heard = asyncio.get_running_loop(), asyncio.Queue[list[Event] | Refusal]()

        def sink(events: list[Event] | Refusal) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(heard.put_nowait, events)

        self.service.submit(self.requests, sink)
        left = sum(request.n for request in self.requests)
        while left:
            events = await heard.get()
            if isinstance(events, Refusal):
                raise events
            pieces, enough = self.teller.hear(events)
            for key, number in enough:
                self.service.cancel(key, number)
            for piece in pieces:
                left -= piece.finish is not None
                yield self.first[piece.key] + piece.number, piece

    def _before(self, index: int) -> str:
        """Return the prompt of a completion that was asked to be said again."""
        if not self.asked.echo:
            return ""
        prompt = self.asked.prompts[index // self.asked.n]
        return prompt if isinstance(prompt, str) else self.answer.tokenizer.decode(prompt, skip_special_tokens=False)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        choices: list[list[Piece]] = [[] for request in self.requests for _ in range(request.n)]
        try:
            async for index, piece in self._pieces():
                choices[index].append(piece)
        except Refusal as error:
            response = refused(error)
        else:
            before = [self._before(index) for index in range(len(choices))]
            response = JSONResponse(self.answer.body(choices, before, self.prompt_tokens))
        async with asyncio.timeout(SEND_SECONDS):
            await response(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the pieces as server-sent events; what is wrong before the first of them, as a plain error."""
        out, used = _Stream(send), dict[int, int]()
        try:
            async for index, piece in self._pieces():
                if index not in used and self.asked.chat:
                    await out.data(self.answer.first(index))
                before = "" if index in used else self._before(index)
                await out.data(self.answer.chunk(index, piece, before))
                used[index] = piece.used
        except Refusal as error:
            if out.begun:
                await out.data(error.body)
                await out.end()
            else:
                await refused(error)(scope, receive, send)
            return
        if self.asked.usage:
            await out.data(self.answer.usage_chunk(self.prompt_tokens, sum(used.values())))
        await out.text("[DONE]")
        await out.end()


class _Stream:
    """Send server-sent events. TimeoutError where nobody reads them."""

    def __init__(self, send: Send) -> None:
        self._send, self.begun = send, False

    async def data(self, value: dict[str, Any]) -> None:
        await self.text(json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")))

    async def text(self, text: str) -> None:
        if not self.begun:
            self.begun = True
            names = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}
            headers = [(name.encode(), value.encode()) for name, value in names.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._body(f"data: {text}\n\n".encode(), more=True)

    async def end(self) -> None:
        await self._body(b"", more=False)

    async def _body(self, data: bytes, more: bool) -> None:
        message = {"type": "http.response.body", "body": data, "more_body": more}
        async with asyncio.timeout(SEND_SECONDS):  # `wait_for` of Python 3.11 may lose a cancellation
            await self._send(message)


async def _gone(receive: Receive) -> None:
    """Return when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass
