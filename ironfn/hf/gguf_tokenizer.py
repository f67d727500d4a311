"""Make a tokenizer of what a GGUF file tells of it, and tell the same of a tokenizer.

Of a byte-level BPE, as GPT-2's, a GGUF names the way that text is cut before the merges (``tokenizer.ggml.pre``); how
each name cuts is written in llama.cpp's `llama-vocab.cpp`. Here it is a row of `CUTS`; a tokenizer that cuts otherwise
cannot be told of. SentencePiece's are told by scores: `gguf_sentencepiece`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from attrs import frozen
from tokenizers import Tokenizer

from ironfn.hf.gguf_sentencepiece import (
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER,
    Pieces,
    layout_of,
    pieces_of,
    prefix_of,
)

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)"
    r"|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


@frozen
class Cut:
    """Say how text is cut into words. pre: those of a tokenizer.json, bytes are made letters by the last of them.

    nfc: characters are composed before. whole: a word that is a token is taken as it is, whatever the merges say.
    """

    names: tuple[str, ...]
    pre: tuple[Mapping[str, object], ...]
    nfc: bool = False
    whole: bool = False


def _bytes(words: bool) -> Mapping[str, object]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": words}


def _split(regex: str) -> tuple[Mapping[str, object], ...]:
    pattern = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return pattern, _bytes(words=False)


CUTS = (
    Cut(("gpt-2", "phi-2", "mpt", "olmo"), (_bytes(words=True),)),
    Cut(
        ("smollm", "starcoder", "refact", "command-r"),
        ({"type": "Digits", "individual_digits": True}, _bytes(words=True)),
    ),
    Cut(("llama-bpe", "llama3", "llama-v3"), _split(_LLAMA3), whole=True),
    Cut(("qwen2", "deepseek-r1-qwen"), _split(_QWEN2), nfc=True),
)
"""The first name of a row is written; the GPT-2 row cuts by the expression that `tokenizers` itself holds."""


def tokenizer_of(metadata: Mapping[str, Any]) -> str:
    """Return the tokenizer.json that a GGUF file's metadata describes. ValueError where it is of no kind known here."""
    scored = metadata.get("tokenizer.ggml.model") == "llama"
    tokens = _texts(metadata, "tokenizer.ggml.tokens")
    kinds = _one_each(metadata, "token_type", tokens, NORMAL)
    if scored:  # llama.cpp looks for the user's tokens in the text as it is
        tokens = [t.replace(SPACE, " ") if kind == USER else t for t, kind in zip(tokens, kinds, strict=True)]
    pieces = Pieces(tokens, kinds, _one_each(metadata, "scores", tokens, 0.0))
    if len(pieces.of(*set(kinds) - {UNUSED})) != sum(kind != UNUSED for kind in kinds):
        raise ValueError("tokenizer.ggml.tokens holds a token twice: which id it has cannot be told")
    added = sorted(pieces.of(CONTROL, USER, *([UNKNOWN] if scored else [])).items(), key=lambda each: each[1])
    cut = _by_scores(pieces, metadata) if scored else _by_merges(pieces, metadata)
    layout = {
        "version": "1.0",
        "added_tokens": [_added(i, text, kinds[i] != USER, cut) for text, i in added],
        "post_processor": _begin(tokens, metadata, scored),
        **cut,
    }
    try:
        return Tokenizer.from_str(json.dumps(layout)).to_str(pretty=True)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"the file's tokenizer is damaged: {error}") from error


