"""Examine files of examples as a fine-tuning service would, with a model's tokenizer or without any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from attrs import define, field, frozen

from ironfn.data.conversation import Fault
from ironfn.data.examples import Item, digest, examples, taught
from ironfn.data.packing import pack
from ironfn.data.preferences import FORMS as PREFERRED_FORMS
from ironfn.data.preferences import Preference, parse_any
from ironfn.data.readers import Blank
from ironfn.data.supervise import Supervised, Teaching

PREFERRED = frozenset(form for form, _ in PREFERRED_FORMS)
PLACES = 5
"""How many places are told of each kind of fault."""


@define
class Kept:
    """Count what is alike, and keep where the first of it are."""

    count: int = 0
    first: list[str] = field(factory=list)

    def add(self, place: str) -> None:
        self.count += 1
        if self.count <= PLACES:
            self.first.append(place)


@define
class Findings:
    """Say what files hold.

    forms: examples and preferences of each form. faults: rows that cannot be used, by kind, with what is said of the
    first ones. duplicates: examples that repeat an earlier one. untaught: those of which nothing would be trained.
    messages: how many conversations have so many messages. sizes: of each text, as tokens where a tokenizer was given
    and characters where not. trained: the tokens of them that are targets. texts: for packing, the positions that each
    takes.
    """

    forms: Counter[str] = field(factory=Counter)
    faults: dict[str, Kept] = field(factory=dict)
    duplicates: Kept = field(factory=Kept)
    untaught: Kept = field(factory=Kept)
    messages: Counter[int] = field(factory=Counter)
    sizes: list[int] = field(factory=list)
    trained: int = 0
    blank: int = 0
    over: Kept = field(factory=Kept)
    cut_away: Kept = field(factory=Kept)
    texts: list[int] = field(factory=list)

    @property
    def examples(self) -> int:
        """Count the examples that can be used."""
        return sum(self.forms.values())

    @property
    def mixed(self) -> bool:
        """Tell whether there are examples and preferences, or preferences of two kinds, which no run takes together."""
        kinds = {form if form == "judged" else "pair" if form in PREFERRED else "example" for form in self.forms}
        return len(kinds) > 1

    @property
    def faulty(self) -> int:
        """Count the rows that cannot."""
        return sum(kept.count for kept in self.faults.values())


def check(
    paths: Iterable[Path], fields: Mapping[str, str], teaching: Teaching | None = None, length: int | None = None
) -> Findings:
    """Read files of examples whole and say what is in them and what is wrong with it.

    teaching: how a model would be taught them; without it sizes are characters. length: tokens a row of training, with
    ``teaching`` only: longer texts are counted, and packed as if they were cut there.
    """
    found, seen = Findings(), set[bytes]()

    def read() -> Iterator[Item | Fault]:
        for path in paths:
            for item in examples(path, fields, parse_any):
                if isinstance(item, Blank):
                    found.blank += 1
                else:
                    yield item

    items = read() if teaching is None else taught(read(), teaching)
    for item in items:
        if isinstance(item, Fault):
            found.faults.setdefault(item.kind, Kept()).add(str(item))
            continue
        example, texts = item if isinstance(item, tuple) else (item, None)
        found.forms[example.kind] += 1
        first = example.chosen if isinstance(example, Preference) else example
        if first.messages:
            found.messages[len(first.messages)] += 1
        code = digest(example)
        if code in seen:
            found.duplicates.add(example.place)
        seen.add(code)
        if texts is None:
            found.sizes.append(_characters(example))
        else:
            _measure(found, example, texts, length)
    return found


def _characters(example: Item) -> int:
    if isinstance(example, Preference):
        return sum(map(_characters, example.examples))
    return (
        len(example.prompt)
        + len(example.completion)
        + sum(len(str(message.get("content", ""))) for message in example.messages)
        + len(example.ids)
    )


def _measure(found: Findings, example: Item, texts: Sequence[Supervised], length: int | None) -> None:
    if isinstance(example, Preference):
        _measure_preference(found, example, texts, length)
        return
    texts = [text for text in texts if len(text.ids)]
    if not texts:
        found.untaught.add(example.place)
    for text in texts:
        found.sizes.append(len(text.ids))
        found.trained += int(text.trained.sum())
        positions = len(text.ids) - 1
        if length is not None and positions > length:
            found.over.add(f"{example.place}: {len(text.ids)} tokens")
            if not text.trained[: length + 1].any():
                found.cut_away.add(example.place)
                continue
            positions = length
        found.texts.append(positions)


def _measure_preference(found: Findings, item: Preference, texts: Sequence[Supervised], length: int | None) -> None:
    """Count a prompt once and the completions after it: what `pairs` lays into a row."""
    asked = [text.trained[1:] for text in texts]
    prompt = int(asked[0].argmax()) + 1
    places = prompt - 1 + sum(len(text.ids) - prompt for text in texts)
    found.sizes.append(places + 1)
    found.trained += sum(map(int, map(np.sum, asked)))
    if length is not None and places > length:
        found.over.add(f"{item.place}: {places} places")
        places = length
    found.texts.append(places)


@frozen
class Plan:
    """Suggest how long to train. rows: of an epoch, packed. efficiency: the share of their places that hold a token."""

    epochs: int
    rows: int
    steps: int
    efficiency: float | None


def suggest(found: Findings, batch: int, length: int | None) -> Plan:
    """Suggest epochs and steps of ``batch`` rows: 3 epochs, more where they would show fewer than 100 examples, fewer
    where more than 25,000 (OpenAI cookbook, "Data preparation and analysis for chat model fine-tuning").

    Without a length every example is a row.
    """
    count = max(found.examples, 1)
    epochs = 3
    if count * epochs < 100:
        epochs = min(25, 100 // count)
    elif count * epochs > 25_000:
        epochs = max(1, 25_000 // count)
    if length is None or not found.texts:
        return Plan(epochs, count, -(-count * epochs // batch), None)
    packs = pack(np.array(found.texts), length)
    return Plan(epochs, packs.rows, -(-packs.rows * epochs // batch), packs.efficiency)
