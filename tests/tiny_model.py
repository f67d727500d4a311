"""A small model of random weights that talks, written as a run without `transformers`."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer

from drivers.imported import keep_model
from ironfn.data.tokenizer import train
from ironfn.mesh.axis import SINGLE
from ironfn.model.arch import complete
from ironfn.model.init import init
from ironfn.model.tables import table
from ironfn.spec.records import ModelSpec, TokenizerSpec

from .chat_templates import TEMPLATES

START, END, POISON = 300, 301, 302
"""The ids of <|im_start|> and <|im_end|>, and of a token whose embedding is no number. No greedy text holds them."""
TEXT = "the quick brown fox jumps over the lazy dog; 漢字 🙂 naïve\n" * 20


def tiny_model(folder: Path, context: int = 512, template: bool = True) -> Path:
    """Write a run directory at ``folder`` and return it."""
    tokenizer = Tokenizer.from_str(train([TEXT], TokenizerSpec(vocab_size=300)))
    tokenizer.add_tokens(
        [AddedToken(f"<unused-{n}>", normalized=False) for n in range(tokenizer.get_vocab_size(), 300)]
    )
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|poison|>"])
    spec = ModelSpec(
        vocab_size=303, width=32, layers=2, heads=4, kv_heads=2, ffn=48, context=context, init_std=0.5, tied=False
    )
    arch = complete(spec, 1)
    params = init(arch, 3, table(False), SINGLE)
    with torch.no_grad():
        params["head"]["w"][[0, START, END, POISON]] = 0  # pyright: ignore  (a logit of 0 is never the highest)
        params["embed"]["tokens"][POISON] = float("nan")  # pyright: ignore
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    carried = {
        "tokenizer_config.json": json.dumps(config).encode(),
        "generation_config.json": json.dumps({"eos_token_id": [END]}).encode(),
    }
    if template:
        carried["chat_template.jinja"] = TEMPLATES["chatml"].encode()
    keep_model(
        folder, spec, arch, params, torch.float32, tokenizer=tokenizer.to_str().encode(), eos=END, carried=carried
    )
    return folder
