"""Cut texts into what a model reads and what it is asked for, at the same tokens as `lm-eval`.

The rules are those of EleutherAI/lm-evaluation-harness 0.4 (`lm_eval/api/model.py`, `lm_eval/utils.py`), so that
scores compare with published ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from attrs import frozen

Encode = Callable[[str, bool], list[int]]
"""(text, with what the tokenizer puts around a text) -> ids."""


@frozen
class Text:
    """Ask for the last ``scored`` of ``ids``, each given those before it. The last id is never read by the model."""

    ids: tuple[int, ...]
    scored: int


Score = Callable[[Sequence[Sequence[Text]]], Iterable[list[float]]]
"""Groups of texts -> for each group, what the scored ids of each text sum up to in nats; see `likelihood`."""


@frozen(eq=False)
class Subject:
    """Say what is measured: how it scores and encodes, the id that stands before a text, the ids that it reads."""

    score: Score
    encode: Encode
    begin: int
    context: int


def continued(encode: Encode, context: str, continuation: str, begin: int) -> Text:
    """Return the text that asks for a continuation of a context.

    Both are encoded together and cut where the tokens of the context end; the white space at the end of the context
    belongs to the continuation, as it does to the next word's token. After an empty context comes the id ``begin``.
    ``scored`` is 0 where the context's tokens reach to the end.
    """
    bare = context.rstrip()
    if not bare:
        ids = encode(context + continuation, False)
        # A text that begins with the id itself is not given it twice.
        return Text(tuple(ids), len(ids) - 1) if ids[:1] == [begin] else Text((begin, *ids), len(ids))
    whole, before = encode(context + continuation, True), encode(bare, True)
    return Text((*before, *whole[len(before) :]), max(0, len(whole) - len(before)))


def cut(text: Text, context: int) -> Text:
    """Return the end of a text, so that the model reads ``context`` tokens at most.

    >>> cut(Text((1, 2, 3, 4, 5), 2), 3)
    Text(ids=(2, 3, 4, 5), scored=2)
    """
    return Text(text.ids[-(context + 1) :], text.scored)


def windows(ids: Sequence[int], begin: int, length: int, least: int) -> list[Text]:
    """Cut a document of any length so that each id is asked for once.

    A window reads ``length`` ids. The first is asked for all of its ids, after ``begin``; the others for the ids that
    come after at least ``least`` others in their window (but for the last window, which has more to read).
    ValueError unless 1 <= least <= length.

    >>> [(w.ids, w.scored) for w in windows([1, 2, 3, 4, 5, 6], 0, length=4, least=2)]
    [((0, 1, 2, 3, 4), 4), ((2, 3, 4, 5, 6), 2)]
    """
    if not 1 <= least <= length:
        raise ValueError(f"{least} tokens of context do not fit a window of {length}; choose 1 to {length}")
    found: list[Text] = []
    all_ids, end = [begin, *ids], 0
    while end < len(ids):
        new = min(length if end == 0 else length - least + 1, len(ids) - end)
        end += new
        found.append(Text(tuple(all_ids[max(0, end - length) : end + 1]), new))
    return found
