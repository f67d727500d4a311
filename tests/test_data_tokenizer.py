"""Tokenizers: lossless, no control token from text, byte lengths that add up, clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from ironfn.data.tokenizer import CONTROLS, Vocabulary, byte_lengths, encode_around, load, pieces, train
from ironfn.data.tokenizer import encode as encode_batches
from ironfn.spec.records import TokenizerSpec

CORPUS = [f"def name_{i}(x):\n    return x + {i}  # und für déjà vu 漢字 😀\n" * 5 for i in range(40)]

KINDS = ("bpe", "wordpiece", "unigram")


def encode(vocabulary: Vocabulary, texts: list[str]) -> list[list[int]]:
    return [ids.tolist() for ids in encode_batches(vocabulary, texts)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Vocabulary]:
    folder = tmp_path_factory.mktemp("tokenizers")
    found = {}
    for kind in KINDS:
        path = folder / f"{kind}.json"
        path.write_text(train(iter(CORPUS), TokenizerSpec(kind=kind, vocab_size=400)))
        found[kind] = load(path)
    return found


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(text=st.text() | st.text(alphabet="ab <|>_endoftxfimprmsul\n") | st.sampled_from(CONTROLS))
def test_every_text_survives_and_gives_no_control_token(trained: dict[str, Vocabulary], kind: str, text: str) -> None:
    vocabulary = trained[kind]
    (ids,) = encode(vocabulary, [text])
    assert vocabulary.tokenizer.decode(ids, skip_special_tokens=False) == text
    assert vocabulary.controls.keys().isdisjoint(ids)
    assert byte_lengths(vocabulary)[ids].sum() == len(text.encode())


@pytest.mark.parametrize("kind", KINDS)
def test_trained_vocabulary(trained: dict[str, Vocabulary], kind: str) -> None:
    vocabulary = trained[kind]
    assert vocabulary.size <= 400
    assert [vocabulary.tokenizer.token_to_id(name) for name in CONTROLS] == [0, 1, 2, 3]
    assert (vocabulary.eos, vocabulary.unknown, vocabulary.joins) == (0, None, True)
    assert sorted(vocabulary.controls) == [0, 1, 2, 3]
    long = "a" * 5000 + "é" * 5000 + "".join(map(chr, range(256)))
    (ids,) = encode(vocabulary, [long])
    assert vocabulary.tokenizer.decode(ids, skip_special_tokens=False) == long


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_training_is_deterministic(kind: Any) -> None:
    spec = TokenizerSpec(kind=kind, vocab_size=500)
    assert train(iter(CORPUS), spec) == train(iter(CORPUS), spec)


def test_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match=r"vocab_size 259 is too small.*260"):
        train(CORPUS, TokenizerSpec(vocab_size=259))


def custom(path: Path, change: Any = lambda layout: layout, special: tuple[str, ...] = ("</s>",)) -> Path:
    """Write a small word-break BPE tokenizer as somebody else would, changed as asked."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    path.write_text(json.dumps(change(json.loads(tokenizer.to_str()))))
    return path


def test_end_token_is_found_or_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    assert load(custom(path)).eos == 0
    assert load(custom(path, special=("<s>", "<eos>"))).eos == 1
    custom(path, special=("<s>", "<stop>"))
    with pytest.raises(ValueError, match=r"usual end-of-text tokens .*set data\.tokenizer\.eos"):
        load(path)
    assert load(path, "<stop>").eos == 1
    with pytest.raises(ValueError, match="has no token '<end>'"):
        load(path, "<end>")
    path.write_text('{"version": "1.0"}')
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer\.json"):
        load(path)


def test_an_end_token_that_is_not_flagged_special_is_still_out_of_reach(tmp_path: Path) -> None:
    def unflag(layout: dict[str, Any]) -> dict[str, Any]:
        for token in layout["added_tokens"]:
            token["special"] = False
        return layout

    vocabulary = load(custom(tmp_path / "t.json", unflag, ("<|endoftext|>", "<|fim_prefix|>")))
    (ids,) = encode(vocabulary, ["a<|endoftext|>b<|fim_prefix|>"])
    assert {0, 1}.isdisjoint(ids)


