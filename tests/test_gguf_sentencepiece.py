"""SentencePiece's vocabularies through GGUF files: the ids that sentencepiece itself gives, or a refusal."""

from __future__ import annotations

import io
import itertools
import json
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
from sentencepiece import sentencepiece_model_pb2 as proto
from tokenizers import Tokenizer
from transformers.tokenization_utils_base import generate_merges

from ironfn import tree
from ironfn.hf.gguf_file import read
from ironfn.hf.gguf_save import Words, save_gguf
from ironfn.hf.gguf_sentencepiece import BYTE, NORMAL, UNUSED, USER
from ironfn.hf.gguf_tokenizer import metadata_of, tokenizer_of
from ironfn.model.arch import complete
from ironfn.model.init import shapes
from ironfn.spec.records import ModelSpec

from .test_gguf_tokenizer import ODD, TEXT

PARTS = (
    "a", "the", " ", "  ", "\t", "\n", "\r\n", "é", "e\u0301", "日本", "한국어", "🤗", "👩‍👧", "\u200b", "\x00", "\x7f",
    "\ufeff", "<s>", "</s>", "<unk>", "<0x41>", "12", "\u00a0", "\u3000", "ﬁ", "Ａ", "▁", "(self", "return", "<u>",
)  # fmt: skip
_DRAW = random.Random(0)
CORPUS = [
    "", TEXT, ODD, *("".join(_DRAW.choices(PARTS, k=_DRAW.randint(1, 20))) for _ in range(300)),
    *(part * n for part in (" ", "-", "a", "ab ", "\n") for n in range(1, 40)),
]  # fmt: skip
Spm = sentencepiece.SentencePieceProcessor


def trained(kind: str = "bpe", **options: Any) -> Spm:
    """Train as Llama's was trained (the values of meta-llama/Llama-2-7b's tokenizer.model)."""
    model = io.BytesIO()
    usual: dict[str, Any] = {
        "vocab_size": 700, "byte_fallback": True, "split_digits": True, "allow_whitespace_only_pieces": True,
        "remove_extra_whitespaces": False, "normalization_rule_name": "identity", "minloglevel": 2, "num_threads": 1,
    }  # fmt: skip
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()), model_writer=model, model_type=kind, **usual | options
    )
    return Spm(model_proto=model.getvalue())


def kinds_of(spm: Spm) -> list[int]:
    model = proto.ModelProto.FromString(spm.serialized_model_proto())
    return [piece.type for piece in model.pieces]  # ggml has taken its numbers from sentencepiece


