"""Turn examples into ids, and say of each id whether it is a target to learn."""

from __future__ import annotations

import itertools
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from ironfn.data.chat import Chat
from ironfn.data.conversation import Example, Fault
from ironfn.data.encoding import Pieces, encoded
from ironfn.data.tokenizer import Vocabulary, encode_around, pieces
from ironfn.data.turns import Rewritten, Script, TrainOn, scripts


@frozen(eq=False)
class Teaching:
    """Say how examples are written for a model.

    chat: how conversations are; None where the model has no template. begin: the ids before a text that is no
    conversation; after it comes ``end``. train_on: all answers of a conversation, or the last one. rewritten: see
    `turns.scripts`. stops: the ids that end what the model writes, as the files say that it came with.
    """

    vocabulary: Vocabulary
    chat: Chat | None = None
    begin: tuple[int, ...] = ()
    train_on: TrainOn = "all"
    rewritten: Rewritten = "split"
    stops: frozenset[int] = frozenset()

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


@define
class Drafts:
    """Hold texts that are to be encoded together, cut into parts; a list for all that is known of them, as in `Pieces`.

    given: of each part its ids, or None where it is the next piece. trained: whether it is. places, ends: of each text,
    where it is from and how many parts there are up to its end. closing: which parts, from the one to before the other,
    are trained up to the last control token in them. characters: of all texts, or ids where they are given.
    """

    pieces: Pieces = field(factory=Pieces)
    given: list[Sequence[int] | None] = field(factory=list)
    trained: list[bool] = field(factory=list)
    places: list[str] = field(factory=list)
    ends: list[int] = field(factory=list)
    closing: list[tuple[int, int]] = field(factory=list)
    characters: int = 0

    def put(self, ids: Sequence[int], trained: bool) -> None:
        """Add a part that is encoded."""
        self.given.append(ids)
        self.trained.append(trained)

    def write(self, text: str, vocabulary: Vocabulary, begins: bool, trained: bool) -> None:
        """Add what people wrote. begins: whether it is the beginning of a text."""
        for piece in pieces(text, vocabulary):
            self.pieces.add(piece, vocabulary.tokenizer, begins)
            self.await_pieces(1, trained)
            begins = False
        self.characters += len(text)

    def await_pieces(self, count: int, trained: bool) -> None:
        """Add as many parts as pieces were added."""
        self.given += [None] * count
        self.trained += [trained] * count

    def close(self, place: str) -> None:
        """End a text."""
        self.places.append(place)
        self.ends.append(len(self.given))


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
    drafts = Drafts()
    draft(example, teaching, drafts)
    texts = encode_drafts(drafts, teaching)
    for text in texts:
        if isinstance(text, Fault):
            raise text
    return [text for text in texts if isinstance(text, Supervised)]


def draft(example: Example, teaching: Teaching, drafts: Drafts) -> int:
    """Add what `supervised` has to encode, so that many examples are encoded at once; return how many texts it is.

    `Fault`, before anything is added, where the example cannot be written.
    """
    vocabulary, place = teaching.vocabulary, example.place
    if example.kind == "ids":
        _of_ids(example, vocabulary, drafts)
        return 1
    if not example.messages:
        drafts.put(teaching.begin, False)
        drafts.write(example.prompt, vocabulary, True, False)
        drafts.write(example.completion, vocabulary, not example.prompt, True)
        drafts.put((teaching.end,), True)
        drafts.close(place)
        return 1
    if teaching.chat is None:
        raise Fault(place, "no template", "a conversation needs a chat template, and the model has none; name one")
    found = scripts(example, teaching.chat, teaching.train_on, teaching.rewritten)
    for script in found:
        _of_script(script, teaching.chat, drafts)
        drafts.close(place)
    return len(found)


def _of_ids(example: Example, vocabulary: Vocabulary, drafts: Drafts) -> None:
    ids, trained = np.array(example.ids), np.array(example.trained)
    if ids.max() >= vocabulary.size:
        what = f"input_ids holds {ids.max()}, and the vocabulary ends at {vocabulary.size - 1}"
        raise Fault(example.place, "input_ids", f"{what}; encode the text with this model's tokenizer")
    edges = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(ids)]
    for a, b in itertools.pairwise(edges):
        drafts.put(ids[a:b].tolist(), bool(trained[a]))
    drafts.characters += len(ids)
    drafts.close(example.place)


