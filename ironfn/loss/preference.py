"""Say how well a model prefers one text to another: losses of the log-probabilities of whole texts.

Log-probabilities are sums over a completion's tokens, the one that ends it included, in nats. Each loss has a value for
each pair; they weigh alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.nn import functional as F


@frozen(eq=False)
class Scored:
    """Hold completions, all [n]: their log-probabilities by the policy and by the reference, and their tokens."""

    log_probs: Tensor
    reference: Tensor
    tokens: Tensor

    @property
    def ratio(self) -> Tensor:
        """Return log(policy / reference)."""
        return self.log_probs - self.reference

    @property
    def mean(self) -> Tensor:
        """Return the policy's mean log-probability of a token."""
        return self.log_probs / self.tokens

    def take(self, index: slice) -> Scored:
        """Return some of the completions."""
        return Scored(self.log_probs[index], self.reference[index], self.tokens[index])


Reward: TypeAlias = Callable[[Scored], Tensor]
"""What a policy holds of completions, [n]."""


@frozen
class Objective:
    """Compare completions: (chosen, rejected) -> the loss of each pair [n].

    reward: what the policy holds of a completion, for metrics. refers: whether the reference takes part.
    """

    loss: Callable[[Scored, Scored], Tensor]
    reward: Reward
    refers: bool = True


def _of_ratio(beta: float, loss: Callable[[Tensor], Tensor]) -> Objective:
    """Return an objective of beta (log ratio of the chosen - of the rejected)."""
    return Objective(
        lambda chosen, rejected: loss(beta * (chosen.ratio - rejected.ratio)), lambda scored: beta * scored.ratio
    )


def dpo(beta: float, smoothing: float = 0.0) -> Objective:
    """Return DPO's loss (Rafailov et al. 2023, arXiv 2305.18290, eq. 7); with ``smoothing``, the conservative one.

    smoothing: the share of pairs that are taken to be the wrong way round (Mitchell 2023, "A note on DPO with noisy
    preferences"). The loss of a policy that is its reference is log 2.
    """
    return _of_ratio(beta, lambda x: -(1 - smoothing) * F.logsigmoid(x) - smoothing * F.logsigmoid(-x))


def robust(beta: float, smoothing: float) -> Objective:
    """Return the loss whose mean over pairs of which a share ``smoothing`` is flipped is that of none flipped.

    Chowdhury et al. 2024, arXiv 2403.00409, eq. 14. smoothing: below 1/2.
    """
    return _of_ratio(
        beta,
        lambda x: (smoothing * F.logsigmoid(-x) - (1 - smoothing) * F.logsigmoid(x)) / (1 - 2 * smoothing),
    )


def hinge(beta: float) -> Objective:
    """Return SLiC's loss, on DPO's rewards (Zhao et al. 2023, arXiv 2305.10425; Liu et al. 2023, arXiv 2309.06657)."""
    return _of_ratio(beta, lambda x: (1 - x).relu())


def ipo(beta: float) -> Objective:
    """Return IPO's loss (Azar et al. 2023, arXiv 2310.12036, eq. 17).

    It compares the mean log ratio of a token, as its authors do. beta: the paper's tau.
    """

    def loss(chosen: Scored, rejected: Scored) -> Tensor:
        return (chosen.ratio / chosen.tokens - rejected.ratio / rejected.tokens - 1 / (2 * beta)).square()

    return Objective(loss, lambda scored: beta * scored.ratio / scored.tokens)


def simpo(beta: float, margin: float) -> Objective:
    """Return SimPO's loss (Meng et al. 2024, arXiv 2405.14734, eq. 6). margin: the paper's gamma."""
    return Objective(
        lambda chosen, rejected: -F.logsigmoid(beta * (chosen.mean - rejected.mean) - margin),
        lambda scored: beta * scored.mean,
        refers=False,
    )


def orpo(beta: float) -> Objective:
    """Return ORPO's loss (Hong et al. 2024, arXiv 2403.07691, eq. 6): the chosen's, and beta times the odds'.

    beta: the paper's lambda. A completion's probability is the geometric mean of its tokens'.
    """

    def loss(chosen: Scored, rejected: Scored) -> Tensor:
        odds = (chosen.mean - rejected.mean) - (_log1mexp(chosen.mean) - _log1mexp(rejected.mean))
        return -chosen.mean - beta * F.logsigmoid(odds)

    return Objective(loss, lambda scored: beta * scored.mean, refers=False)


def _log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x < 0 (Mächler 2012, "Accurately computing log(1 - exp(-|a|))"); finite at 0."""
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    near = x > -0.6931471805599453
    # each branch sees only what it is good for: where takes the other's gradient, too, and infinity times 0 is none
    low, high = torch.where(near, x.new_tensor(-1.0), x), torch.where(near, x, x.new_tensor(-0.5))
    return torch.where(near, (-torch.expm1(high)).log(), torch.log1p(-low.exp()))


def with_supervised(objective: Objective, weight: float) -> Objective:
    """Add ``weight`` times the chosen completion's negative log-probability a token (RPO: Pang et al. 2024, arXiv
    2404.19733, eq. 1).
    """
    return evolve(objective, loss=lambda chosen, rejected: objective.loss(chosen, rejected) - weight * chosen.mean)


@frozen
class Unpaired:
    """Judge single completions: (scored, whether each is liked, baseline) -> the loss of each [n].

    baseline: what a policy's completions have in log ratio as it is, a number [].
    """

    loss: Callable[[Scored, Tensor, Tensor], Tensor]
    reward: Reward


def kto(beta: float, liked: float = 1.0, disliked: float = 1.0) -> Unpaired:
    """Return KTO's loss (Ethayarajh et al. 2024, arXiv 2402.01306, eq. 7 and 8).

    liked, disliked: the weights lambda.
    """

    def loss(scored: Scored, is_liked: Tensor, baseline: Tensor) -> Tensor:
        value = beta * (scored.ratio - baseline)
        return torch.where(is_liked, liked * torch.sigmoid(-value), disliked * torch.sigmoid(value))

    return Unpaired(loss, lambda scored: beta * scored.ratio)
