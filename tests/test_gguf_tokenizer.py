"""Tokenizers through GGUF's metadata: the same ids on real text, and no guess where GGUF has no word for one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from ironfn.data.tokenizer import train
from ironfn.hf.gguf_tokenizer import CUTS, UNUSED, Cut, metadata_of, tokenizer_of
from ironfn.spec.records import TokenizerSpec

TEXT = Path(argparse.__file__).read_text(encoding="utf-8")
ODD = (
    "İstanbul ǅ ½ ² ٣٤ 12345 a1b2  \u00a0\u3000x\r\n\t\t I'M don't\u2019t"
    " 日本語 한국어 🤗👩‍👧 e\u0301 \u200b <|im_end|>   \n \n  z"
)
TRAINED = json.loads(train([TEXT], TokenizerSpec(vocab_size=600)))


def cutting(cut: Cut, **more: Any) -> str:
    """Return a trained tokenizer.json that cuts text as this row says."""
    steps = [dict(step) for step in cut.pre]
    layout = TRAINED | {
        "pre_tokenizer": steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps},
        "normalizer": {"type": "NFC"} if cut.nfc else None,
        "model": TRAINED["model"] | {"ignore_merges": cut.whole},
    }
    return json.dumps(layout | more)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.names[0])
def test_a_tokenizer_comes_back_with_the_same_ids(cut: Cut) -> None:
    before = cutting(cut)
    told = metadata_of(before, 640)
    assert told["tokenizer.ggml.pre"] == cut.names[0]
    assert told["tokenizer.ggml.token_type"].count(UNUSED) == 40
    first, second = Tokenizer.from_str(before), Tokenizer.from_str(tokenizer_of(told))
    assert first.get_vocab() == second.get_vocab()
    for text in (TEXT, ODD):
        assert ids(second, text) == ids(first, text)
        assert second.decode(ids(second, text), skip_special_tokens=False) == first.decode(
            ids(first, text), skip_special_tokens=False
        )
    assert {t.content for t in second.get_added_tokens_decoder().values() if t.special} == {
        t["content"] for t in TRAINED["added_tokens"]
    }


@pytest.mark.parametrize(
    "cut", [cut for cut in CUTS if cut.names[0] in ("gpt-2", "llama-bpe", "qwen2")], ids=lambda c: c.names[0]
)
def test_transformers_makes_the_same_tokenizer_of_the_metadata(cut: Cut) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    told = metadata_of(cutting(cut), 600)
    theirs, _ = convert_gguf_tokenizer(
        "llama",
        {
            "tokenizer_type": "gpt2",
            "pre_tokenizer_type": cut.names[0],
            "tokens": told["tokenizer.ggml.tokens"],
            "token_type": told["tokenizer.ggml.token_type"],
            "merges": told["tokenizer.ggml.merges"],
        },
    )
    ours = Tokenizer.from_str(tokenizer_of(told))
    composed = ODD.replace("e\u0301", "é")  # theirs leaves NFC out
    for text in (TEXT, composed):
        assert ids(ours, text) == ids(theirs, text)


def test_the_begin_of_a_text_is_put_there_where_the_file_says_so() -> None:
    told = metadata_of(cutting(CUTS[0]), 600) | {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.add_bos_token": True}
    found = Tokenizer.from_str(tokenizer_of(told))
    assert found.encode("x = 1").ids == [0, *ids(found, "x = 1")]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        pytest.param({"tokenizer.ggml.model": "t5"}, "model 't5'.*known are llama, and gpt2 with gpt-2", id="model"),
        pytest.param({"tokenizer.ggml.pre": "default"}, "cuts text as 'default'", id="cut"),
        pytest.param({"tokenizer.ggml.token_type": [1]}, "one number for each", id="types"),
        pytest.param({"tokenizer.ggml.tokens": ["a", 1]}, "no list of texts", id="tokens"),
        pytest.param({"tokenizer.ggml.merges": ["a b c"]}, "not two tokens", id="merge"),
        pytest.param({"tokenizer.ggml.merges": ["qqq zzz"]}, "damaged", id="merge-of-nothing"),
        pytest.param(
            {"tokenizer.ggml.bos_token_id": 999, "tokenizer.ggml.add_bos_token": True}, "600 tokens", id="bos"
        ),
    ],
)
def test_what_cannot_be_a_tokenizer_is_refused(change: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        tokenizer_of(metadata_of(cutting(CUTS[0]), 600) | change)


def test_a_token_twice_is_refused() -> None:
    told = metadata_of(cutting(CUTS[0]), 600)
    told["tokenizer.ggml.tokens"][300] = told["tokenizer.ggml.tokens"][301]
    with pytest.raises(ValueError, match="twice"):
        tokenizer_of(told)


def test_a_tokenizer_that_gguf_has_no_name_for_is_refused() -> None:
    with pytest.raises(ValueError, match="no name for how this BPE tokenizer cuts"):
        metadata_of(cutting(CUTS[0], normalizer={"type": "Lowercase"}), 600)
    with pytest.raises(ValueError, match="no name for how this WordPiece"):
        metadata_of(train([TEXT], TokenizerSpec(kind="wordpiece", vocab_size=600)), 600)
    with pytest.raises(ValueError, match="has the id 599, but the model only 599 rows"):
        metadata_of(cutting(CUTS[0]), 599)
