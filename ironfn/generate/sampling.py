"""Choose the next token of many texts at once; a choice depends on its own text, seed and number alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional as F

from ironfn import rng

_SORTED = 1024  # how many ids are sorted at first where top-p asks for an order: a trained model seldom needs more


@frozen
class Sampling:
    """Say how a token is chosen. ValueError, with a remedy, for a value that means nothing.

    temperature: 0 is greedy. top_k: only the k likeliest, and what is as likely as the k-th; None: all. top_p: the
    fewest of those likeliest whose probabilities reach it together, and what is as likely as the last (Holtzman et al.
    2020). min_p: those at least this share as likely as the likeliest (Nguyen et al. 2024). repetition_penalty: of ids
    that were seen before (Keskar et al. 2019). The order is that of `transformers`: penalty, temperature, top-k, top-p,
    min-p, each on what the ones before have left.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature {self.temperature} must be finite and at least 0, which is greedy")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k {self.top_k} must be at least 1; leave it out to choose among all tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} must be above 0 and at most 1, which keeps all tokens")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p {self.min_p} must lie between 0, which keeps all tokens, and 1")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty {self.repetition_penalty} must be above 0 and finite; 1 is none")


@frozen
class Ask:
    """Ask for token ``number`` of a text. seen: its ids so far, which only a repetition penalty looks at.

    What is chosen by chance is a function of the logits, the sampling, the stream and the number.
    """

    sampling: Sampling
    stream: tuple[int | str, ...]
    number: int
    seen: Sequence[int] = ()


@frozen(eq=False)
class Drawn:
    """Hold each row's chosen id and its log-probability at the row's temperature, before penalty and filters."""

    ids: list[int]
    log_probs: list[float]


def draw(logits: Tensor, asks: Sequence[Ask]) -> Drawn:
    """Choose an id for each row of ``logits``, float32 [rows, vocab]: the first of the likeliest, or one by chance.

    By chance is the inverse of the cumulative probability, in the order of the ids, at one uniform number. A row's
    choice and log-probability are the same in any company. ValueError for logits that are no distribution.
    """
    assert len(logits) == len(asks)
    log_probs = _tempered(logits, asks).log_softmax(-1)
    if all(ask.sampling.temperature == 0 and ask.sampling.repetition_penalty == 1 for ask in asks):
        best = logits.argmax(-1)
        ids, told = best.tolist(), log_probs.gather(1, best[:, None])[:, 0].tolist()
        _refuse([not math.isfinite(x) for x in told])  # what is no number is its row's largest
        return Drawn(ids, told)
    scores = _penalised(logits, asks)
    _refuse((~scores.amax(-1).isfinite()).tolist())
    chosen: dict[int, int] = {}
    if greedy := [r for r, ask in enumerate(asks) if ask.sampling.temperature == 0]:
        chosen |= zip(greedy, _rows(scores, greedy).argmax(-1).tolist(), strict=True)
    if by_chance := [r for r, ask in enumerate(asks) if ask.sampling.temperature > 0]:
        chosen |= zip(by_chance, _by_chance(_rows(scores, by_chance), [asks[r] for r in by_chance]), strict=True)
    ids = [chosen[r] for r in range(len(asks))]
    return Drawn(ids, log_probs.gather(1, _column(ids, logits, torch.int64))[:, 0].tolist())


def _refuse(bad: list[bool]) -> None:
    if any(bad):
        raise ValueError(
            f"the logits of row {bad.index(True)} hold NaN or infinity, or rule every token out: check the "
            "weights, or compute in bfloat16 or float32 where float16 overflows"
        )


def top_log_probs(logits: Tensor, count: int, asks: Sequence[Ask]) -> list[tuple[tuple[int, float], ...]]:
    """Return the ``count`` likeliest ids of each row with their log-probabilities, which are those of ``draw``.

    logits: float32 [rows, vocab]. The likeliest first; fewer where the vocabulary is smaller.
    """
    best = logits.topk(min(count, logits.shape[1])).indices
    log_probs = _tempered(logits, asks).log_softmax(-1).gather(1, best)
    return [tuple(zip(*row, strict=True)) for row in zip(best.tolist(), log_probs.tolist(), strict=True)]


def _rows(x: Tensor, rows: Sequence[int]) -> Tensor:
    return x if len(rows) == len(x) else x[torch.tensor(rows, device=x.device)]


def _column(values: Sequence[float], like: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device)[:, None]


def _tempered(scores: Tensor, asks: Sequence[Ask]) -> Tensor:
    """Return the scores over their temperature, but for a constant a row. softmax sums each row in the same order."""
    temperatures = [ask.sampling.temperature or 1.0 for ask in asks]
    if all(t == 1 for t in temperatures):
        return scores
    at = _column([max(t, 1e-30) for t in temperatures], scores, scores.dtype)  # 1e-320 is 0 in float32
    return (scores - scores.amax(1, keepdim=True)) / at


