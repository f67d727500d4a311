"""Text comes whole: joined pieces are the full decoding; no half character shows, nor what may begin a stop string."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.decoders import DecodeStream

from ironfn.data.tokenizer import train
from ironfn.generate.text import Tail, Words, last, pieces, tell
from ironfn.spec.records import TokenizerSpec

CORPUS = ["def name(x):\n    return x  # für déjà vu 漢字 😀 e\u0301 n't .\n" * 9]
CONTROL = "<|endoftext|>"
HOSTILE = (
    "x😀漢é",
    "👩\u200d👩\u200d👧\u200d👦 🏳️\u200d🌈 🇩🇪",  # many code points, one picture
    "e\u0301a\u0308\u0323 \u0644\u0627\u0651",  # combining marks
    "\ufffd a \ufffd\ufffd",  # the replacement character itself
    "  two  spaces\n\n\ttabs\r\n ",
    "do n't , . ! 's \u00a0\u2028",
    "\u0000\u007f\u0080\uffff\U0010ffff",
    "",
)


def sentencepiece_style(*decoding: decoders.Decoder, words: Sequence[str] = ()) -> Tokenizer:
    """Llama's: ▁ for a space, bytes for what it has no token for."""
    vocab = {name: i for i, name in enumerate(["<unk>", CONTROL, *(f"<0x{byte:02X}>" for byte in range(256))])}
    vocab |= {name: len(vocab) + i for i, name in enumerate(["▁", "a", "b", "x", "é", "▁a", "▁x", *words])}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=[("▁", "a"), ("▁", "x")], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # pyright: ignore
    tokenizer.decoder = decoders.Sequence(  # pyright: ignore
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *decoding]
    )
    tokenizer.add_special_tokens([CONTROL])
    return tokenizer


def bert_style() -> Tokenizer:
    names = ["[UNK]", CONTROL, "do", "n", "'", "t", "n't", "##n", "##'", "##t", ".", "!", "x", "##x", "😀", "##é", "漢"]
    tokenizer = Tokenizer(models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # pyright: ignore
    tokenizer.decoder = decoders.WordPiece()  # pyright: ignore
    tokenizer.add_special_tokens([CONTROL])
    return tokenizer


def spaces_first() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={"▁a": 0, "b": 1, "<unk>": 2, "▁": 3}, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()  # pyright: ignore
    return tokenizer


def word_ends() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={"a</w>": 0, "b": 1, "<unk>": 2}, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.BPEDecoder()  # pyright: ignore
    return tokenizer


def bytes_of(kind: str) -> Tokenizer:
    return Tokenizer.from_str(train(iter(CORPUS), TokenizerSpec(kind=kind, vocab_size=300)))  # pyright: ignore


TOKENIZERS = {
    "byte-level bpe": bytes_of("bpe"),
    "byte-level wordpiece": bytes_of("wordpiece"),
    "byte-level unigram": bytes_of("unigram"),
    "llama": sentencepiece_style(decoders.Strip(" ", 1, 0)),
    "gemma": sentencepiece_style(),
    "bert": bert_style(),
    "metaspace": spaces_first(),
    "word ends": word_ends(),
}
ANY_IDS = [name for name in TOKENIZERS if name not in ("llama", "gemma")]


def joined(words: Words, ids: Sequence[int]) -> str:
    return "".join(pieces(words, ids))


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None)
@given(text=st.sampled_from(HOSTILE) | st.text() | st.text(alphabet="a x😀漢é\u0301\ufffd"), shown=st.booleans())
def test_joined_pieces_are_the_full_decoding_of_a_text(name: str, text: str, shown: bool) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text).ids
    assert joined(Words(tokenizer, control_tokens=shown), ids) == tokenizer.decode(ids, skip_special_tokens=not shown)


@pytest.mark.parametrize("name", ANY_IDS)
@settings(deadline=None)
@given(data=st.data(), shown=st.booleans())
def test_joined_pieces_are_the_full_decoding_of_any_ids(name: str, data: st.DataObject, shown: bool) -> None:
    """Byte-level ids that are no UTF-8 at all, control tokens among text."""
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=14))
    assert joined(Words(tokenizer, control_tokens=shown), ids) == tokenizer.decode(ids, skip_special_tokens=not shown)


@pytest.mark.parametrize("name", ["llama", "gemma"])
@settings(deadline=None)
@given(data=st.data())
def test_bytes_beside_a_character_do_not_take_it_back(name: str, data: st.DataObject) -> None:
    """The whole decoding of a run of bytes is all or nothing; told piece by piece, what was shown stays."""
    tokenizer = TOKENIZERS[name]
    sound = tokenizer.encode(data.draw(st.text(alphabet="a é😀\n"))).ids
    broken = [2 + byte for byte in data.draw(st.lists(st.integers(0x80, 0xFF), max_size=3))]
    words = Words(tokenizer)
    assert joined(words, [*sound, *broken, *sound]).startswith(joined(words, sound))


