"""Keep the memory that a step frees for the next step, instead of handing it back to the system."""

from __future__ import annotations

import ctypes
from contextlib import suppress

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h


def keep_freed_pages() -> None:
    """Tell glibc's allocator to give back only what lies above 2 GiB free, and to map only blocks of 32 MiB and more.

    A step frees and takes the same activations again and again; pages that went back to the system meanwhile have to
    be zeroed anew (docs/decisions.md). Where the C library is another one, nothing happens.
    """
    with suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, 32 << 20)
        mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)
