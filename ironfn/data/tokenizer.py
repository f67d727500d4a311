"""Train a tokenizer or take one, and encode text so that no text ever becomes a control token."""

from __future__ import annotations

import itertools
import json
import re
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from attrs import frozen
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from ironfn.data.fim import Sentinels
from ironfn.spec.records import TokenizerSpec

EOS = "<|endoftext|>"
CONTROLS = (EOS, "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")

# The names under which published tokenizers keep these tokens, in the order of preference.
EOS_NAMES = (EOS, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<｜end▁of▁sentence｜>", "<|im_end|>")
_FIM_NAMES = (
    ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    ("<fim_prefix>", "<fim_middle>", "<fim_suffix>"),
    ("<fim-prefix>", "<fim-middle>", "<fim-suffix>"),
    ("<｜fim▁begin｜>", "<｜fim▁end｜>", "<｜fim▁hole｜>"),
)
_LONGEST_WORD = 64  # WordPiece gives up on words above 100 characters, and is quadratic in their length
_PIECE = 1 << 16
_BATCH = 1 << 20


@frozen
class Vocabulary:
    """Hold a tokenizer and what the rest of the room needs to know of it.

    size: one more than the highest id. eos: the id that ends a document. fim: its sentinels, if it has them.
    controls: ids that text must never give. unknown: the id for text without a token, if there is one.
    joins: whether texts encoded apart and put together decode to the joined text (true of byte-level tokenizers).
    byte_level: whether a token's letters stand for bytes. prefix: what tokens that go on with a word begin with.
    checksum: xxh3 of the tokenizer.json.
    """

    tokenizer: Tokenizer
    size: int
    eos: int
    fim: Sentinels | None
    controls: dict[int, str]
    unknown: int | None
    joins: bool
    byte_level: bool
    prefix: str
    checksum: int


def train(texts: Iterable[str], spec: TokenizerSpec) -> str:
    """Train a byte-level tokenizer and return its JSON. Every string encodes, and decodes to itself.

    BPE and WordPiece give the same file for the same texts. The library's Unigram trainer sums in an order that
    differs from run to run, so its scores do in the third digit; the file that was written is what counts.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    smallest = len(alphabet) + len(CONTROLS)
    if spec.vocab_size < smallest:
        raise ValueError(
            f"data.tokenizer.vocab_size {spec.vocab_size} is too small: 256 bytes and {len(CONTROLS)} control tokens "
            f"need {smallest}"
        )
    common: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "special_tokens": list(CONTROLS),
        "initial_alphabet": alphabet,
        "show_progress": False,
    }
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if spec.kind == "bpe":
        tokenizer, trainer = Tokenizer(models.BPE()), trainers.BpeTrainer(**common)
    elif spec.kind == "wordpiece":
        # With an empty prefix for continuations the 256 bytes cover them too, and nothing is unknown.
        tokenizer = Tokenizer(models.WordPiece(unk_token=EOS, max_input_chars_per_word=100))  # pyright: ignore[reportCallIssue]
        trainer = trainers.WordPieceTrainer(**common, continuing_subword_prefix="")
        short = pre_tokenizers.Split(Regex(rf"[\s\S]{{1,{_LONGEST_WORD}}}"), behavior="isolated")
        bytes_ = pre_tokenizers.Sequence([bytes_, short])
    else:
        tokenizer, trainer = Tokenizer(models.Unigram()), trainers.UnigramTrainer(**common)
    tokenizer.pre_tokenizer = bytes_  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str(pretty=True)


def load(path: str | Path, eos: str | None = None) -> Vocabulary:
    """Read a tokenizer.json: see `parse`."""
    return parse(read(path), path, eos)


def read(path: str | Path) -> bytes:
    """Return the bytes of a tokenizer.json. ValueError where there are none."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: no tokenizer.json can be read ({error}); restore it, or prepare again") from error


