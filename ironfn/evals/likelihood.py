"""Score texts by their log-likelihood, many in one row, and what they begin with alike only once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from ironfn.evals.texts import Text, cut
from ironfn.loss.scores import token_log_probs
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.mesh.pairs import enter
from ironfn.model.arch import Arch
from ironfn.model.forward import DEFAULT, Forward
from ironfn.model.shared import Folded, common, fold
from ironfn.model.transformer import head_bias, head_weight, hidden
from ironfn.types import Params

BUDGET = 2048
"""Tokens that are computed together: enough for the matrix products, and little memory."""


@torch.no_grad()
def log_likelihoods(
    params: Params,
    arch: Arch,
    groups: Sequence[Sequence[Text]],
    *,
    budget: int = BUDGET,
    how: Forward = DEFAULT,
    mesh: Mesh = SINGLE,
) -> Iterator[list[float]]:
    """Yield, for each group of texts, the sum of the log-probabilities (in nats) of what each text asks for.

    A text longer than the model's context loses its beginning (`cut`). Groups are laid end to end up to ``budget``
    tokens, so nothing is padded; texts of a group share their beginning. Experts drop nothing, whatever their capacity.
    mesh: where ``params`` is a rank's part; every rank goes through all groups and yields the same.
    ValueError for a text that asks for nothing or for more than the context, or has an id that the model lacks.
    """
    arch = arch.without_capacity()
    mesh = evolve(mesh, sequence_parallel=False)  # rows are as long as their texts: tp cannot share them out
    cuts = [[_checked(cut(text, arch.context), arch) for text in group] for group in groups]
    if _alone(cuts, arch):
        budget, rows = 0, [[text] for group in cuts for text in group]
    else:
        rows = cuts
    sums = (each for first, last in _packs(rows, budget) for each in _score(params, arch, rows[first:last], how, mesh))
    for group in cuts:
        yield [next(sums) for _ in group]


def _alone(groups: Sequence[Sequence[Text]], arch: Arch) -> bool:
    """Tell whether the angles of a text depend on its length: then even equal beginnings are not alike."""
    longest = max((len(text.ids) - 1 for group in groups for text in group), default=0)
    return arch.rope.kind in ("dynamic", "longrope") and longest > (arch.rope.original_context or arch.context)


def _checked(text: Text, arch: Arch) -> Text:
    if not 0 < text.scored < len(text.ids):
        raise ValueError(f"{text.scored} tokens to score after a context; 1 to {arch.context} can be")
    if not 0 <= min(text.ids) <= max(text.ids) < arch.vocab:
        raise ValueError(f"a text holds ids outside the model's vocabulary of {arch.vocab}; use its own tokenizer")
    return text


def _packs(groups: Sequence[Sequence[Text]], budget: int) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of groups that together are computed as up to ``budget`` tokens; one group at least."""
    first, size = 0, 0
    for number, group in enumerate(groups):
        read = [text.ids[:-1] for text in group]
        new = sum(map(len, read)) - common(read) * (len(read) - 1)
        if size + new > budget and number > first:
            yield first, number
            first, size = number, 0
        size += new
    if groups:
        yield first, len(groups)


def _score(params: Params, arch: Arch, groups: Sequence[Sequence[Text]], how: Forward, mesh: Mesh) -> list[float]:
    weight = head_weight(params, arch, how)
    folded = fold([[text.ids[:-1] for text in group] for group in groups]).to(weight.device)
    x, _ = hidden(params, folded.batch, arch, mesh, how)
    texts = [text for group in groups for text in group]
    asked, targets = _asked(folded, texts)
    # What texts of a group ask for alike, at the same place, is scored once.
    pairs, copies = torch.stack([asked, targets]).unique(dim=1, return_inverse=True)
    head: Any = {"vocab": arch.vocab, "bias": head_bias(params, arch, how), "softcap": arch.logit_softcap}
    log_probs = token_log_probs(enter(x, mesh)[0, pairs[0]], weight, pairs[1], mesh.tp, **head)
    of = torch.repeat_interleave(torch.tensor([text.scored for text in texts])).to(weight.device)
    sums = torch.zeros(len(texts), dtype=torch.float64, device=weight.device)
    return sums.index_add_(0, of, log_probs.double()[copies]).tolist()


def _asked(folded: Folded, texts: Sequence[Text]) -> tuple[Tensor, Tensor]:
    """Return where in the row each scored id is predicted, and the ids, both int64 [scored ids of all texts]."""
    among: list[int] = []
    targets: list[int] = []
    end = 0
    for text, length in zip(texts, folded.lengths, strict=True):
        end += length
        among += range(end - text.scored, end)
        targets += text.ids[len(text.ids) - text.scored :]
    device = folded.places.device
    return folded.places[torch.tensor(among, device=device)], torch.tensor(targets, device=device)
