"""Say SentencePiece's BPE in both tongues: pieces with scores in a GGUF file, merges in order in a tokenizer.json.

SentencePiece joins the neighbours whose union has the best score (`bpe_model.cc` of google/sentencepiece, and
`llm_tokenizer_spm` of llama.cpp, whose name for it is "llama"); a tokenizer.json lists pairs, the best first. Both say
the same where no two unions share a score: all pairs whose union is a piece, by the score of the union. Of unions with
one score SentencePiece makes the leftmost. Where they are runs of one character (Llama's of spaces), that is the one
with the longest beginning: `generate_merges` of `transformers` has this order, too.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "▁"
MAX_PIECE = 128
MAX_CHARACTERS = 1 << 22
"""Of one piece, and of all together: every piece is cut everywhere. Gemma 3, the largest, has some 2 million."""

_SPACES: Mapping[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_PREFIX: Mapping[str, Any] = {"type": "Prepend", "prepend": SPACE}
_PREFIXED: Mapping[str, Any] = {"type": "Sequence", "normalizers": [_PREFIX, _SPACES]}
# Gemma's: nothing is left to split once the spaces are replaced
_NOTHING: Mapping[str, Any] = {
    "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False,
}  # fmt: skip

_BYTES = tuple(f"<0x{number:02X}>" for number in range(256))

Pair = tuple[str, str]


@frozen
class Pieces:
    """Hold a vocabulary by id: the texts, of what kind each is, and its score."""

    texts: Sequence[str]
    kinds: Sequence[int]
    scores: Sequence[float]

    def of(self, *kinds: int) -> dict[str, int]:
        """Return the ids of the pieces of these kinds by their texts."""
        return {text: i for i, (text, kind) in enumerate(zip(self.texts, self.kinds, strict=True)) if kind in kinds}


def layout_of(pieces: Pieces, prefix: bool) -> dict[str, Any]:
    """Return what a tokenizer.json says of how text is cut, but for the added tokens.

    prefix: a space is put before a text, and behind each token that is taken out of it whole, as llama.cpp does it.
    ValueError for pieces that a list of merges cannot be equal to.
    """
    normal = pieces.of(NORMAL)
    _check(pieces, normal)
    merges = sorted(
        (-pieces.scores[i], -len(left), -len(right), left, right)
        for text, i in normal.items() for left, right in _pairs(text, normal)
    )  # fmt: skip
    tied = {score: left + right for score, _, _, left, right in merges}
    for score, _, _, left, right in merges:
        if tied[score] != left + right and not _run(left + right):
            raise ValueError(
                f"{left + right!r} and {tied[score]!r} have one score: merges cannot say which is made first"
            )
    unknown = pieces.of(UNKNOWN)
    decoders: list[Any] = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    decoders += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    decoders += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "normalizer": _PREFIXED if prefix else _SPACES,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "vocab": pieces.of(NORMAL, UNKNOWN, CONTROL, USER, BYTE),
            "merges": [(left, right) for *_, left, right in merges],
            "byte_fallback": bool(pieces.of(BYTE)),
            "unk_token": next(iter(unknown), None),
            "fuse_unk": True,
        },
    }


def _check(pieces: Pieces, normal: Mapping[str, int]) -> None:
    """Refuse what is not SentencePiece's BPE, before work is done for it."""
    if sum(map(len, normal)) > MAX_CHARACTERS or max(map(len, normal), default=0) > MAX_PIECE:
        raise ValueError(f"pieces of more than {MAX_PIECE} characters, or {MAX_CHARACTERS:,} in all, are not read")
    if text := next((text for text, i in normal.items() if not float(pieces.scores[i]).is_integer()), None):
        raise ValueError(
            f"{text!r} has the score {pieces.scores[normal[text]]}, as logarithms of a unigram model are, whose "
            "choice no list of merges makes"
        )
    if text := next((text for text in pieces.of(UNUSED) if any(_pairs(text, normal))), None):
        raise ValueError(f"the piece {text!r} is unused, but others are made of it: no list of merges can say that")
    named = pieces.of(BYTE)
    if not named and not pieces.of(UNKNOWN):
        raise ValueError("there are no pieces for single bytes, and none for what is unknown: text would be lost")
    missing = [name for n, name in enumerate(_BYTES) if name not in named and not (n < 128 and chr(n) in normal)]
    if named and (odd := [*(named.keys() - set(_BYTES)), *missing]):
        raise ValueError(f"the pieces for single bytes have to be <0x00> to <0xFF>: {odd[0]!r} is missing or too many")


