"""Turn a stream of ids into text as it comes, without half characters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"  # what the library writes for bytes that are no character, or not yet


def stream(tokenizer: Tokenizer, ids: Iterable[int], *, skip_special_tokens: bool = False) -> Iterator[str]:
    """Yield the text of ``ids`` piece by piece; joined, the pieces are what decoding all of them at once gives.

    A character whose bytes lie in several tokens is held back until it is whole; what never becomes whole is yielded
    at the end as the full decoding shows it. Each decoding starts from the tokens of the piece before, so that a
    tokenizer which treats the first token otherwise than the rest sees no new beginning.
    """
    context: list[int] = []
    held: list[int] = []

    def text() -> str:
        before = tokenizer.decode(context, skip_special_tokens=skip_special_tokens)
        return tokenizer.decode(context + held, skip_special_tokens=skip_special_tokens)[len(before) :]

    for number in ids:
        held.append(number)
        piece = text()
        if piece and not piece.endswith(_REPLACEMENT):
            yield piece
            context, held = held, []
    if held and (rest := text()):
        yield rest
