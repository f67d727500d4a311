"""Encode pieces of texts as they stand there, many at once and each by its own tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import define, field
from tokenizers import Tokenizer

_NEWLINE = "\n"


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
    """Yield the ids of each piece, as it stands in its text; all are encoded before, by all cores.

    joins: as `Vocabulary` has it; where not, what does not begin its text is encoded behind a line end, and without it.
    """
    found: list[Any] = [None] * len(pieces.texts)
    after = [not (joins or begins) for begins in pieces.begins]
    lines: dict[int, list[int]] = {}
    for tokenizer in {id(each): each for each in pieces.tokenizers}.values():
        mine = [number for number, each in enumerate(pieces.tokenizers) if each is tokenizer]
        texts = [_NEWLINE * after[number] + pieces.texts[number] for number in mine]
        for number, encoding in zip(mine, tokenizer.encode_batch_fast(texts, add_special_tokens=False), strict=True):
            found[number] = encoding
        lines[id(tokenizer)] = tokenizer.encode(_NEWLINE, add_special_tokens=False).ids
    for number, encoding in enumerate(found):
        ids: list[int] = encoding.ids
        if after[number]:
            tokenizer = pieces.tokenizers[number]
            line = lines[id(tokenizer)]
            if line and ids[: len(line)] == line:
                ids = ids[len(line) :]
            else:
                ids = tokenizer.encode(pieces.texts[number], add_special_tokens=False).ids
        yield ids
