"""Hold what is trained where the model itself stays as it is: adapters, and the form of the frozen base."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen


@frozen
class AdapterSpec:
    """Train a few numbers beside a frozen model. kind ``none`` trains the model itself.

    lora: every matrix w that ``targets`` names becomes w + scale a b, a [in, rank] and b [rank, out]
    (Hu et al. 2021, arXiv 2106.09685); scale is alpha / rank, with ``rslora`` alpha / sqrt(rank) (Kalajdzievski 2023,
    arXiv 2312.03732). dora: its columns keep a length of their own (Liu et al. 2024, arXiv 2402.09353).
    targets: path regexes (`re.search`), of ``blocks/<n>/attn/wq``, ``embed/tokens``, ``head/w`` …; ``all-linear`` is
    every matrix of attention and of the feed-forwards, but for experts and routers.
    dropout: on what a and b read. base: ``nf4`` keeps the matrices of the blocks in 4 bits (QLoRA, arXiv 2305.14314),
    ``nf4_all`` those of the embedding and the head too.
    prefix: ``tokens`` trained keys and values in every block (Li & Liang 2021, arXiv 2101.00190). prompt: as many
    trained embeddings before every text (Lester et al. 2021, arXiv 2104.08691).
    """

    kind: Literal["none", "lora", "prefix", "prompt"] = "none"
    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    rslora: bool = False
    dora: bool = False
    targets: list[str] = field(factory=lambda: ["all-linear"])
    base: Literal["none", "nf4", "nf4_all"] = "none"
    tokens: int = 20

    @property
    def scale(self) -> float:
        """What a b is multiplied by."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)
