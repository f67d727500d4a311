"""Measure the perplexity of documents of any length: every token is asked for once."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attrs import frozen

from ironfn.evals.texts import Subject, windows
from ironfn.report.evaluation import bits_per_byte, perplexity


@frozen
class Perplexity:
    """Hold how well documents were predicted.

    nats: the sum over all tokens. bytes: of the documents as UTF-8. window: ids that the model read at once at most;
    context: ids that it had before each id at least, but for the first of a document.
    """

    documents: int
    tokens: int
    bytes: int
    nats: float
    window: int
    context: int

    @property
    def token_perplexity(self) -> float:
        """Return exp(nats a token)."""
        return perplexity(self.nats / self.tokens)

    @property
    def byte_perplexity(self) -> float:
        """Return exp(nats a byte): it compares between tokenizers."""
        return perplexity(self.nats / self.bytes)

    @property
    def bits_per_byte(self) -> float:
        """Return the bits of information a byte."""
        return bits_per_byte(self.nats, self.bytes)


@frozen
class Predicted:
    """Hold the tokens and bytes of a document and the nats of all its tokens."""

    tokens: int
    bytes: int
    nats: float


def predict(texts: Sequence[str], subject: Subject, window: int, context: int) -> tuple[Perplexity, list[Predicted]]:
    """Ask for every token of the texts once, in windows of ``window`` ids (`texts.windows`), and return the whole and
    each text.

    ValueError for a window that the model does not read, for texts without a token, and where the model gives NaN.
    """
    if window > subject.context:
        raise ValueError(f"a window of {window} tokens is longer than the model's context of {subject.context}")
    ids = [subject.encode(text, False) for text in texts]
    cut = [windows(each, subject.begin, window, context) for each in ids]
    sums = iter(subject.score([[part] for parts in cut for part in parts]))
    found = [
        Predicted(len(each), len(text.encode()), -math.fsum(next(sums)[0] for _ in parts))
        for text, each, parts in zip(texts, ids, cut, strict=True)
    ]
    tokens, nats = sum(each.tokens for each in found), math.fsum(each.nats for each in found)
    if tokens == 0:
        raise ValueError("the texts have no token, so they have no perplexity")
    if math.isnan(nats):
        raise ValueError("the model gives NaN; its weights are damaged or overflow their dtype")
    return Perplexity(len(found), tokens, sum(each.bytes for each in found), nats, window, context), found
