"""Read what a model's small files say of its texts: which ids end one, which tokens are special, how a chat is written.

Files: those of a Hugging Face directory by name, as `directory.Described.carried` holds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ironfn.hf.untrusted import parse_json

CONFIG, GENERATION, TOKENIZER_CONFIG = "config.json", "generation_config.json", "tokenizer_config.json"
TEMPLATE, PROCESSOR = "chat_template.jinja", "chat_template.json"
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def ends(files: Mapping[str, bytes]) -> tuple[int, ...]:
    """Return the ids that end a text, by the first file that names any."""
    for name in (GENERATION, CONFIG):
        told = _parsed(files, name).get("eos_token_id")
        if ids := tuple(i for i in (told if isinstance(told, list) else [told]) if type(i) is int):
            return ids
    return ()


def specials(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the text of each special token that the tokenizer's config names, by what it is called there."""
    config = _parsed(files, TOKENIZER_CONFIG)
    found = {name: _content(config.get(name)) for name in SPECIAL}
    return {name: text for name, text in found.items() if text is not None}


def _content(told: object) -> str | None:
    told = told.get("content") if isinstance(told, dict) else told
    return told if isinstance(told, str) else None


def chat_template(files: Mapping[str, bytes], *, tools: bool = False) -> str | None:
    """Return the Jinja text of the chat template, which nothing here renders.

    A file of its own goes before the tokenizer's config; of several templates ``tools`` takes the one for tools.
    """
    if TEMPLATE in files:
        return files[TEMPLATE].decode("utf-8")
    for name in (PROCESSOR, TOKENIZER_CONFIG):
        told = _parsed(files, name).get("chat_template")
        if isinstance(told, str):
            return told
        if isinstance(told, list):
            named = {each.get("name"): each.get("template") for each in told if isinstance(each, dict)}
            found = (named.get("tool_use") if tools else None) or named.get("default")
            return found if isinstance(found, str) else None
    return None


def _parsed(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    return parse_json(files[name], name) if name in files else {}