def _pairs(text: str, normal: Mapping[str, int]) -> Iterator[Pair]:
    """Yield the pairs of pieces that make up a text."""
    for at in range(1, len(text)):
        if text[:at] in normal and text[at:] in normal:
            yield text[:at], text[at:]


def _run(text: str) -> bool:
    return text == text[0] * len(text)


def prefix_of(layout: Mapping[str, Any]) -> bool | None:
    """Tell whether a tokenizer.json puts a space before a text; None where it is not one of SentencePiece's kind."""
    normal, pre, model = layout.get("normalizer"), layout.get("pre_tokenizer"), layout["model"]
    whole = not any(model.get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix", "ignore_merges"))
    if model["type"] != "BPE" or not whole:
        return None
    if normal is None and pre == {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "never", "split": False}:
        return False
    if pre not in (None, _NOTHING):
        return None
    return True if normal == _PREFIXED else False if normal == _SPACES else None


def pieces_of(layout: Mapping[str, Any], rows: int) -> Pieces:
    """Return the pieces and scores that say what the merges of a tokenizer.json do; ids without a token are unused.

    ValueError where its merges are not those of all pieces, which is what scores mean.
    """
    model = layout["model"]
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    merges: list[Pair] = [(left, right) for left, right in pairs]
    order = _scores([left + right for left, right in merges])
    texts, kinds = [f"[PAD{i}]" for i in range(rows)], [UNUSED] * rows
    for text, i in model["vocab"].items():
        texts[i], kinds[i] = text, BYTE if text in _BYTES else NORMAL
    for each in layout["added_tokens"]:
        text, i = each["content"], each["id"]
        # written with the sign for spaces it is never found in a text: merges alone make it (Gemma's runs of spaces)
        made = not each["special"] and SPACE in text and text in order
        kind = NORMAL if made else CONTROL if each["special"] else USER
        texts[i], kinds[i] = text, UNKNOWN if text == model.get("unk_token") else kind
    scores = [
        order.get(text, -float(len(merges))) if kind == NORMAL else 0.0 for text, kind in zip(texts, kinds, strict=True)
    ]
    pieces = Pieces(texts, kinds, scores)
    _same(pieces, model, merges, order)
    return pieces


def _scores(unions: Sequence[str]) -> dict[str, float]:
    """Give each union a score, the first the best; those whose merges lie among each other's have one score."""
    last = {text: n for n, text in enumerate(unions)}
    found: dict[str, float] = {}
    score, end = 0.0, -1
    for n, text in enumerate(unions):
        score -= n > end
        found[text] = score
        end = max(end, last[text])
    return found


def _same(pieces: Pieces, model: Mapping[str, Any], merges: Sequence[Pair], order: Mapping[str, float]) -> None:
    """Refuse merges that the scores do not mean."""
    meant = layout_of(pieces, prefix=False)["model"]
    bytes_ = meant["byte_fallback"]
    if bytes_ != model.get("byte_fallback", False) or not (bytes_ or model.get("fuse_unk")):
        raise ValueError("in GGUF unknown text becomes bytes where there are pieces for them, else one unknown piece")
    normal = pieces.of(NORMAL)
    given = [(left, right) for left, right in merges if left + right in normal]
    if odd := set(meant["merges"]) ^ set(given):
        left, right = min(odd)
        what = "has" if (left, right) in given else "lacks"
        raise ValueError(f"GGUF says merges by scores, of all pieces; this tokenizer {what} {left!r} {right!r}")
    tied = {score for score, n in Counter(order[text] for text in normal.keys() & order).items() if n > 1}
    for (a, b), (c, d) in itertools.pairwise(given):
        if order[a + b] == order[c + d] in tied and (len(a), len(b)) < (len(c), len(d)):
            raise ValueError(f"GGUF makes {c + d!r} of the longest beginning first, and this tokenizer of {a!r} {b!r}")