def _of_script(script: Script, chat: Chat, drafts: Drafts) -> None:
    begins = True
    for stretch in script.stretches:
        first = len(drafts.given)
        drafts.await_pieces(chat.cut(stretch.text, script.marks, drafts.pieces, begins=begins), stretch.trained)
        drafts.characters += len(stretch.text)
        if stretch.closes:
            drafts.closing.append((first, len(drafts.given)))
        begins = False
    if script.open:
        drafts.put((chat.end,), True)


def encode_drafts(drafts: Drafts, teaching: Teaching) -> list[Supervised | Fault]:
    """Encode texts at once, by all cores; a `Fault` in place of one that the tokenizer cannot write."""
    ids, bounds, wrong = _encoded(drafts, teaching.vocabulary)
    trained = np.repeat(np.array(drafts.trained, bool), np.diff(bounds))
    for first, last in drafts.closing:
        start, stop = bounds[first], bounds[last]
        controls = () if teaching.chat is None else teaching.chat.controls
        names = [place for place, i in enumerate(ids[start:stop].tolist()) if i in controls]
        trained[start + names[-1] + 1 if names else stop : stop] = False
    stops = bounds[np.array(drafts.ends, np.int64)]
    starts = np.concatenate(([0], stops))[:-1]
    trained[starts[starts < stops]] = False
    targets = np.flatnonzero(trained)
    last_ends = np.concatenate(([0], targets + 1))[np.searchsorted(targets, stops)]
    ends = np.maximum(starts, last_ends)  # before a text without a target stands another's last
    texts: list[Supervised | Fault] = [
        Supervised(ids[a:b], trained[a:b]) for a, b in zip(starts.tolist(), ends.tolist(), strict=True)
    ]
    for part, what in wrong.items():
        number = bisect_right(drafts.ends, part)
        texts[number] = Fault(drafts.places[number], "control token", what)
    return texts


def _encoded(drafts: Drafts, vocabulary: Vocabulary) -> tuple[NDArray[np.int64], NDArray[np.int64], dict[int, str]]:
    """Return the ids of all parts, where in them each begins and the last one ends, and what is wrong with a part."""
    flat, ends = array("I"), [0]
    found = encoded(drafts.pieces, joins=vocabulary.joins)
    for part in drafts.given:
        if part is None:
            flat.fromlist(next(found))
        else:
            flat.extend(part)
        ends.append(len(flat))
    ids, bounds = np.array(flat, np.int64), np.array(ends)
    part_of = [number for number, part in enumerate(drafts.given) if part is None]
    unwritten = {
        part_of[number]: drafts.pieces.unwritten(number)
        for number, never in drafts.pieces.never.items()
        if never in ids[bounds[part_of[number]] : bounds[part_of[number] + 1]]
    }
    return *_without_controls(drafts, vocabulary, ids, bounds, part_of, unwritten), unwritten


def _without_controls(
    drafts: Drafts,
    vocabulary: Vocabulary,
    ids: NDArray[np.int64],
    bounds: NDArray[np.int64],
    part_of: Sequence[int],
    wrong: dict[int, str],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Encode anew what people wrote and the tokenizer took for a control token. Looked for in all of it at once.

    part_of: the part that each piece is. wrong: takes up what cannot be written otherwise.
    """
    is_control = np.zeros(vocabulary.size, bool)
    is_control[list(vocabulary.controls)] = True
    own = np.zeros(len(drafts.given), bool)
    own[part_of] = [each is vocabulary.tokenizer for each in drafts.pieces.tokenizers]
    found = np.unique(np.searchsorted(bounds, np.flatnonzero(is_control[ids]), "right") - 1)
    if not len(found := found[own[found]]):
        return ids, bounds
    parts = np.split(ids, bounds[1:-1])
    for part in found.tolist():
        text = drafts.pieces.texts[bisect_left(part_of, part)]
        try:
            parts[part] = np.array(encode_around(vocabulary, text), np.int64)
        except ValueError as error:
            wrong.setdefault(part, str(error))
    return np.concatenate(parts), np.cumsum([0, *map(len, parts)])
