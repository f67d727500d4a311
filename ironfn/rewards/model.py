"""Score texts by a reward model: what their last token's hidden state is worth."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from attrs import evolve

from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.model.arch import Arch
from ironfn.model.forward import DEFAULT, Forward
from ironfn.model.score import scores_at
from ironfn.model.shared import fold
from ironfn.rewards.values import Completion, Failure, Grader, Result, Score
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


def model_reward(
    params: Params,
    arch: Arch,
    ids: Callable[[Completion], Sequence[int]],
    *,
    how: Forward = DEFAULT,
    squash: bool = True,
) -> Grader:
    """Return a grader that gives what a reward model does, whatever texts of one prompt share computed once.

    ids: how it reads a prompt with its completion; ValueError where it cannot, which fails that completion alone.
    squash: give 1 / (1 + exp(-r)), the probability with which it prefers a text to one of reward 0 (Bradley-Terry), and
    not the reward r itself, which may be any number.
    """

    def grade(completions: Sequence[Completion]) -> list[Result]:
        texts: list[Sequence[int] | Failure] = [_read(completion, ids, arch) for completion in completions]
        pairs = zip(completions, texts, strict=True)
        known = [(each.prompt, text) for each, text in pairs if not isinstance(text, Failure)]
        groups = [[text for _, text in group] for _, group in itertools.groupby(known, lambda pair: pair[0])]
        found = itertools.chain.from_iterable(rewards(params, arch, groups, how=how))
        return [text if isinstance(text, Failure) else _scored(next(found), squash) for text in texts]

    return grade


def _read(completion: Completion, ids: Callable[[Completion], Sequence[int]], arch: Arch) -> Sequence[int] | Failure:
    try:
        text = ids(completion)
        _check(text, arch)
        return text
    except ValueError as error:
        return Failure("error", str(error))


def _scored(reward: float, squash: bool) -> Score:
    if not squash or math.isnan(reward):
        return Score(reward)
    return Score(1 / (1 + math.exp(-reward)) if reward > -700 else 0.0)


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
