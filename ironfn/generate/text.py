"""Turn ids into text as they come: no half character is shown, nor anything of a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attrs import evolve, field, frozen
from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"  # what the library writes for bytes that are no character, or not yet


@frozen(eq=False)
class Words:
    """Say how ids become text. ValueError for a stop string that is empty.

    stops: strings that end the text, which goes as far as the one that is complete first begins. control_tokens:
    whether these are shown by their names; what is not shown cannot stop a text either.
    """

    tokenizer: Tokenizer
    stops: tuple[str, ...] = ()
    control_tokens: bool = False

    def __attrs_post_init__(self) -> None:
        if not all(self.stops):
            raise ValueError("a stop string is empty, which would end every text before it begins; leave it out")


@frozen
class Tail:
    """Hold the end of a text that is being told: all that the next id needs to know of those before.

    context: the ids of the piece before, so that a tokenizer which treats a text's first token otherwise sees no new
    beginning. held: the ids since, whose text is not whole. waiting: text that may begin a stop string. stop: the one
    that has ended the text.
    """

    context: tuple[int, ...] = field(default=(), repr=False)
    held: tuple[int, ...] = ()
    waiting: str = ""
    stop: str | None = None


def tell(words: Words, tail: Tail, token: int) -> tuple[Tail, str]:
    """Add a token's id. Return the new tail, and the text that is now certain; none after a stop string.

    The pieces and ``last`` joined are what decoding all ids at once gives, cut at the stop string, wherever the tokens
    part. (One exception: a byte that is no UTF-8 makes a tokenizer with `byte_fallback` give up all bytes beside it;
    characters that were whole when they came are not taken back.)
    """
    if tail.stop is not None:
        return tail, ""
    held = (*tail.held, token)
    piece = _text(words, tail.context, held)
    if not piece or piece.endswith(_REPLACEMENT):
        return evolve(tail, held=held), ""
    return _without_stop(words, evolve(tail, context=held, held=()), piece)


def last(words: Words, tail: Tail) -> tuple[Tail, str]:
    """End a text. Return the tail, which knows whether a stop string came after all, and the text that was held back.

    Characters that never became whole come out as the full decoding shows them.
    """
    if tail.stop is not None:
        return tail, ""
    tail, piece = _without_stop(words, evolve(tail, held=()), _text(words, tail.context, tail.held))
    return evolve(tail, waiting=""), piece + tail.waiting


def pieces(words: Words, ids: Iterable[int]) -> Iterator[str]:
    """Yield the text of ids piece by piece, up to a stop string, and take no more ids than it needs."""
    tail = Tail()
    for token in ids:
        tail, piece = tell(words, tail, token)
        if piece:
            yield piece
        if tail.stop is not None:
            return
    if piece := last(words, tail)[1]:
        yield piece


def _text(words: Words, context: tuple[int, ...], held: tuple[int, ...]) -> str:
    skip, tokenizer = not words.control_tokens, words.tokenizer
    before = tokenizer.decode(context, skip_special_tokens=skip)
    return tokenizer.decode(context + held, skip_special_tokens=skip)[len(before) :]


def _without_stop(words: Words, tail: Tail, piece: str) -> tuple[Tail, str]:
    """Let through what of ``waiting`` and ``piece`` is no stop string and cannot begin one."""
    text = tail.waiting + piece
    found = [(text.index(stop) + len(stop), -len(stop), stop) for stop in words.stops if stop in text]
    if found:  # the first to be complete, of those that end together the longest: whatever came with which token
        end, _, stop = min(found)
        return evolve(tail, waiting="", stop=stop), text[: end - len(stop)]
    begun = max((_begun(text, stop) for stop in words.stops), default=0)
    return evolve(tail, waiting=text[len(text) - begun :]), text[: len(text) - begun]


def _begun(text: str, stop: str) -> int:
    """Return how many characters at the end of ``text`` are the beginning of ``stop``."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
