"""Save and load trees of tensors so that a death at any moment, or a flipped bit anywhere, loses nothing unnoticed.

What saves and loads tensors needs torch and brings it in when first used; the rest does without.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ironfn.checkpoint.files import DISK, Files
from ironfn.checkpoint.keep import newest, prune, steps, tidy
from ironfn.checkpoint.manifest import DamagedCheckpoint, Manifest
from ironfn.checkpoint.shards import Problem, read_manifest, step_of, verify

if TYPE_CHECKING:
    from ironfn.checkpoint.read import Loaded, load, load_newest
    from ironfn.checkpoint.saver import Saver
    from ironfn.checkpoint.saving import save
    from ironfn.checkpoint.state import as_tree, layout_of

__all__ = [
    "DISK",
    "DamagedCheckpoint",
    "Files",
    "Loaded",
    "Manifest",
    "Problem",
    "Saver",
    "as_tree",
    "layout_of",
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


_MODULES = MappingProxyType(
    {
        "Loaded": "read",
        "Saver": "saver",
        "as_tree": "state",
        "layout_of": "state",
        "load": "read",
        "load_newest": "read",
        "save": "saving",
    }
)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