def parse(data: bytes, path: str | Path, eos: str | None = None) -> Vocabulary:
    """Make a vocabulary of a tokenizer.json's bytes. eos names the token that ends a document; None looks for a usual
    name.

    path: where the bytes are from. ValueError where they are no tokenizer or have no such token. Truncation, padding
    and BPE dropout that the file asks for are switched off: they would lose text, or encode the same text differently
    each time.
    """
    try:
        layout = json.loads(data)
        tokenizer = Tokenizer.from_str(json.dumps(_flag_controls(layout, eos)))
    except Exception as error:  # the library raises bare Exception for a file it cannot read
        raise ValueError(
            f"{path}: not a tokenizer.json that can be read ({error}); restore it, or prepare again"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None  # pyright: ignore[reportAttributeAccessIssue]
    ids = tokenizer.get_vocab(with_added_tokens=True)
    unknown = _unknown(layout, ids)
    controls = {i: t.content for i, t in tokenizer.get_added_tokens_decoder().items() if t.special and i != unknown}
    end = _find_eos(path, eos, ids)
    controls[end] = next(name for name, i in ids.items() if i == end)
    names = next((names for names in _FIM_NAMES if all(name in ids for name in names)), None)
    return Vocabulary(
        tokenizer=tokenizer,
        size=max(ids.values()) + 1,
        eos=end,
        fim=None if names is None else Sentinels(*(ids[name] for name in names)),
        controls=controls,
        unknown=unknown,
        joins=_joins(tokenizer),
        byte_level="ByteLevel" in json.dumps([layout.get("pre_tokenizer"), layout.get("decoder")]),
        prefix=layout["model"].get("continuing_subword_prefix") or "",
        checksum=xxhash.xxh3_64_intdigest(data),
    )


def _flag_controls(layout: dict[str, Any], eos: str | None) -> dict[str, Any]:
    """Mark end and FIM tokens special where the file only adds them, so that text cannot produce them."""
    names = {eos, *EOS_NAMES, *(name for names in _FIM_NAMES for name in names)}
    added = [t | {"special": t["special"] or t["content"] in names} for t in layout.get("added_tokens") or []]
    return layout | {"added_tokens": added}


def _find_eos(path: str | Path, eos: str | None, ids: dict[str, int]) -> int:
    if eos is not None and eos not in ids:
        raise ValueError(f"{path}: has no token {eos!r}; set data.tokenizer.eos to one that it has")
    name = eos or next((name for name in EOS_NAMES if name in ids), None)
    if name is None:
        raise ValueError(
            f"{path}: none of the usual end-of-text tokens ({', '.join(EOS_NAMES)}) is in it; "
            "set data.tokenizer.eos to the token that ends a document"
        )
    return ids[name]


def _unknown(layout: dict[str, Any], ids: dict[str, int]) -> int | None:
    """Return the id that stands for text without a token; a trained WordPiece here names one that it never needs."""
    model: dict[str, Any] = layout["model"]
    if model.get("continuing_subword_prefix") == "" and model.get("unk_token") == EOS:
        return None
    if model.get("type") == "Unigram":
        return model.get("unk_id")
    return ids.get(model.get("unk_token") or "")


def _joins(tokenizer: Tokenizer) -> bool:
    pairs = (("a", "b"), ("a ", "b"), ("a", " b"), ("\n", "a"), ("é", "\n  x"), (" ", " "))
    for pair in pairs:
        ids = [i for text in pair for i in tokenizer.encode(text, add_special_tokens=False).ids]
        if tokenizer.decode(ids, skip_special_tokens=False) != "".join(pair):
            return False
    return True


def pieces(text: str, vocabulary: Vocabulary, size: int = _PIECE) -> list[str]:
    """Cut a long text where its tokens part anyway, so that it is encoded by all cores and in bounded memory.

    The cuts lie after a letter or digit and before a line end or a word with its space, where every
    byte-level tokenizer that splits words begins a new token.
    """
    if len(text) <= 2 * size or not vocabulary.joins:
        return [text]
    cuts, seam = [0], re.compile(r"(?<=[^\W_])(?=\n| [^\W\d_])")
    while found := seam.search(text, cuts[-1] + size):
        cuts.append(found.start())
    return [text[a:b] for a, b in itertools.pairwise([*cuts, len(text)])]


def encode(vocabulary: Vocabulary, texts: Sequence[str]) -> list[array[int]]:
    """Return each text's ids (32 bits each): the library's batch encoding, by all cores, without control tokens.

    What the library makes of a text is many times its size, so a megabyte is encoded at a time.
    """
    ids: list[array[int]] = []
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH:
            ids += _encode(vocabulary, batch)
            batch, size = [], 0
    return ids + _encode(vocabulary, batch)


def _encode(vocabulary: Vocabulary, texts: list[str]) -> list[array[int]]:
    encodings = vocabulary.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [array("I", encoding.ids) for encoding in encodings]


def encode_around(vocabulary: Vocabulary, text: str) -> array[int]:
    """Encode a text whose plain encoding holds a control token, by cutting the token's name in two wherever it stands.

    ValueError where even that gives a control token.
    """
    names = "|".join(re.escape(name) for name in sorted(vocabulary.controls.values(), key=len, reverse=True))
    cuts = sorted({0, len(text), *(m.start() + len(m[0]) // 2 for m in re.finditer(names, text))})
    ids = array("I", [i for a, b in itertools.pairwise(cuts) for i in encode(vocabulary, [text[a:b]])[0]])
    for i in ids:
        if i in vocabulary.controls:
            raise ValueError(f"the tokenizer turns text into the control token {vocabulary.controls[i]!r}; use another")
    return ids


def byte_lengths(vocabulary: Vocabulary) -> NDArray[np.int32]:
    """Return how many bytes of UTF-8 text each id stands for, [size] int32; control tokens stand for none.

    Exact for byte-level and byte-fallback tokenizers; for WordPiece with word breaks the space before a word counts.
    """
    lengths = np.zeros(vocabulary.size, np.int32)
    prefix = vocabulary.prefix
    added = vocabulary.tokenizer.get_added_tokens_decoder()
    for token, i in vocabulary.tokenizer.get_vocab(with_added_tokens=True).items():
        if i in vocabulary.controls or i == vocabulary.unknown:
            continue
        if i in added:
            lengths[i] = len(token.encode())
        elif vocabulary.byte_level:
            lengths[i] = len(token)
        elif re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            lengths[i] = 1
        elif prefix:
            lengths[i] = len(token.removeprefix(prefix).encode()) + (not token.startswith(prefix))
        else:
            lengths[i] = len(token.replace("▁", " ").encode())
    return lengths
