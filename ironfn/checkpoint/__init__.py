"""Save and load trees of tensors so that a death at any moment, or a flipped bit anywhere, loses nothing unnoticed.

``save`` and ``load``, ``load_newest`` need torch and bring it in when first used; the rest does without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ironfn.checkpoint.files import DISK, Files
from ironfn.checkpoint.keep import newest, prune, steps, tidy
from ironfn.checkpoint.manifest import DamagedCheckpoint, Manifest
from ironfn.checkpoint.shards import Problem, read_manifest, step_of, verify

if TYPE_CHECKING:
    from ironfn.checkpoint.read import Loaded, load, load_newest
    from ironfn.checkpoint.saving import save

__all__ = [
    "DISK",
    "DamagedCheckpoint",
    "Files",
    "Loaded",
    "Manifest",
    "Problem",
    "load",
    "load_newest",
    "newest",
    "prune",
    "read_manifest",
    "save",
    "step_of",
    "steps",
    "tidy",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "save":
        from ironfn.checkpoint.saving import save as found
    elif name in ("Loaded", "load", "load_newest"):
        from ironfn.checkpoint import read

        found = getattr(read, name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found
