"""Hold how a model learns what is preferred: from pairs or judged completions, as a policy or as a reward."""

from __future__ import annotations

from typing import Literal

from attrs import frozen


@frozen
class DpoSpec:
    """Describe how a policy learns from what is preferred: where ``data.form`` is ``pairs``, or ``judged`` for kto.

    objective: see `loss.preference`. beta: how far the policy is held to its reference; of simpo and orpo, their own.
    smoothing: the share of pairs that are the wrong way round, for dpo and robust. margin: simpo's gamma.
    supervised: weight of the chosen completion's own loss (RPO). liked, disliked: weights of kto.
    reference: the run, checkpoint or Hugging Face directory of the reference; None is the model that the run begins
    from. precompute: its log-probabilities are computed once, and kept beside the data.
    router_losses: a mixture of experts keeps its routers' losses.
    """

    objective: Literal["dpo", "robust", "hinge", "ipo", "simpo", "orpo", "kto"] = "dpo"
    beta: float = 0.1
    smoothing: float = 0.0
    margin: float = 1.0
    supervised: float = 0.0
    liked: float = 1.0
    disliked: float = 1.0
    reference: str | None = None
    precompute: bool = False
    router_losses: bool = False

    @property
    def refers(self) -> bool:
        """Tell whether the objective knows a reference."""
        return self.objective not in ("simpo", "orpo")


@frozen
class RewardSpec:
    """Describe how a reward is learned from pairs: where the model ends in one (``model.score``).

    center: weight of the square of a pair's summed rewards (Eisenstein et al. 2023, arXiv 2312.09244).
    """

    center: float = 0.0
