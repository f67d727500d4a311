"""Make likelier what was rewarded: losses of the tokens that a policy chose, by how good their text was (GRPO and kin).

All values are of tokens [N], text after text. A ratio is the policy's probability of a token over the one with which it
was drawn, both at the temperature of the drawing. Losses are sums, with the weight that makes a mean of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from attrs import evolve, frozen
from torch import Tensor

from ironfn.loss.experts import router_loss
from ironfn.loss.log_probs import Places, asked_places, place_scores
from ironfn.mesh.axis import Mesh
from ironfn.model.arch import Arch
from ironfn.model.forward import DEFAULT, Forward
from ironfn.types import Batch, Loss, LossSum, Params

Mean: TypeAlias = Literal["sequence", "token", "constant", "rollout"]
Divergence: TypeAlias = Literal["k1", "k2", "k3"]
_FAR = 20.0
"""Log ratios are held within this: e^20 is 5e8, and a gradient of that size moves nothing any more."""


@frozen(eq=False)
class Surrogate:
    """Turn ratios into losses: (log ratio, log p, advantage) -> (loss, whether it was held back), all [N].

    whole: the ratio is that of whole texts, the geometric mean of their tokens' (GSPO: Zheng et al. 2025, arXiv
    2507.18071, eq. 7).
    """

    loss: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    whole: bool = False


def clipped(low: float = 0.2, high: float = 0.2, dual: float | None = None, *, whole: bool = False) -> Surrogate:
    """Return PPO's loss (Schulman et al. 2017, arXiv 1707.06347, eq. 7), clipped at 1 - low and 1 + high.

    Two bounds as DAPO has them (Yu et al. 2025, arXiv 2503.14476, eq. 10).

    dual: the largest ratio that counts where the advantage is negative (Ye et al. 2020, arXiv 1912.09729, eq. 5).
    """

    def loss(log_ratio: Tensor, log_p: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        ratio = log_ratio.exp()
        held = ((ratio < 1 - low) & (advantage < 0)) | ((ratio > 1 + high) & (advantage > 0))
        bounded = ratio.clamp(1 - low, 1 + high)
        free = ratio if dual is None else ratio.clamp(max=dual)
        return -torch.minimum(free * advantage, bounded * advantage), held

    return Surrogate(loss, whole)


def cispo(high: float) -> Surrogate:
    """Return CISPO's loss (MiniMax 2025, arXiv 2506.13585, eq. 4): the ratio, at most ``high``, weighs log p alone."""

    def loss(log_ratio: Tensor, log_p: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        ratio = log_ratio.detach().exp()
        return -ratio.clamp(max=high) * advantage * log_p, (ratio > high) & (advantage > 0)

    return Surrogate(loss)


def sapo(positive: float = 1.0, negative: float = 1.05) -> Surrogate:
    """Return SAPO's loss (Gao et al. 2025, arXiv 2511.20347, eq. 5): a sigmoid of the ratio in the place of a clip.

    positive, negative: its temperatures for advantages above 0 and others.
    """

    def loss(log_ratio: Tensor, log_p: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        temperature = torch.where(advantage > 0, positive, negative)
        soft = torch.sigmoid(temperature * (log_ratio.exp() - 1)) * 4 / temperature
        return -soft * advantage, torch.zeros_like(advantage, dtype=torch.bool)

    return Surrogate(loss)


def divergence(kind: Divergence, log_p: Tensor, reference: Tensor) -> Tensor:
    """Estimate, token by token, KL(policy, reference) in nats (Schulman 2020, "Approximating KL divergence").

    k1 = log p - log q, which may be negative; k2 its square over 2; k3 = q/p - 1 - log q/p.
    """
    gap = (reference - log_p).clamp(-_FAR, _FAR)
    return {"k1": lambda: -gap, "k2": lambda: gap.square() / 2, "k3": lambda: torch.expm1(gap) - gap}[kind]()


@frozen(eq=False)
class Objective:
    """Say what is made of ratios.

    mean: over the texts of their tokens' means (``sequence``: GRPO, Shao et al. 2024, arXiv 2402.03300, eq. 3), over
    the tokens of the batch (``token``: DAPO, and BNPO), over the texts of their tokens' sums over ``longest``
    (``constant``: Dr. GRPO, Liu et al. 2025, arXiv 2503.20783), or over the tokens of all that was drawn together, each
    text of which counts as the batch's ``share`` of them (``rollout``). kl: an estimator and its weight. entropy: how
    much of each token's entropy is taken off its loss.
    """

    surrogate: Surrogate
    mean: Mean
    longest: int | None = None
    kl: tuple[Divergence, float] | None = None
    entropy: float = 0.0

    def __call__(self, log_p: Tensor, entropy: Tensor, places: Places, batch: Batch) -> tuple[LossSum, Tensor]:
        """Return the loss of tokens with these log-probabilities and entropies [N], and what each counts in a mean."""
        old, advantage = (places.of(name, batch).to(log_p) for name in ("drawn", "advantage"))
        gap = log_p - old
        log_ratio = (_over_text(gap, places) if self.surrogate.whole else gap).clamp(-_FAR, _FAR)
        values, held = self.surrogate.loss(log_ratio, log_p, advantage)
        told = {"ratio": log_ratio.exp(), "clipped": held, "entropy": entropy, "gap": gap.abs()}
        if self.kl is not None:
            kind, much = self.kl
            told["kl"] = divergence(kind, log_p, places.of("reference", batch).to(log_p))
            values = values + much * told["kl"]
        if self.entropy:
            values = values - self.entropy * entropy
        each, level, weight = self._shares(places, batch, log_p)
        metrics = {name: (value.detach().to(log_p) * level).sum() for name, value in told.items()}
        return LossSum((values * each).sum(), weight, metrics), level

    def _shares(self, places: Places, batch: Batch, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what each token counts in the sum [N], what it counts in a mean of metrics [N], the weight of all."""
        sizes = torch.tensor(places.sizes, dtype=torch.int64, device=like.device)
        one, of_text = torch.ones_like(like), (1 / sizes.to(like)).repeat_interleave(sizes)
        texts = like.new_tensor(float(len(sizes)))
        if self.mean == "token":
            return one, one, like.new_tensor(float(len(like)))
        if self.mean == "sequence":
            return of_text, of_text, texts
        if self.mean == "constant":
            assert self.longest is not None, "the constant is the longest text's length"
            return one / self.longest, of_text, texts
        share = places.of("share", batch).to(like) * of_text
        return one, share, share.sum()


def policy_loss(
    arch: Arch,
    objective: Objective,
    how: Forward = DEFAULT,
    *,
    chunk: int | None = None,
    penalties: bool = True,
) -> Loss:
    """Return the loss (params, batch, mesh) -> sum and weight over the tokens that a policy drew.

    The batch is as `types.Batch` has it: ``weight`` is 1 where a drawn token is the target, and the texts of a prompt
    may share it. Besides, [rows, length], of these places: ``drawn``, the log-probability with which each was drawn;
    ``advantage``, its text's; ``reference``, another model's log-probability, where a divergence is asked for;
    ``share``, for ``rollout``; ``temperature``, at which each was drawn, 1 where it is absent. penalties: see
    `lm_loss`.

    Metrics, means over the tokens, or over the texts of their tokens' means: ratio, clipped (the share held back),
    entropy, gap (|log ratio|), kl.
    """

    def loss(params: Params, batch: Batch, mesh: Mesh) -> LossSum:
        places = asked_places(batch)
        found, seen = place_scores(params, batch, arch, mesh, how, places, chunk, learned=bool(objective.entropy))
        out, level = objective(*found, places, batch)
        if arch.moe is None or not seen:
            return out
        counts = {"load": seen["load"].sum(0), "dropped": seen["dropped"].sum(0)}
        if not penalties:
            return evolve(out, counts=counts)
        weight = batch["weight"]
        spread = torch.zeros_like(weight).flatten().index_put((places.at,), level.to(weight)).view_as(weight)
        added, of_routers = router_loss(seen, spread, arch.moe, mesh)
        metrics = {"policy": out.total.detach(), **out.metrics, **of_routers}
        return LossSum(out.total + added, out.weight, metrics, counts)

    return loss


def _over_text(values: Tensor, places: Places) -> Tensor:
    """Return [N], the mean of each token's text."""
    sizes = torch.tensor(places.sizes, dtype=torch.int64, device=values.device)
    return (places.sums(values) / sizes).to(values.dtype).repeat_interleave(sizes)
