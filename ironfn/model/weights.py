"""Stand where a tree has a matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from attrs import frozen
from torch import Tensor

from ironfn.model.norms import Normed

Times: TypeAlias = Callable[[Tensor], Tensor]
"""x [..., in] -> x w [..., out]."""


@frozen(eq=False)
class Weight:
    """Stand where a tree has a matrix, or several side by side. sizes: the columns of each.

    reads: the same product of a norm's result, of which it can keep the source; None where it keeps nothing.
    pieces: of the frozen head alone: its rows [some, width] one after the other, never all at once.
    """

    times: Times
    sizes: tuple[int, ...]
    reads: Callable[[Normed], Tensor] | None = None
    pieces: Callable[[torch.dtype], Iterator[Tensor]] | None = None
