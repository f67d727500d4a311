"""Score texts by a reward model: what their last token's hidden state is worth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from attrs import evolve

from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.model.arch import Arch
from ironfn.model.forward import DEFAULT, Forward
from ironfn.model.score import scores_at
from ironfn.model.shared import fold
from ironfn.tree import branch, leaf
from ironfn.types import Params

BUDGET = 2048
"""Tokens that are computed together."""


@torch.no_grad()
def rewards(
    params: Params,
    arch: Arch,
    groups: Sequence[Sequence[Sequence[int]]],
    *,
    budget: int = BUDGET,
    how: Forward = DEFAULT,
    mesh: Mesh = SINGLE,
) -> Iterator[list[float]]:
    """Yield, for each group of texts, their rewards. A text is its ids, the one that ends it included.

    Texts of a group, such as the completions of one prompt, share what they begin with. mesh: where ``params`` is a
    rank's part; every rank goes through all groups. ValueError for a text that is empty, longer than the model's
    context, or has an id that the model lacks.
    """
    arch, mesh = arch.without_capacity(), evolve(mesh, sequence_parallel=False)
    waiting: list[Sequence[Sequence[int]]] = []
    size = 0
    for group in groups:
        for text in group:
            _check(text, arch)
        if waiting and size + sum(map(len, group)) > budget:
            yield from _score(params, arch, waiting, how, mesh)
            waiting, size = [], 0
        waiting.append(group)
        size += sum(map(len, group))
    if waiting:
        yield from _score(params, arch, waiting, how, mesh)


def _check(text: Sequence[int], arch: Arch) -> None:
    if not 0 < len(text) <= arch.context:
        raise ValueError(f"a text of {len(text)} tokens cannot be scored; 1 to {arch.context} can be")
    if not 0 <= min(text) <= max(text) < arch.vocab:
        raise ValueError(f"a text holds ids outside the model's vocabulary of {arch.vocab}; use its own tokenizer")


def _score(
    params: Params, arch: Arch, groups: Sequence[Sequence[Sequence[int]]], how: Forward, mesh: Mesh
) -> Iterator[list[float]]:
    folded = fold(groups).to(leaf(branch(params, "norm"), "scale").device)
    ends = torch.tensor(folded.lengths).cumsum(0) - 1
    found = iter(scores_at(params, folded.batch, folded.places[ends], arch, mesh, how)[0].tolist())
    for group in groups:
        yield [next(found) for _ in group]
