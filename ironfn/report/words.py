"""Write sizes, times and foreign text for a person."""

from __future__ import annotations

import math
import re
from html import escape

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    r"""Return the text with its control characters written out: they can drive a terminal or reverse a page's text.

    >>> print(visible("a\x1b[2Jb"))
    a\u001b[2Jb
    """
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def safe(text: str) -> str:
    r"""Return the text as HTML, for an element's content or a quoted attribute.

    >>> print(safe("<b>\x07"))
    &lt;b&gt;\u0007
    """
    return escape(visible(text))


def seconds_in_words(seconds: float | None) -> str:
    """Return a time in its two largest units.

    >>> seconds_in_words(5.2), seconds_in_words(192.4), seconds_in_words(7240), seconds_in_words(200000)
    ('5s', '3m12s', '2h00m', '2d07h')
    """
    if seconds is None or not math.isfinite(seconds):
        return "-"
    whole = round(max(seconds, 0.0))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days}d{hours % 24:02d}h"
    if hours:
        return f"{hours}h{minutes % 60:02d}m"
    return f"{minutes}m{whole % 60:02d}s" if minutes else f"{whole}s"


def bytes_in_words(count: float | None) -> str:
    """Return a number of bytes in a unit that a person reads.

    >>> bytes_in_words(512), bytes_in_words(1288490189)
    ('512B', '1.2GiB')
    """
    if count is None or not math.isfinite(count):
        return "-"
    unit = next((u for u in range(4) if count < 1024 ** (u + 1)), 4)
    return f"{count:.0f}B" if unit == 0 else f"{count / 1024**unit:.1f}{'KMGT'[unit - 1]}iB"