@pytest.mark.parametrize("name", ["byte-level bpe", "llama"])
def test_each_piece_is_what_the_library_streams(name: str) -> None:
    for text in HOSTILE[:2] + HOSTILE[4:6]:
        tokenizer = TOKENIZERS[name]
        ids, stream = tokenizer.encode(text).ids, DecodeStream(skip_special_tokens=True)
        theirs = [piece for i in ids if (piece := stream.step(tokenizer, i))]
        assert list(pieces(Words(tokenizer), ids)) == theirs


def test_half_characters_are_held_back_and_flushed() -> None:
    tokenizer = TOKENIZERS["llama"]
    ids = [2 + byte for byte in "x😀漢".encode()]
    words = Words(tokenizer)
    assert list(pieces(words, ids)) == ["x", "😀", "漢"]
    assert list(pieces(words, ids[:3])) == ["x", "\ufffd\ufffd"]
    assert list(pieces(words, [])) == []


def test_control_tokens_show_only_where_asked() -> None:
    tokenizer = TOKENIZERS["byte-level bpe"]
    end = tokenizer.token_to_id(CONTROL)
    ids = [*tokenizer.encode("ab").ids, end, *tokenizer.encode("c").ids]
    assert joined(Words(tokenizer), ids) == "abc"
    assert joined(Words(tokenizer, control_tokens=True), ids) == f"ab{CONTROL}c"
    assert joined(Words(tokenizer, (CONTROL,)), ids) == "abc", "what is not shown cannot stop"
    assert joined(Words(tokenizer, (CONTROL,), control_tokens=True), ids) == "ab"


def stopped(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Read a text letter by letter; the first stop string to be complete ends it, of two at once the longer."""
    for end in range(1, len(text) + 1):
        if ended := [stop for stop in stops if text[:end].endswith(stop)]:
            stop = max(ended, key=len)
            return text[: end - len(stop)], stop
    return text, None


PARTS = ("a", "b", "c", "ab", "ba", "abc", "aab", "cab", "bcabc", "😀", "b😀")
LETTERS = Tokenizer(models.BPE(vocab={part: i for i, part in enumerate(PARTS)}, merges=[]))
LETTERS.decoder = decoders.Fuse()  # pyright: ignore


@settings(deadline=None, max_examples=300)
@given(
    ids=st.lists(st.integers(0, len(PARTS) - 1), max_size=12),
    stops=st.lists(st.text(alphabet="abc😀", min_size=1, max_size=5), max_size=4),
)
def test_a_stop_string_ends_the_text_wherever_the_tokens_part(ids: list[int], stops: list[str]) -> None:
    """Overlapping, inside one token, over many, one the beginning of another; and what is told is never taken back."""
    words, tail, told, so_far = Words(LETTERS, tuple(stops)), Tail(), "", ""
    for i in ids:
        tail, piece = tell(words, tail, i)
        told += piece
        so_far += PARTS[i]
        expected, stop = stopped(so_far, stops)
        assert tail.stop == stop
        if stop is not None:
            assert told == expected
            assert tell(words, tail, i) == (tail, "")
            assert last(words, tail) == (tail, "")
            break
        assert told + tail.waiting == so_far
        begun = [n for stop in stops for n in range(1, len(stop)) if so_far.endswith(stop[:n])]
        assert len(tail.waiting) == max(begun, default=0), "no more is held back than may begin a stop string"
    else:
        assert told + last(words, tail)[1] == so_far
    assert joined(words, ids) == stopped("".join(PARTS[i] for i in ids), stops)[0]


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (("abc", "ab"), ""),
        (("bc",), "a"),
        (("cb", "bca"), "a"),
        (("abcd",), "abcabcab"),
        (("abca", "bc"), "a"),
        (("cabcab",), "ab"),
    ],
    ids=str,
)
def test_stop_strings_by_hand(stops: tuple[str, ...], text: str) -> None:
    for ids in ([0, 1, 2, 0, 1, 2, 0, 1], [5, 5, 3], [3, 7, 2, 3], [0, 8, 3]):
        assert "".join(PARTS[i] for i in ids) == "abcabcab"
        assert joined(Words(LETTERS, stops), ids) == text


def test_a_stop_string_in_half_characters() -> None:
    """Its last bytes come with the first of another character, or never: it stops when they are text, or at the end."""
    tokenizer = TOKENIZERS["llama"]
    emoji = [2 + byte for byte in "😀".encode()]
    words = Words(tokenizer, ("😀", "\ufffd"))
    assert joined(words, [2 + 120, *emoji, 2 + 121]) == "x"
    tail = Tail()
    for i in [2 + 120, *emoji[:2]]:
        tail, _ = tell(words, tail, i)
    assert tail.stop is None
    tail, piece = last(words, tail)
    assert (tail.stop, piece) == ("\ufffd", "")


def test_pieces_takes_no_more_ids_than_it_needs() -> None:
    ids = iter([0, 1, 2, 0, 1])
    assert list(pieces(Words(LETTERS, ("bc",)), ids)) == ["a"]
    assert list(ids) == [0, 1]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="stop string is empty"):
        Words(LETTERS, ("a", ""))
