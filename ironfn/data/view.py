"""Say what stands in a row, for a person to read: which text is trained, masked or padding, and where it parts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Literal, TypeAlias

from attrs import frozen

from ironfn.data.tokenizer import Vocabulary
from ironfn.types import Batch

Kind: TypeAlias = Literal["trained", "masked", "control", "document", "padding"]
Part: TypeAlias = Literal["", "prefix", "middle", "suffix"]


@frozen
class Span:
    """Hold a stretch of a row.

    kind: ``trained`` and ``masked`` text; a ``control`` token by its name (masked: within brackets of its own); where a
    ``document`` begins or goes on; ``padding``. part: the FIM part that the text is, if its sentinel is in the row.
    tokens: how many.
    """

    kind: Kind
    text: str
    part: Part
    tokens: int


def spans(
    batch: Batch, row: int, vocabulary: Vocabulary, *, packed: bool = False, scored: bool = False
) -> Iterator[Span]:
    """Yield the targets of a row as stretches of one kind, in order.

    packed: the row holds supervised texts, each of which has before its targets a first id that is none; or pairs, of
    which the prompt comes once and both completions after it. scored: whether these are scored as a whole.

    A batch without segments attends to whole rows: no document is named, its end token still shows.
    """
    targets: list[int] = batch["targets"][row].tolist()
    weights: list[float] = batch["weight"][row].tolist()
    segments: list[int] = batch["segment"][row].tolist() if "segment" in batch else [0] * len(targets)
    if "until" in batch:
        yield from _pairs(batch, row, vocabulary, scored)
        return
    at = 0
    for segment, group in groupby(segments):
        count = len(list(group))
        if segment == -1:
            yield Span("padding", "", "", count)
        else:
            before = int(batch["tokens"][row, at])
            if "segment" in batch:
                begins = packed or before == vocabulary.eos
                yield Span("document", f"document {segment + 1}" + ("" if begins else ", continued"), "", 0)
            ids, shares = targets[at : at + count], weights[at : at + count]
            yield from _document([before, *ids] if packed else ids, [0.0, *shares] if packed else shares, vocabulary)
        at += count


def _pairs(batch: Batch, row: int, vocabulary: Vocabulary, scored: bool) -> Iterator[Span]:
    """Yield what `pairs.cut_pairs` laid into a row; a prompt's last id stands in front of both completions."""
    names = ("tokens", "targets", "weight", "segment", "until")
    tokens, targets, weights, segments, untils = (batch[name][row].tolist() for name in names)
    prompt: list[int] = []
    for (segment, until), group in groupby(range(len(tokens)), lambda at: (segments[at], untils[at])):
        places = list(group)
        here = slice(places[0], places[-1] + 1)
        if segment == -1:
            yield Span("padding", "", "", len(places))
        elif segment < until:
            prompt = tokens[here]
        else:
            pair, side = segment // 2 + 1, segment % 2
            if not side:
                asked = prompt if scored else [*prompt, tokens[places[0]]]
                yield Span("document", f"pair {pair}", "", 0)
                yield from _document(asked, [0.0] * len(asked), vocabulary)
                prompt = []
            title = ("chosen", "rejected")[side]
            if "liked" in batch:
                liked = int(batch["liked"][row, places[0]])
                title = "another text's, to compare with" if side else ("not liked", "liked")[liked]
            yield Span("document", f"pair {pair}, {title}", "", 0)
            yield from _document(targets[here], weights[here], vocabulary)


def _document(targets: list[int], weights: list[float], vocabulary: Vocabulary) -> Iterator[Span]:
    names = _names(vocabulary)
    part: Part = ""

    def kind_of(t: int) -> tuple[bool, int | None]:
        return weights[t] > 0, targets[t] if targets[t] in vocabulary.controls else None

    for (trained, control), group in groupby(range(len(targets)), kind_of):
        places = list(group)
        if control is None:
            ids = targets[places[0] : places[-1] + 1]
            text = vocabulary.tokenizer.decode(ids, skip_special_tokens=False)
            yield Span("trained" if trained else "masked", text, part, len(ids))
            continue
        name, part = names.get(control, (vocabulary.controls[control], part))
        for _ in places:
            yield Span("control", name if trained else f"masked {name}", "", 1)


def _names(vocabulary: Vocabulary) -> dict[int, tuple[str, Part]]:
    """Return the control tokens that mean something here: a name for each, and the part that it opens."""
    names: dict[int, tuple[str, Part]] = {vocabulary.eos: ("end", "")}
    if vocabulary.fim is not None:
        names[vocabulary.fim.prefix] = ("fim prefix", "prefix")
        names[vocabulary.fim.middle] = ("fim middle", "middle")
        names[vocabulary.fim.suffix] = ("fim suffix", "suffix")
    return names
