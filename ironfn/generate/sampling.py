"""Continue a text, one token after the other, with the same pure function that training uses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from attrs import evolve
from torch import Tensor

from ironfn import rng, tree
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.model.arch import Arch
from ironfn.model.forward import DEFAULT, Forward
from ironfn.model.transformer import hidden, scored
from ironfn.types import Params

Choose = Callable[[Tensor, int], int]
"""(logits float32 [vocab], the number of the token) -> the chosen id."""


def greedy(logits: Tensor, number: int) -> int:
    """Choose the most probable id."""
    return int(logits.argmax())


def sampler(temperature: float, top_k: int, seed: int, *stream: int | str) -> Choose:
    """Return the choice by chance among the ``top_k`` most probable ids (all, where there are fewer).

    The draw of token n depends on (seed, stream, n) alone. ValueError for a temperature or top_k that is not above 0.
    """
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature {temperature} must be above 0 and finite; ask for greedy decoding instead of 0")
    if top_k < 1:
        raise ValueError(f"top_k {top_k} must be at least 1")

    def choose(logits: Tensor, number: int) -> int:
        best = logits.topk(min(top_k, len(logits)))
        probabilities = torch.softmax((best.values - best.values[0]).double() / temperature, 0).cpu()
        draw = torch.multinomial(probabilities, 1, generator=rng.generator(seed, "sample", *stream, number))
        return int(best.indices[int(draw)])

    return choose


@torch.no_grad()
def continuation(
    params: Params,
    arch: Arch,
    prompt: Sequence[int],
    tokens: int,
    choose: Choose,
    *,
    stop: frozenset[int] = frozenset(),
    window: int | None = None,
    how: Forward = DEFAULT,
    mesh: Mesh = SINGLE,
) -> Iterator[int]:
    """Yield up to ``tokens`` ids that follow the prompt, ending after one of ``stop``.

    window: the last ids that the model looks at, by default its context. mesh: where ``params`` is a rank's part; every
    rank goes through the whole of it and yields the same, which rank 0 has chosen. ValueError for an empty prompt, or
    an id that the model does not know.
    """
    ids = list(prompt)
    if not ids:
        raise ValueError("an empty prompt has nothing to continue; begin with the end-of-text id")
    if not all(0 <= i < arch.vocab for i in ids):
        raise ValueError(f"the prompt holds ids outside the model's vocabulary of {arch.vocab}; use its own tokenizer")
    width = min(window or arch.context, arch.context)
    mesh = evolve(mesh, sequence_parallel=False)  # positions come one by one: tp cannot share them out
    device = tree.leaves(params)[0].device
    for number in range(tokens):
        seen = torch.tensor([ids[-width:]], device=device)
        last = hidden(params, {"tokens": seen}, arch, mesh, how)[0][0, -1]
        logits = scored(last, params, arch, mesh, how).float()
        ids.append(_of_rank_0(choose(logits, number), logits, mesh))
        yield ids[-1]
        if ids[-1] in stop:
            return


def _of_rank_0(choice: int, like: Tensor, mesh: Mesh) -> int:
    """Return rank 0's choice: ranks whose logits round differently must not part ways."""
    if mesh.world.size == 1:
        return choice
    return int(mesh.world.backend.broadcast(torch.tensor([choice], device=like.device), 0))
