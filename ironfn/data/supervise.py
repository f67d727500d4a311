"""Turn examples into ids, and say of each id whether it is a target to learn."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ironfn.data.chat import Chat
from ironfn.data.conversation import Example, Fault
from ironfn.data.tokenizer import Piece, Vocabulary, encode_around, encode_pieces
from ironfn.data.turns import Rewritten, Script, TrainOn, scripts


@frozen(eq=False)
class Teaching:
    """Say how examples are written for a model.

    chat: how conversations are; None where the model has no template. begin: the ids before a text that is no
    conversation; after it comes ``end``. train_on: all answers of a conversation, or the last one. rewritten: see
    `turns.scripts`.
    """

    vocabulary: Vocabulary
    chat: Chat | None = None
    begin: tuple[int, ...] = ()
    train_on: TrainOn = "all"
    rewritten: Rewritten = "split"

    @property
    def end(self) -> int:
        """The id that ends a text, at which a model stops: the template's, or the one that ends a document."""
        return self.vocabulary.eos if self.chat is None else self.chat.end


@frozen(eq=False)
class Supervised:
    """Hold a text. ids: int64 [tokens]. trained: bool [tokens], the ids that are targets; of a text none is its first.

    The last id is trained, or there is none: what comes after the last target would be computed for nothing.
    """

    ids: NDArray[np.int64]
    trained: NDArray[np.bool_]


@frozen(eq=False)
class Draft:
    """Hold a text that is not encoded. parts: pieces or ids, whether they are trained, whether a control token in
    them is the last that is.
    """

    place: str
    parts: list[tuple[Sequence[Piece] | Sequence[int], bool, bool]]

    @property
    def characters(self) -> int:
        """Count the characters that are to be encoded."""
        return sum(len(piece.text) for part, _, _ in self.parts for piece in part if isinstance(piece, Piece))


def begin_of(vocabulary: Vocabulary) -> tuple[int, ...]:
    """Return the ids that a tokenizer itself puts before a text."""
    plain = vocabulary.tokenizer.encode("a", add_special_tokens=False).ids
    whole = vocabulary.tokenizer.encode("a").ids
    before = len(whole) - len(plain)
    return tuple(next((whole[:k] for k in range(before + 1) if whole[k : k + len(plain)] == plain), ()))


def supervised(example: Example, teaching: Teaching) -> list[Supervised]:
    """Return the texts that an example becomes: one, or several where its template rewrites earlier messages.

    Prompt and completion are encoded apart, as they are when the model is asked; both and ``text`` begin with
    ``teaching.begin``, and ``teaching.end`` is trained after them. In conversations all control tokens are the
    template's, but for an end after an answer that nothing else closes. What people wrote never becomes a control
    token. `Fault` where the example cannot be written so; a text of which nothing is trained is empty.
    """
    texts = encode_drafts(drafts(example, teaching), teaching)
    for text in texts:
        if isinstance(text, Fault):
            raise text
    return [text for text in texts if isinstance(text, Supervised)]


def drafts(example: Example, teaching: Teaching) -> list[Draft]:
    """Return what `supervised` has to encode, so that many examples can be encoded at once."""
    vocabulary = teaching.vocabulary
    if example.kind == "ids":
        return [_of_ids(example, vocabulary)]
    if not example.messages:
        prompt = Piece(example.prompt, vocabulary.tokenizer, begins=True)
        answer = Piece(example.completion, vocabulary.tokenizer, begins=not example.prompt)
        parts = [(teaching.begin, False, False), ([prompt], False, False), ([answer], True, False)]
        return [Draft(example.place, [*parts, ((teaching.end,), True, False)])]
    if teaching.chat is None:
        raise Fault(
            example.place, "no template", "a conversation needs a chat template, and the model has none; name one"
        )
    found = scripts(example, teaching.chat, teaching.train_on, teaching.rewritten)
    return [_of_script(script, teaching.chat, example.place) for script in found]


def _of_ids(example: Example, vocabulary: Vocabulary) -> Draft:
    ids, trained = np.array(example.ids), np.array(example.trained)
    if ids.max() >= vocabulary.size:
        what = f"input_ids holds {ids.max()}, and the vocabulary ends at {vocabulary.size - 1}"
        raise Fault(example.place, "input_ids", f"{what}; encode the text with this model's tokenizer")
    edges = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(ids)]
    return Draft(example.place, [(ids[a:b].tolist(), bool(trained[a]), False) for a, b in itertools.pairwise(edges)])


def _of_script(script: Script, chat: Chat, place: str) -> Draft:
    parts: list[tuple[Sequence[Piece] | Sequence[int], bool, bool]] = []
    for stretch in script.stretches:
        pieces = chat.pieces(stretch.text, script.marks, begins=not parts)
        parts.append((pieces, stretch.trained, stretch.closes))
    if script.open:
        parts.append(((chat.end,), True, False))
    return Draft(place, parts)


def encode_drafts(texts: Sequence[Draft], teaching: Teaching) -> list[Supervised | Fault]:
    """Encode many texts at once, by all cores; a `Fault` in place of one that the tokenizer cannot write."""
    pieces = [piece for text in texts for part, _, _ in text.parts for piece in part if isinstance(piece, Piece)]
    try:
        encoded = iter(_encoded(pieces, teaching.vocabulary))
        return [_joined(text, encoded, teaching) for text in texts]
    except ValueError as error:
        if len(texts) == 1:
            return [Fault(texts[0].place, "control token", str(error))]
        return [each for text in texts for each in encode_drafts([text], teaching)]


def _encoded(pieces: Sequence[Piece], vocabulary: Vocabulary) -> list[NDArray[np.int64]]:
    """Return the ids of each piece; what people wrote becomes no control token. Looked for in all of them at once."""
    found = encode_pieces(pieces, joins=vocabulary.joins)
    ends = list(itertools.accumulate(map(len, found)))
    flat = np.fromiter(itertools.chain.from_iterable(found), np.int64, ends[-1] if ends else 0)
    parts = [flat[end - len(ids) : end] for ids, end in zip(found, ends, strict=True)]
    controls = np.flatnonzero(np.isin(flat, list(vocabulary.controls)))
    for number in np.unique(np.searchsorted(ends, controls, "right")).tolist():
        if pieces[number].tokenizer is vocabulary.tokenizer:
            parts[number] = np.array(encode_around(vocabulary, pieces[number].text), np.int64)
    return parts


def _joined(text: Draft, encoded: Iterator[NDArray[np.int64]], teaching: Teaching) -> Supervised:
    parts: list[NDArray[np.int64] | list[int]] = []
    marks: list[tuple[int, bool]] = []  # where a stretch ends, and whether it is trained
    at = 0
    for part, learn, closes in text.parts:
        here = [[piece] if isinstance(piece, int) else next(encoded) for piece in part]
        parts += here
        start, at = at, at + sum(map(len, here))
        if closes and teaching.chat is not None:
            ids = [i for each in here for i in each]
            names = [place for place, i in enumerate(ids) if i in teaching.chat.controls]
            marks.append((start + names[-1] + 1 if names else at, learn))
            learn = False
        marks.append((at, learn))
    trained, start = np.zeros(at, bool), 0
    for stop, learn in marks:
        trained[start:stop] = learn
        start = stop
    trained[:1] = False
    last = np.flatnonzero(trained)[-1:]
    end = int(last[0]) + 1 if len(last) else 0
    ids = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    return Supervised(ids[:end].astype(np.int64, copy=False), trained[:end])