def written(path: Path, spm: Spm, prefix: bool) -> dict[str, Any]:
    """Write a vocabulary as llama.cpp's converter does, by its own package, and read what ironfn sees of it."""
    ids = range(spm.get_piece_size())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([spm.id_to_piece(i) for i in ids])
    writer.add_token_scores([spm.get_score(i) for i in ids])
    writer.add_token_types(kinds_of(spm))
    writer.add_add_space_prefix(prefix)
    writer.add_bos_token_id(spm.bos_id())
    writer.add_tensor("none", np.zeros(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dict(read(path).metadata)


def plain(tokenizer: str) -> Tokenizer:
    """Return a tokenizer that takes the names of control tokens for text, as sentencepiece does."""
    found = Tokenizer.from_str(tokenizer)
    found.encode_special_tokens = True
    return found


def same(tokenizer: str, spm: Spm, corpus: list[str] = CORPUS) -> None:
    ours = plain(tokenizer)
    for text in corpus:
        ids = spm.encode(text)
        assert ours.encode(text, add_special_tokens=False).ids == ids, text
        if spm.unk_id() not in ids:  # which is decoded as ⁇ there
            assert ours.decode(ids, skip_special_tokens=False) == spm.decode(ids)


LLAMA, GEMMA = {"add_dummy_prefix": True}, {"add_dummy_prefix": False, "user_defined_symbols": ["\n\n", "▁▁", "<u>"]}


@pytest.mark.parametrize("style", ["llama", "gemma", "without bytes"])
def test_the_ids_are_those_of_sentencepiece(style: str, tmp_path: Path) -> None:
    options = {"llama": LLAMA, "gemma": GEMMA, "without bytes": LLAMA | {"byte_fallback": False}}[style]
    spm = trained(**options)
    told = written(tmp_path / "model.gguf", spm, options["add_dummy_prefix"])
    found = tokenizer_of(told)
    same(found, spm)
    assert plain(found).encode("x").ids[0] == spm.bos_id()  # llama.cpp's default for this kind


def test_the_merges_are_those_of_transformers(tmp_path: Path) -> None:
    spm = trained()
    model = json.loads(tokenizer_of(written(tmp_path / "model.gguf", spm, True)))["model"]
    normal = [i for i, kind in enumerate(kinds_of(spm)) if kind == NORMAL]
    vocab, scores = {spm.id_to_piece(i): i for i in normal}, {spm.id_to_piece(i): spm.get_score(i) for i in normal}
    assert [tuple(merge) for merge in model["merges"]] == generate_merges(vocab, scores)
    assert len(model["merges"]) > 300


def made(unions: dict[str, float]) -> Spm:
    """Return a vocabulary of the letters a and b, the space, and these unions."""
    model = proto.ModelProto()
    model.trainer_spec.model_type = 2
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.remove_extra_whitespaces = False
    letters = dict.fromkeys("ab▁", -1000.0)
    for text, score in {"<unk>": 0.0, "<s>": 0.0, "</s>": 0.0, **letters, **unions}.items():
        kind = {"<unk>": 2, "<s>": 3, "</s>": 3}.get(text, NORMAL)
        model.pieces.add(piece=text, score=score, type=kind)
    return Spm(model_proto=model.SerializeToString())


def test_any_order_of_any_pieces_gives_the_ids_of_sentencepiece(tmp_path: Path) -> None:
    """Random vocabularies, their runs of spaces with one score as Llama's, on every text up to eight characters."""
    texts = ["".join(each) for n in range(1, 8) for each in itertools.product("ab ", repeat=n)]
    for seed in range(20):
        draw = random.Random(seed)
        pool = [
            "".join(each) for n in (2, 3, 4, 5) for each in itertools.product("ab▁", repeat=n) if set(each) != {"▁"}
        ]
        chosen = draw.sample(pool, 40)
        unions = {text: -float(n) for n, text in enumerate(chosen)}
        runs = {"▁" * n: -1e9 for n in draw.sample(range(2, 20), 9)}
        spm = made(unions | runs)
        corpus = [*draw.sample(texts, 300), *(" " * n for n in range(60)), " " * 30 + "a" + " " * 25]
        same(tokenizer_of(written(tmp_path / "model.gguf", spm, True)), spm, corpus)


@pytest.mark.parametrize("style", ["llama", "gemma"])
def test_a_tokenizer_goes_out_and_in(style: str, tmp_path: Path) -> None:
    options = {"llama": LLAMA, "gemma": GEMMA}[style]
    spm = trained(**options)
    before = tokenizer_of(written(tmp_path / "theirs.gguf", spm, options["add_dummy_prefix"]))
    rows = spm.get_piece_size() + 20
    arch = complete(ModelSpec(vocab_size=rows, width=32, layers=1, heads=4, ffn=64), 1)
    leaves = tree.flatten(tree.unflatten({path: torch.zeros(shape) for path, shape in shapes(arch).items()}))
    save_gguf(tmp_path / "ours.gguf", leaves, arch, Words(before, 1, 2))
    told = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "ours.gguf").fields.items()}
    assert told["tokenizer.ggml.model"] == "llama"
    assert told["tokenizer.ggml.add_space_prefix"] is options["add_dummy_prefix"]
    assert told["tokenizer.ggml.add_bos_token"] is True
    kinds = told["tokenizer.ggml.token_type"]
    assert kinds == kinds_of(spm) + [UNUSED] * 20
    pieces = [spm.id_to_piece(i) for i in range(spm.get_piece_size())]
    assert told["tokenizer.ggml.tokens"][:-20] == [
        piece.replace("▁", " ") if kind == USER else piece for piece, kind in zip(pieces, kinds, strict=False)
    ]
    after = tokenizer_of(read(tmp_path / "ours.gguf").metadata)
    assert after == before
    same(after, spm)


def test_runs_of_spaces_with_one_score_go_out_and_in(tmp_path: Path) -> None:
    spm = made({"ab": -1.0, "▁a": -2.0} | {"▁" * n: -1e9 for n in (2, 3, 4, 8, 16)})
    before = tokenizer_of(written(tmp_path / "model.gguf", spm, True))
    told = metadata_of(before, spm.get_piece_size())
    three, four, eight = (told["tokenizer.ggml.scores"][spm.piece_to_id("▁" * n)] for n in (3, 4, 8))
    assert three == four < eight  # 3 + 1, 2 + 2, 2 + 1, 1 + 3, 1 + 2: no score for each alone puts them so
    assert tokenizer_of(told) == before


