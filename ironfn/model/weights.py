"""Stand where a tree has a matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from attrs import frozen
from torch import Tensor

Times: TypeAlias = Callable[[Tensor], Tensor]
"""x [..., in] -> x w [..., out]."""


@frozen(eq=False)
class Weight:
    """Stand where a tree has a matrix, or several side by side. sizes: the columns of each."""

    times: Times
    sizes: tuple[int, ...]