def _penalised(logits: Tensor, asks: Sequence[Ask]) -> Tensor:
    """Divide the logits of ids that were seen by the penalty where they are above 0; multiply them where below."""
    rows = [r for r, ask in enumerate(asks) if ask.sampling.repetition_penalty != 1 and len(ask.seen)]
    scores = logits.clone() if rows else logits
    for r in rows:
        seen = torch.tensor(asks[r].seen, device=logits.device)
        penalty, old = asks[r].sampling.repetition_penalty, logits[r, seen]
        scores[r, seen] = torch.where(old < 0, old * penalty, old / penalty)
    return scores


def _by_chance(scores: Tensor, asks: Sequence[Ask]) -> list[int]:
    """Draw for each row, with no more of the vocabulary sorted than it needs; where that was too little, with all."""
    vocab, chosen = scores.shape[1], [-1] * len(asks)
    widths = [min(_to_sort(ask.sampling, vocab), vocab) for ask in asks]
    for width in (0, max(widths), vocab):
        rows = [r for r, found in enumerate(chosen) if found < 0 and bool(widths[r]) == bool(width)]
        if rows:
            some = [asks[r] for r in rows]
            found = _among_best(_rows(scores, rows), some, width) if width else _among_all(_rows(scores, rows), some)
            for r, one in zip(rows, found, strict=True):
                chosen[r] = one
    return chosen


def _to_sort(sampling: Sampling, vocab: int) -> int:
    """Return how many of the likeliest show what is kept: one more than the top k, at first a guess for top-p alone."""
    if sampling.top_k is not None and sampling.top_k < vocab:
        return sampling.top_k + 1
    return _SORTED if sampling.top_p < 1 else 0


def _among_all(scores: Tensor, asks: Sequence[Ask]) -> list[int]:
    return _pick(_tempered(scores, asks).softmax(-1), asks).tolist()


def _among_best(scores: Tensor, asks: Sequence[Ask], width: int) -> list[int]:
    """Draw among what top-k and top-p keep, all of it within the ``width`` likeliest; -1 where that is not sure."""
    vocab = scores.shape[1]
    best = scores.topk(width) if width < vocab else scores.sort(descending=True)
    counts = _column([min(ask.sampling.top_k or vocab, vocab) for ask in asks], scores, torch.int64)
    bounded = counts < vocab
    least = best.values.gather(1, counts.clamp(max=width) - 1)
    over = (best.values - best.values[:, :1]).double()
    weights = (over / _column([ask.sampling.temperature for ask in asks], over)).exp() * (best.values >= least)
    cumulative = weights.cumsum(1)
    total = cumulative[:, -1:]
    if not bounded.all():  # as a multiple of the likeliest one's, which is 1 among these weights
        whole = (-_tempered(scores, asks).log_softmax(-1).amax(1, keepdim=True)).double().exp()
        total = torch.where(bounded, total, whole)
    share = _column([ask.sampling.top_p if ask.sampling.top_p < 1 else math.inf for ask in asks], scores)
    kept = F.pad(cumulative[:, :-1], (1, 0)) < share * total  # those before it do not reach top-p
    least = torch.maximum(least, best.values.gather(1, kept.sum(1, keepdim=True) - 1))
    by_id = best.indices.sort(1)
    place = _pick((weights * (best.values >= least)).gather(1, by_id.indices), asks)
    chosen = by_id.values.gather(1, place[:, None])
    if width < vocab:  # what comes next may be as likely as the last that is kept
        chosen = torch.where(best.values[:, -1:] < least, chosen, -1)
    return chosen[:, 0].tolist()


def _pick(weights: Tensor, asks: Sequence[Ask]) -> Tensor:
    """Return the place in each row of ``weights`` at which their sum, those below min-p left out, passes a share of it.

    The sum is float64 and from left to right: weights of 0 change nothing, so that it is all one which ids a row has
    been spared.
    """
    if any(ask.sampling.min_p for ask in asks):
        least = _column([ask.sampling.min_p for ask in asks], weights, weights.dtype) * weights.amax(1, keepdim=True)
        weights = weights * (weights >= least)
    cumulative = weights.cumsum(1, dtype=torch.float64)
    share = _column([_uniform(ask) for ask in asks], weights)
    return torch.searchsorted(cumulative, share * cumulative[:, -1:], right=True)[:, 0]


def _uniform(ask: Ask) -> float:
    """Return a number in [0, 1) that the seed, the stream and the token's number determine."""
    generator = rng.generator(ask.sampling.seed, "sample", *ask.stream, ask.number)
    return float(torch.rand((), dtype=torch.float64, generator=generator))
