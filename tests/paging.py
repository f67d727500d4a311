"""Compute texts a few tokens at a time out of a pool of slots, wherever those lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from attrs import evolve, frozen
from torch import Tensor

from ironfn.generate.cache import Pool, make_pool
from ironfn.generate.pieces import Part, Stretches
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.model.arch import Arch
from ironfn.model.attention import Attention
from ironfn.model.forward import DEFAULT, Forward
from ironfn.model.transformer import hidden, logits, scored
from ironfn.types import Params

Form = Callable[[Pool, Sequence[Part]], Attention]
Pass = Sequence[tuple[int, int]]
"""What one forward pass computes: (text, new tokens) one after the other."""


@frozen
class Laid:
    """Hold texts and the slot of each of their tokens. shared: how many tokens others have computed before."""

    texts: list[list[int]]
    slots: list[list[int]]
    shared: list[int]


def stretched(slots: Sequence[int]) -> Stretches:
    """Join slots that follow each other."""
    found: list[tuple[int, int]] = []
    for slot in slots:
        if found and found[-1][1] == slot:
            found[-1] = (found[-1][0], slot + 1)
        else:
            found.append((slot, slot + 1))
    return tuple(found)


@torch.no_grad()
def in_passes(
    params: Params, arch: Arch, laid: Laid, passes: Sequence[Pass], form: Form, mesh: Mesh = SINGLE,
    how: Forward = DEFAULT, pool: Pool | None = None,
) -> list[Tensor]:  # fmt: skip
    """Return the log-probabilities [tokens computed, vocab] of each text."""
    dtype = params["embed"]["tokens"].dtype  # pyright: ignore
    count = 1 + max(slot for slots in laid.slots for slot in slots)
    pool = pool or make_pool(arch, count, 1, mesh, dtype)  # pyright: ignore
    done, found = list(laid.shared), [[] for _ in laid.texts]
    for work in passes:
        parts, tokens, position, lengths = [], [], [], []
        for text, new in work:
            start, end = done[text], done[text] + new
            parts.append(Part(new, start, stretched(laid.slots[text][:end])))
            tokens += laid.texts[text][start:end]
            position += range(start, end)
            lengths += [len(laid.texts[text])] * new
            done[text] = end
        batch = {
            name: torch.tensor([x]) for name, x in (("tokens", tokens), ("position", position), ("lengths", lengths))
        }
        x, _ = hidden(params, batch, arch, mesh, evolve(how, attention=form(pool, parts)))
        rows = scored(x, params, arch, mesh, how).log_softmax(-1)[0].split([new for _, new in work])
        for (text, _), each in zip(work, rows, strict=True):
            found[text].append(each)
    return [torch.cat(each) for each in found]


@torch.no_grad()
def at_once(params: Params, arch: Arch, text: Sequence[int], how: Forward = DEFAULT) -> Tensor:
    """Return the log-probabilities [tokens, vocab] of a text that is computed as training computes it."""
    return logits(params, {"tokens": torch.tensor([text])}, arch, SINGLE, how).log_softmax(-1)[0]
