"""Write pairs of completions as rows: with their prompt once, and plainly, each text whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from ironfn.model.arch import Arch
from ironfn.types import Batch

Triple: TypeAlias = "tuple[list[int], list[int], list[int]]"
"""A prompt, the chosen and the rejected completion."""


def pair_rows(rows: Sequence[Sequence[Triple]], length: int, *, once: bool, reference: float = 0.0) -> Batch:
    """Return rows of pairs. once: the prompt is in the row once. reference: moves what a reference is said to give."""
    done: list[dict[str, torch.Tensor]] = []
    for row in rows:
        places: list[tuple[int, ...]] = []  # token, target, weight, position, segment, until, liked
        for number, (prompt, *sides) in enumerate(row):
            first, trunk = 2 * number, len(prompt) - 1
            if once:
                places += [(prompt[i], prompt[i + 1], 0, i, first, first + 1, 0) for i in range(trunk)]
            for segment, side in enumerate(sides, first):
                ids = [*prompt, *side]
                start = trunk if once else 0
                liked = number % 2
                places += [
                    (ids[i], ids[i + 1], int(i >= trunk), i, segment, segment, liked)
                    for i in range(start, len(ids) - 1)
                ]
        places += [(0, 0, 0, 0, -1, -1, 0)] * (length - len(places))
        assert len(places) == length
        names = ("tokens", "targets", "weight", "position", "segment", "until", "liked")
        done.append(dict(zip(names, torch.tensor(places).unbind(1), strict=True)))
    batch: Batch = {name: torch.stack([row[name] for row in done]) for name in (done[0] if done else ())}
    batch["weight"] = batch["weight"].double()
    batch["reference"] = reference * (batch["segment"] + 1) * batch["weight"]
    batch["row"] = torch.arange(len(rows)) + 1000
    return batch if once else {name: value for name, value in batch.items() if name != "until"}


def random_pairs(arch: Arch, rows: int, length: int, seed: int) -> list[list[Triple]]:
    """Draw rows of one or two pairs whose prompts and completions are of any length that fits."""
    g = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> list[int]:
        size = int(torch.randint(low, high + 1, (1,), generator=g))
        return torch.randint(0, arch.vocab, (size,), generator=g).tolist()

    count = [1 + int(torch.randint(0, 2, (1,), generator=g)) for _ in range(rows)]
    most = length // 6  # so that two pairs fit
    return [[(ids(1, most + 1), ids(1, most), ids(1, most)) for _ in range(n)] for n in count]
