"""Make a tokenizer of what a GGUF file tells of it, and tell the same of a tokenizer: byte-level BPE, as GPT-2's.

A GGUF names the way that text is cut before the merges (``tokenizer.ggml.pre``); how each name cuts is written in
llama.cpp's `llama-vocab.cpp`. Here it is a row of `CUTS`; a tokenizer that cuts otherwise cannot be told of.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from attrs import frozen
from tokenizers import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER, UNUSED = 1, 2, 3, 4, 5
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
    """Return the tokenizer.json that a GGUF file's metadata describes. ValueError where it is not one of `CUTS`."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    cut = next((cut for cut in CUTS if pre in cut.names), None)
    if kind != "gpt2" or cut is None:
        known = ", ".join(name for cut in CUTS for name in cut.names)
        raise ValueError(
            f"the file's tokenizer is of model {kind!r} and cuts text as {pre!r}; known is gpt2 with {known}: give the "
            "model's own tokenizer.json beside it"
        )
    tokens = _texts(metadata, "tokenizer.ggml.tokens")
    kinds = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type does not give one type for each of {len(tokens)} tokens")
    used = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != UNUSED}
    if len(used) != sum(kind != UNUSED for kind in kinds):
        raise ValueError("tokenizer.ggml.tokens holds a token twice: which id it has cannot be told")
    added = [(i, tokens[i], kind == CONTROL) for i, kind in enumerate(kinds) if kind in (CONTROL, USER)]
    model = {"type": "BPE", "vocab": used, "merges": _merges(metadata), "ignore_merges": cut.whole}
    layout = {
        "version": "1.0",
        "added_tokens": [_added(*each) for each in added],
        "normalizer": {"type": "NFC"} if cut.nfc else None,
        "pre_tokenizer": cut.pre[0] if len(cut.pre) == 1 else {"type": "Sequence", "pretokenizers": cut.pre},
        "post_processor": _begin(tokens, metadata),
        "decoder": _bytes(words=True),
        "model": model,
    }
    try:
        return Tokenizer.from_str(json.dumps(layout)).to_str(pretty=True)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"the file's tokenizer is damaged: {error}") from error


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


def _added(number: int, content: str, special: bool) -> Mapping[str, object]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": special} | plain


def _begin(tokens: list[str], metadata: Mapping[str, Any]) -> Mapping[str, object] | None:
    """Put the token that begins a text before it, where the file says so."""
    number = metadata.get("tokenizer.ggml.bos_token_id")
    if not metadata.get("tokenizer.ggml.add_bos_token", False) or number is None:
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
    cut = next((cut for cut in CUTS if _cuts_so(layout, cut)), None)
    if model["type"] != "BPE" or cut is None:
        raise ValueError(
            f"GGUF has no name for how this {model['type']} tokenizer cuts text; known are byte-level BPE tokenizers "
            "that cut as those of GPT-2, SmolLM, Llama 3 or Qwen 2 do"
        )
    tokens, kinds = [f"[PAD{i}]" for i in range(rows)], [UNUSED] * rows
    special = {each["content"]: CONTROL if each["special"] else USER for each in layout["added_tokens"]}
    named = model["vocab"] | {each["content"]: each["id"] for each in layout["added_tokens"]}
    if (most := max(named.values())) >= rows:
        raise ValueError(f"the tokenizer has the id {most}, but the model only {rows} rows")
    for text, i in named.items():
        tokens[i], kinds[i] = text, special.get(text, NORMAL)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    told = {"model": "gpt2", "pre": cut.names[0], "tokens": tokens, "token_type": kinds, "merges": merges}
    return {f"tokenizer.ggml.{key}": value for key, value in told.items()}


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
