"""Draw random numbers that are indexed by global coordinates, so that no mesh, split or resume changes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor

_MASK = 0xFFFFFFFF


def key(*coordinates: int | str) -> int:
    """Return a 63-bit key for these coordinates: (seed, path, step ...). Equal only for equal coordinates.

    >>> key(0, "blocks/1") == key(0, "blocks/1"), key(1, "2") == key("1", 2)
    (True, False)
    """
    text = "\x1f".join(f"{type(c).__name__}:{c}" for c in coordinates)
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1


# A compiler cannot look into the hash. This is the mark that `torch.compiler.assume_constant_result` leaves, without
# its import of the compiler, which costs every process 70 MB and a second.
key._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def generator(*coordinates: int | str) -> torch.Generator:
    """Return a CPU generator seeded by the coordinates: the same numbers on every device and mesh."""
    return torch.Generator().manual_seed(key(*coordinates))


def normal(shape: Sequence[int], std: float, *coordinates: int | str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw N(0, std²) of the given shape, in float32 and then rounded to ``dtype``."""
    draws = torch.empty(tuple(shape), dtype=torch.float32).normal_(0.0, std, generator=generator(*coordinates))
    return draws.to(dtype)


def _mix(x: Tensor) -> Tensor:
    """Scramble 32-bit words held in int64 (the `lowbias32` finaliser of Chris Wellons' hash-prospector)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def bits(seed: int, coordinates: Sequence[Tensor]) -> Tensor:
    """Return 32 random bits for every point of the grid that the 1-d int64 ``coordinates`` span, as int64.

    A point's bits depend on its coordinates alone: a slice of the grid has the bits of that slice.
    """
    device = coordinates[0].device
    state = torch.tensor((seed ^ (seed >> 32)) & _MASK, device=device)
    for place, coordinate in enumerate(coordinates):
        word = _mix((coordinate & _MASK) ^ _mix((coordinate >> 32) + 0x9E3779B9 * (place + 1) & _MASK))
        state = _mix(state.unsqueeze(-1) ^ word)
    return state


def dropout(x: Tensor, rate: float, seed: int, coordinates: Sequence[Tensor]) -> Tensor:
    """Zero a share ``rate`` of ``x`` and scale the rest by 1 / (1 - rate).

    ``coordinates`` has one int64 vector for each dimension of ``x``: the global index of each of its slices.
    """
    keep = bits(seed, coordinates) >= round(rate * 2**32)
    return x * keep.to(x.dtype) / (1.0 - rate)
