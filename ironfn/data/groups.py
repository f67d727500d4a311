"""Lay what a policy wrote after its prompts into rows: a prompt once, its completions after it, several prompts a row.

The places are those of `pairs`: a completion begins with the last id of its prompt, which predicts its first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np
from attrs import field, frozen

from ironfn.data.packed import Arrays
from ironfn.data.packing import pack


@frozen(eq=False)
class Completion:
    """Hold a completion's ids, the one that ended it included, and what is to be learned from it.

    told: of each id, by the names of a batch's fields: ``drawn``, the log-probability with which it was drawn;
    ``reference``, another model's. advantage: see `algo.advantage`. experts: int [ids, layers with experts, choices],
    those that computed the id before each id, if they are to compute it again.
    """

    ids: Sequence[int]
    advantage: float
    told: Mapping[str, Sequence[float]] = field(factory=dict)
    experts: np.ndarray | None = None


@frozen(eq=False)
class Group:
    """Hold a prompt's ids, at least one, and the completions that are to be learned from.

    experts: of the prompt's ids but the last, as a completion has them.
    """

    prompt: Sequence[int]
    completions: Sequence[Completion]
    experts: np.ndarray | None = None


def lay_groups(
    groups: Sequence[Group], length: int, end: int, *, rows: int = 1, step: int = 16, share: float | None = None
) -> Arrays:
    """Return rows [n, T] that hold every completion once, its prompt before it; n is a multiple of ``rows``.

    T is ``length``, or what the fullest row needs where that is less, up to a multiple of ``step``: there is no text to
    come that could fill the rest.

    A prompt stands once in front of as many of its completions as fit into a row together, the first of them first;
    such parts are laid by `pack`. Rows that are added to make the number, and what nothing fills, have the segment -1
    and ``end``. Where the groups say which experts computed them, so do the rows. share: what ``share`` says of every
    text; None takes the mean length of a completion. ValueError for a prompt with a completion that no row can hold.
    """
    parts = [part for group in groups for part in _fitting(group, length)]
    sizes = np.array([_places(part) for part in parts], np.int64)
    packs = pack(sizes, length)
    count = -(-max(packs.rows, 1) // rows) * rows
    names = sorted({"drawn"} | {name for group in groups for each in group.completions for name in each.told})
    fullest = max((int(sizes[packs.texts[a:b]].sum()) for a, b in pairwise(packs.offsets.tolist())), default=0)
    shape = (count, min(length, -(-max(fullest, 1) // step) * step))
    done: Arrays = {
        "tokens": np.full(shape, end, np.int64),
        "targets": np.full(shape, end, np.int64),
        "weight": np.zeros(shape, np.float32),
        "position": np.zeros(shape, np.int64),
        "segment": np.full(shape, -1, np.int64),
        "until": np.full(shape, -1, np.int64),
        "advantage": np.zeros(shape, np.float32),
    } | {name: np.zeros(shape, np.float32) for name in names}
    if groups and (experts := groups[0].experts) is not None:
        done["experts"] = np.zeros((*shape, *experts.shape[1:]), experts.dtype)
    texts = [len(each.ids) for part in parts for each in part.completions]
    done["share"] = np.full(shape, sum(texts) / max(len(texts), 1) if share is None else share, np.float32)
    for row in range(packs.rows):
        at = segment = 0
        for number in packs.texts[packs.offsets[row] : packs.offsets[row + 1]].tolist():
            _write(done, row, at, segment, parts[number])
            at += int(sizes[number])
            segment += len(parts[number].completions)
    return done


def _places(group: Group) -> int:
    return len(group.prompt) - 1 + sum(len(each.ids) for each in group.completions)


def _fitting(group: Group, length: int) -> list[Group]:
    """Part a group where its completions do not fit into one row with their prompt."""
    parts: list[list[Completion]] = []
    room = 0
    for each in group.completions:
        if not each.ids:
            continue  # of nothing, nothing is learned
        if len(group.prompt) - 1 + len(each.ids) > length:
            raise ValueError(
                f"a prompt of {len(group.prompt)} tokens and its completion of {len(each.ids)} are longer than a row "
                f"of {length}; make rows longer, or prompts or completions shorter"
            )
        if len(each.ids) > room or not parts:
            parts.append([])
            room = length - (len(group.prompt) - 1)
        parts[-1].append(each)
        room -= len(each.ids)
    return [Group(group.prompt, part, group.experts) for part in parts]


def _write(rows: Arrays, row: int, at: int, segment: int, group: Group) -> None:
    shared = len(group.prompt) - 1
    trunk = np.s_[row, at : at + shared]
    rows["tokens"][trunk] = group.prompt[:shared]
    rows["position"][trunk] = np.arange(shared)
    rows["segment"][trunk], rows["until"][trunk] = segment, segment + len(group.completions) - 1
    if group.experts is not None:
        rows["experts"][trunk] = group.experts
    starts = accumulate((len(each.ids) for each in group.completions), initial=at + shared)
    for number, (each, start) in enumerate(zip(group.completions, starts, strict=False)):
        place = np.s_[row, start : start + len(each.ids)]
        rows["tokens"][place] = [group.prompt[-1], *each.ids[:-1]]
        rows["targets"][place] = each.ids
        rows["weight"][place] = 1.0
        rows["position"][place] = shared + np.arange(len(each.ids))
        rows["segment"][place] = rows["until"][place] = segment + number
        rows["advantage"][place] = each.advantage
        for name, values in each.told.items():
            rows[name][place] = values
        if each.experts is not None:
            rows["experts"][place] = each.experts
