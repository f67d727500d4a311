"""Encode pieces of texts as they stand there, many at once and each by its own tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import define, field
from tokenizers import Tokenizer

_NEWLINE = "\n"
_TOGETHER = 1 << 22
"""The characters that are encoded at once: what the library makes of a text is many times its size."""


@define
class Pieces:
    """Hold pieces that are encoded together, a list for all that is known of them: an object each costs more than to
    read it.

    texts, tokenizers: of each. begins: whether its text begins with it; some tokenizers put a space before what does.
    never: by the number of a piece that is the name of an id, that id, which it must not become.
    """

    texts: list[str] = field(factory=list)
    tokenizers: list[Tokenizer] = field(factory=list)
    begins: list[bool] = field(factory=list)
    never: dict[int, int] = field(factory=dict)

    def add(self, text: str, tokenizer: Tokenizer, begins: bool, never: int | None = None) -> None:
        if never is not None:
            self.never[len(self.texts)] = never
        self.texts.append(text)
        self.tokenizers.append(tokenizer)
        self.begins.append(begins)

    def unwritten(self, number: int) -> str:
        """Say that the tokenizer knows no other way to write a name than as its id."""
        return f"the tokenizer has no way to write {self.texts[number]!r} but as a control token; leave it out"


def encoded(pieces: Pieces, *, joins: bool) -> Iterator[list[int]]:
    """Yield the ids of each piece, as it stands in its text, encoded by all cores, so many at once.

    joins: as `Vocabulary` has it; where not, what does not begin its text is encoded behind a line end, and without it.
    """
    first, size = 0, 0
    for last, text in enumerate(pieces.texts, 1):
        size += len(text)
        if size >= _TOGETHER or last == len(pieces.texts):
            yield from _encoded(pieces, range(first, last), joins)
            first, size = last, 0


def _encoded(pieces: Pieces, numbers: range, joins: bool) -> Iterator[list[int]]:
    found: dict[int, Any] = {}
    after = {number for number in numbers if not (joins or pieces.begins[number])}
    lines: dict[int, list[int]] = {}
    for tokenizer in {id(each): each for each in pieces.tokenizers[numbers.start : numbers.stop]}.values():
        mine = [number for number in numbers if pieces.tokenizers[number] is tokenizer]
        texts = [_NEWLINE * (number in after) + pieces.texts[number] for number in mine]
        found |= zip(mine, tokenizer.encode_batch_fast(texts, add_special_tokens=False), strict=True)
        lines[id(tokenizer)] = tokenizer.encode(_NEWLINE, add_special_tokens=False).ids
    for number in numbers:
        ids: list[int] = found.pop(number).ids
        if number in after:
            tokenizer = pieces.tokenizers[number]
            line = lines[id(tokenizer)]
            if line and ids[: len(line)] == line:
                ids = ids[len(line) :]
            else:
                ids = tokenizer.encode(pieces.texts[number], add_special_tokens=False).ids
        yield ids
