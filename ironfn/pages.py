"""Lay large tensors in large pages, so that reading all of them looks fewer addresses up."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

_HUGE = 2 << 20
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return zeros: on Linux, of a megabyte and more, in pages of 2 MiB, which exist when they are first written.

    Pages of 4 KiB where the system has no others.
    """
    size = math.prod(shape) * dtype.itemsize
    if _ADVICE is None or size < _HUGE // 2 or torch.device(device).type != "cpu":
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    pages = mmap.mmap(-1, size + 2 * _HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        pages.madvise(_ADVICE)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    return whole[-whole.data_ptr() % _HUGE :][:size].view(dtype).view(tuple(shape))


def copied(x: Tensor) -> Tensor:
    """Return a copy of x in such pages."""
    return zeros(x.shape, x.dtype, x.device).copy_(x)
