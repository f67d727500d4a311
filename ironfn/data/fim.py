"""Rearrange documents for fill-in-the-middle (Bavarian et al. 2022, arXiv 2207.14255).

A document is cut as text, never as tokens, so that a cut may fall inside a word. It is written in one of two orders:

PSM:  <prefix> prefix <suffix> suffix <middle> middle <eos>
SPM:  <prefix> <suffix> suffix <middle> prefix middle <eos>     (the paper's second variant, which shares its sentinels)
"""

from __future__ import annotations

import re

from attrs import frozen

from ironfn import rng
from ironfn.spec.records import FimSpec


@frozen
class Sentinels:
    """Hold the ids of the three control tokens."""

    prefix: int
    middle: int
    suffix: int


@frozen
class Cut:
    """Hold a document's three parts, which joined are its text, and the order in which they are written."""

    prefix: str
    middle: str
    suffix: str
    suffix_first: bool


def cut(text: str, spec: FimSpec, seed: int, digest: str) -> Cut | None:
    """Cut a document, or return None for one that stays as it is.

    The draws depend on the seed and on the document's digest, never on the order of the documents. Both ends of the
    middle are drawn uniformly from the allowed places, and differ, so a middle is never empty.
    """

    def draw(name: str) -> int:
        return rng.key(seed, "fim", digest, name)

    if not text or draw("rate") >= spec.rate * 2**63:
        return None
    if spec.spans == "character":
        places = range(len(text) + 1)
    else:
        places = sorted({0, *(m.end() for m in re.finditer("\n", text)), len(text)})
    one, two = draw("start") % len(places), draw("end") % (len(places) - 1)
    start, end = sorted((places[one], places[two + (two >= one)]))
    return Cut(text[:start], text[start:end], text[end:], draw("order") < spec.spm_rate * 2**63)


def arrange(parts: Cut, sentinels: Sentinels) -> list[str | int]:
    """Write a cut document as a sequence of texts to encode, each by itself, and control ids."""
    if parts.suffix_first:
        return [
            sentinels.prefix, sentinels.suffix, parts.suffix, sentinels.middle, parts.prefix, parts.middle,
        ]  # fmt: skip
    return [sentinels.prefix, parts.prefix, sentinels.suffix, parts.suffix, sentinels.middle, parts.middle]
