"""Trade time for memory: recompute a block in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recompute(block: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Run a block and keep only its inputs (Chen et al. 2016, arXiv 1604.06174): ``Forward(run=recompute)``.

    Randomness comes from explicit keys here, so that no generator's state has to be put back.
    """
    return checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False)  # pyright: ignore[reportReturnType]