def test_a_model_that_spells_a_control_token_is_outwitted(tmp_path: Path) -> None:
    # A Unigram vocabulary without pre-tokenisation holds "</s>" as a piece of its own, and its best one.
    vocab = [("<unk>", 0.0), ("</s>", 0.0), *((c, -5.0) for c in "</s>ab")]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=False))
    tokenizer.add_special_tokens(["</s>"])
    path = tmp_path / "t.json"
    tokenizer.save(str(path))
    vocabulary = load(path)
    assert encode(vocabulary, ["a</s>b"])[0].count(1) == 1  # what the guard is for
    ids = encode_around(vocabulary, "a</s>b</s>")
    assert 1 not in ids
    assert "".join(tokenizer.id_to_token(i) for i in ids) == "a</s>b</s>"
    assert vocabulary.unknown == 0


def test_truncation_padding_and_dropout_of_a_file_are_switched_off(tmp_path: Path) -> None:
    def limit(layout: dict[str, Any]) -> dict[str, Any]:
        layout["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
        layout["padding"] = {
            "strategy": {"Fixed": 50},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "</s>",
        }
        layout["model"]["dropout"] = 0.5
        return layout

    vocabulary = load(custom(tmp_path / "t.json", limit))
    text = "def name(x): return x"
    once, again = encode(vocabulary, [text, text])
    assert once == again
    assert vocabulary.tokenizer.decode(once) == text
    assert len(once) > 4


def test_a_template_that_adds_a_start_token_adds_none_here(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    path = custom(tmp_path / "t.json", special=("<s>", "</s>"))
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    tokenizer.save(str(path))
    assert {0, 1}.isdisjoint(encode(load(path), ["hello"])[0])


def test_byte_lengths_of_sentencepiece_like_and_wordpiece_files(tmp_path: Path) -> None:
    bpe = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    bpe.normalizer = normalizers.Replace(" ", "▁")
    bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    names = ["<unk>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "é", "▁a"]
    vocab = {name: i for i, name in enumerate(names)}
    bpe.model = models.BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True, unk_token="<unk>")
    bpe.add_special_tokens(["<unk>", "</s>"])
    bpe.save(str(tmp_path / "bpe.json"))
    vocabulary = load(tmp_path / "bpe.json")
    text = "a é aa 漢"
    ids = encode(vocabulary, [text])[0]
    assert vocabulary.tokenizer.decode(ids, skip_special_tokens=False) == text
    assert byte_lengths(vocabulary)[ids].sum() == len(text.encode())

    words = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "[EOS]": 1, "play": 2, "##ing": 3}, unk_token="[UNK]"))
    words.add_special_tokens(["[UNK]", "[EOS]"])
    words.save(str(tmp_path / "words.json"))
    assert byte_lengths(load(tmp_path / "words.json")).tolist() == [0, 0, 5, 3]


def test_prefix_space_tokenizers_are_known_not_to_join(tmp_path: Path) -> None:
    path = custom(tmp_path / "t.json")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.save(str(path))
    assert not load(path).joins


@settings(deadline=None)
@given(
    lines=st.lists(st.text(alphabet="abé漢 ._'1\t\r\n", max_size=30), max_size=40),
    size=st.integers(1, 40),
)
@pytest.mark.parametrize("kind", KINDS)
def test_cutting_a_long_text_changes_no_token(
    trained: dict[str, Vocabulary], kind: str, lines: list[str], size: int
) -> None:
    vocabulary, text = trained[kind], "\n".join(lines)
    parts = pieces(text, vocabulary, size)
    assert "".join(parts) == text
    assert [i for ids in encode(vocabulary, parts) for i in ids] == encode(vocabulary, [text])[0]


def test_cutting_changes_no_token_of_published_patterns(tmp_path: Path) -> None:
    from tokenizers import Regex

    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )
    path = custom(tmp_path / "t.json")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.save(str(path))
    vocabulary = load(path)
    for source in sorted(Path(json.__file__).parent.glob("*.py")):
        text = source.read_text(encoding="utf-8")
        parts = pieces(text, vocabulary, 100)
        assert len(parts) > len(text) / 200
        assert [i for ids in encode(vocabulary, parts) for i in ids] == encode(vocabulary, [text])[0]


def test_batches_keep_their_order(trained: dict[str, Vocabulary], monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["", "one", "two two", "", "three three three"] * 3
    whole = encode(trained["bpe"], texts)
    for size in (1, 4, 7, 1000):
        monkeypatch.setattr("ironfn.data.tokenizer._BATCH", size)
        assert encode(trained["bpe"], texts) == whole
    assert encode(trained["bpe"], []) == []