def _by_scores(pieces: Pieces, metadata: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return layout_of(pieces, bool(metadata.get("tokenizer.ggml.add_space_prefix", True)))
    except ValueError as error:
        raise ValueError(f"the file's SentencePiece tokenizer: {error}; {_REMEDY}") from error


def _by_merges(pieces: Pieces, metadata: Mapping[str, Any]) -> dict[str, Any]:
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    cut = next((cut for cut in CUTS if pre in cut.names), None)
    if kind != "gpt2" or cut is None:
        known = ", ".join(name for cut in CUTS for name in cut.names)
        raise ValueError(
            f"the file's tokenizer is of model {kind!r} and cuts text as {pre!r}; known are llama, and gpt2 with "
            f"{known}: {_REMEDY}"
        )
    used = pieces.of(*set(pieces.kinds) - {UNUSED})
    return {
        "normalizer": {"type": "NFC"} if cut.nfc else None,
        "pre_tokenizer": cut.pre[0] if len(cut.pre) == 1 else {"type": "Sequence", "pretokenizers": cut.pre},
        "decoder": _bytes(words=True),
        "model": {"type": "BPE", "vocab": used, "merges": _merges(metadata), "ignore_merges": cut.whole},
    }


_REMEDY = "convert the model from its Hugging Face directory"


def _one_each(metadata: Mapping[str, Any], name: str, tokens: list[str], default: float) -> list[Any]:
    """Return the numbers that a file gives to its tokens."""
    found = metadata.get(f"tokenizer.ggml.{name}", [default] * len(tokens))
    if not isinstance(found, list) or len(found) != len(tokens) or not all(type(n) in (int, float) for n in found):
        raise ValueError(f"tokenizer.ggml.{name} does not give one number for each of {len(tokens)} tokens")
    return found


def _texts(metadata: Mapping[str, Any], key: str) -> list[str]:
    found = metadata.get(key)
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise ValueError(f"{key} is missing, or no list of texts")
    return found


def _merges(metadata: Mapping[str, Any]) -> list[list[str]]:
    pairs = [merge.split(" ") for merge in _texts(metadata, "tokenizer.ggml.merges")]
    if odd := [pair for pair in pairs if len(pair) != 2]:
        raise ValueError(f"tokenizer.ggml.merges holds {' '.join(odd[0])!r}, which is not two tokens")
    return pairs


def _added(number: int, content: str, special: bool, cut: Mapping[str, Any]) -> Mapping[str, object]:
    """Describe an added token. The user's are found behind the replacement of spaces, where nothing else is done."""
    normalized = not special and (cut["normalizer"] or {}).get("type") == "Replace"
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    return {"id": number, "content": content, "special": special, "normalized": normalized} | flags


def _begin(tokens: list[str], metadata: Mapping[str, Any], usual: bool) -> Mapping[str, object] | None:
    """Put the token that begins a text before it, where the file says so. usual: where it does not say."""
    number = metadata.get("tokenizer.ggml.bos_token_id")
    if not metadata.get("tokenizer.ggml.add_bos_token", usual) or number is None:
        return None
    if type(number) is not int or number >= len(tokens):
        raise ValueError(f"tokenizer.ggml.bos_token_id is {number!r}, but there are {len(tokens)} tokens")
    name = tokens[number]
    bos = {"SpecialToken": {"id": name, "type_id": 0}}
    first, second = ({"Sequence": {"id": part, "type_id": n}} for n, part in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, bos, second],
        "special_tokens": {name: {"id": name, "ids": [number], "tokens": [name]}},
    }


def metadata_of(tokenizer: str, rows: int) -> dict[str, Any]:
    """Return what a GGUF file tells of a tokenizer.json, for a model whose embedding has this many rows.

    Ids without a token become unused ones. ValueError where GGUF has no words for how it cuts text.
    """
    layout = json.loads(tokenizer)
    model = layout["model"]
    prefix, cut = prefix_of(layout), next((cut for cut in CUTS if _cuts_so(layout, cut)), None)
    if model["type"] != "BPE" or (cut is None and prefix is None):
        raise ValueError(
            f"GGUF has no name for how this {model['type']} tokenizer cuts text; known are byte-level BPE tokenizers "
            "that cut as those of GPT-2, SmolLM, Llama 3 or Qwen 2 do, and SentencePiece's as Llama 2 and Gemma have it"
        )
    ids = [*model["vocab"].values(), *(each["id"] for each in layout["added_tokens"])]
    if (most := max(ids)) >= rows:
        raise ValueError(f"the tokenizer has the id {most}, but the model only {rows} rows")
    first = _first(layout)
    told: dict[str, Any] = {"add_bos_token": first is not None, "add_space_prefix": bool(prefix)}
    told |= {} if first is None else {"bos_token_id": first}
    if cut is None:
        pieces = pieces_of(layout, rows)
        told |= {"model": "llama", "pre": "default", "scores": pieces.scores}
    else:
        pieces = _named(layout, rows)
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
        told |= {"model": "gpt2", "pre": cut.names[0], "merges": merges}
    told |= {"tokens": pieces.texts, "token_type": pieces.kinds}
    return {f"tokenizer.ggml.{key}": value for key, value in told.items()}


def _named(layout: Mapping[str, Any], rows: int) -> Pieces:
    """Return the tokens of a byte-level tokenizer by id."""
    tokens, kinds = [f"[PAD{i}]" for i in range(rows)], [UNUSED] * rows
    special = {each["content"]: CONTROL if each["special"] else USER for each in layout["added_tokens"]}
    named = layout["model"]["vocab"] | {each["content"]: each["id"] for each in layout["added_tokens"]}
    for text, i in named.items():
        tokens[i], kinds[i] = text, special.get(text, NORMAL)
    return Pieces(tokens, kinds, [])


def _first(layout: Mapping[str, Any]) -> int | None:
    """Return the id that the tokenizer puts before a text, None where there is none."""
    post = layout["post_processor"] or {}
    for step in post.get("processors", [post]):
        if step.get("type") == "TemplateProcessing" and (special := step["single"][0].get("SpecialToken")):
            return step["special_tokens"][special["id"]]["ids"][0]
    return None


def _cuts_so(layout: Mapping[str, Any], cut: Cut) -> bool:
    pre = layout["pre_tokenizer"] or {}
    steps = pre["pretokenizers"] if pre.get("type") == "Sequence" else [pre]
    normal = layout["normalizer"]
    steps = [{key: value for key, value in step.items() if key != "trim_offsets"} for step in steps]  # of no id
    wanted = [{key: value for key, value in step.items() if key != "trim_offsets"} for step in cut.pre]
    return (
        steps == wanted
        and (normal or {}).get("type") == ("NFC" if cut.nfc else None)
        and layout["model"].get("ignore_merges", False) == cut.whole
    )
