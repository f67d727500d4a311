"""Match texts in a process of its own: the other side of `ironfn.rewards.text.matching`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from ironfn.rewards.serving import serve


def prepare(settings: Mapping[str, Any]) -> Callable[[Any], bool]:
    """Return the function that tells whether a text matches."""
    expression = re.compile(settings["expression"], re.DOTALL)
    match = expression.fullmatch if settings["whole"] else expression.search
    return lambda text: match(text) is not None


if __name__ == "__main__":
    serve(prepare)
