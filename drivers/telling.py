"""Turn what an engine tells of many continuations into their texts, and say which of them a stop string has ended."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Literal

from attrs import field, frozen

from ironfn.generate.engine import End, Event, Request, Token
from ironfn.generate.text import Tail, Words, last, tell

FinishReason = Literal["stop", "length"]
Name = tuple[Hashable, int]
"""A continuation: its request's key, and its number."""


@frozen
class Piece:
    """Tell what is certain of a continuation since the piece before.

    tokens: those that its text is made of, and, at the end, those that show nothing. used: how many tokens it has taken
    so far. finish: why it is complete, if it is: a stop id or a stop string, or no room for more.
    """

    key: Hashable
    number: int
    text: str
    tokens: tuple[Token, ...]
    used: int
    finish: FinishReason | None = None


@frozen(eq=False)
class _Told:
    """Hold a continuation whose text is being told. held: tokens whose text is not certain yet."""

    words: Words
    silent: frozenset[int]
    tail: Tail = field(factory=Tail)
    held: tuple[Token, ...] = ()
    used: int = 0


class Teller:
    """Follow continuations from their first token to their end. It forgets those that are complete."""

    def __init__(self) -> None:
        self._told: dict[Name, _Told] = {}

    def expect(self, request: Request, words: Words) -> None:
        """Await the continuations of a request; the ids that end them are not part of their texts."""
        for number in range(request.n):
            self._told[request.key, number] = _Told(words, request.stop)

    def forget(self, key: Hashable) -> None:
        """Await nothing more of a request."""
        for name in [name for name in self._told if name[0] == key]:
            del self._told[name]

    def hear(self, events: Iterable[Event]) -> tuple[list[Piece], list[Name]]:
        """Return what the events tell, and the continuations that the engine need not go on with."""
        pieces: list[Piece] = []
        enough: list[Name] = []
        for event in events:
            name = (event.key, event.number)
            if name not in self._told:  # a stop string ended it
                continue
            piece, told = _heard(self._told[name], event)
            if piece is not None:
                pieces.append(piece)
            if told is not None:
                self._told[name] = told
                continue
            del self._told[name]
            if isinstance(event, Token):
                enough.append(name)
        return pieces, enough


def _heard(told: _Told, event: Event) -> tuple[Piece | None, _Told | None]:
    """Return the piece that an event brings, if any, and what to await after it, if anything."""
    if isinstance(event, End):
        tail, text = last(told.words, told.tail)
        kept = told.held if tail.stop is None else _spelling(told, text)
        finish: FinishReason = "stop" if event.reason == "stop" or tail.stop is not None else "length"
        return Piece(event.key, event.number, text, kept, told.used, finish), None
    used = told.used + 1
    if event.id in told.silent:
        return None, _Told(told.words, told.silent, told.tail, told.held, used)
    tail, text = tell(told.words, told.tail, event.id)
    held = (*told.held, event)
    if tail.stop is not None:
        kept = _spelling(_Told(told.words, told.silent, held=held), text)
        return Piece(event.key, event.number, text, kept, used, "stop"), None
    if not text:
        return None, _Told(told.words, told.silent, tail, held, used)
    return Piece(event.key, event.number, text, held, used), _Told(told.words, told.silent, tail, (), used)


def _spelling(told: _Told, text: str) -> tuple[Token, ...]:
    """Return the first of the held tokens that spell out ``text``, which a stop string has cut."""
    kept: list[Token] = []
    for token in told.held:
        if len(told.words.tokenizer.decode([each.id for each in kept])) >= len(text):
            break
        kept.append(token)
    return tuple(kept)