def test_the_merges_of_older_files_mean_the_same(tmp_path: Path) -> None:
    """`transformers` once wrote a union's pairs in another order, as texts, and runs of spaces one after the other."""
    spm = trained()
    layout = json.loads(tokenizer_of(written(tmp_path / "model.gguf", spm, True)))
    vocab, merges = layout["model"]["vocab"], layout["model"]["merges"]
    grouped = [sorted(group, key=lambda pair: (vocab[pair[0]], vocab[pair[1]])) for _, group in
               itertools.groupby(merges, "".join)]  # fmt: skip
    layout["model"]["merges"] = [" ".join(pair) for group in grouped for pair in group]
    assert layout["model"]["merges"] != [" ".join(pair) for pair in merges]
    same(tokenizer_of(metadata_of(json.dumps(layout), 700)), spm)


def test_what_gemma_adds_as_text_with_the_sign_for_spaces_is_made_by_merges(tmp_path: Path) -> None:
    spm = made({"▁▁": -1.0, "▁▁▁": -2.0, "ab": -3.0})
    layout = json.loads(tokenizer_of(written(tmp_path / "model.gguf", spm, False)))
    plain_flags = dict.fromkeys(("special", "single_word", "lstrip", "rstrip", "normalized"), False)
    layout["added_tokens"] += [{"id": spm.piece_to_id(text), "content": text} | plain_flags for text in ("▁▁", "▁▁▁")]
    layout["pre_tokenizer"] = {
        "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False,
    }  # fmt: skip
    before = Tokenizer.from_str(json.dumps(layout))
    after = Tokenizer.from_str(tokenizer_of(metadata_of(json.dumps(layout), spm.get_piece_size())))
    for text in ("a  b   ab", "    ", "     ab"):
        assert after.encode(text).ids == before.encode(text).ids


def told_by(spm: Spm) -> dict[str, Any]:
    ids = range(spm.get_piece_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [spm.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [spm.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": kinds_of(spm),
    }


def changed(name: str, text: str, value: Any) -> dict[str, Any]:
    """Return the metadata of a trained vocabulary with one piece's value changed."""
    told = told_by(trained())
    told[f"tokenizer.ggml.{name}"][told["tokenizer.ggml.tokens"].index(text)] = value
    return told


REFUSED: dict[str, tuple[Any, str]] = {
    "unigram": (lambda: told_by(trained("unigram")), "as logarithms of a unigram model are"),
    "one score": (lambda: told_by(made({"ab": -1.0, "ba": -1.0})), "'ab' and 'ba' have one score"),
    "no number": (lambda: changed("scores", "▁a", float("nan")), "has the score nan"),
    "unused": (lambda: changed("token_type", "▁a", UNUSED), "'▁a' is unused"),
    "a byte less": (lambda: changed("token_type", "<0x0A>", UNUSED), "'<0x0A>' is missing"),
    "a byte more": (lambda: changed("token_type", "▁a", BYTE), "'▁a' is missing or too many"),
    "nothing for the unknown": (
        lambda: told_by(made({})) | {"tokenizer.ggml.token_type": [UNUSED, 3, 3, 1, 1, 1]}, "text would be lost",
    ),
    "a piece without end": (lambda: changed("tokens", "▁a", "a" * 200), "pieces of more than 128 characters"),
    "scores for some": (lambda: told_by(made({})) | {"tokenizer.ggml.scores": [0.0]}, "one number for each of 6"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_merges_cannot_say_is_refused(case: str) -> None:
    make, why = REFUSED[case]
    with pytest.raises(ValueError, match=why):
        tokenizer_of(make())


def edit(change: Any) -> str:
    layout = json.loads(tokenizer_of(told_by(made({"ab": -1.0, "aab": -2.0, "aba": -3.0, "ba": -4.0}))))
    change(layout)
    return json.dumps(layout)


METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
LOST: dict[str, tuple[Any, str]] = {
    "a pair less": (lambda x: x["model"]["merges"].remove(["b", "a"]), "lacks 'b' 'a'"),
    "merges apart": (
        lambda x: x["model"]["merges"].append(x["model"]["merges"].pop(x["model"]["merges"].index(["ab", "a"]))),
        "have one score",
    ),
    "a space where none is": (
        lambda x: x.update(normalizer=None, pre_tokenizer=METASPACE), "no name for how this BPE tokenizer cuts",
    ),
    "bytes that are not used": (lambda x: x["model"].update(byte_fallback=True), "unknown text becomes bytes"),
    "unknown pieces apart": (lambda x: x["model"].update(fuse_unk=False), "else one unknown piece"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(LOST))
def test_what_scores_cannot_say_is_refused(case: str) -> None:
    change, why = LOST[case]
    assert metadata_of(edit(lambda layout: None), 20)["tokenizer.ggml.model"] == "llama"
    with pytest.raises(ValueError, match=why):
        metadata_of(edit(change), 20)
