"""Fill-in-the-middle: three parts that join to the text, drawn by the document alone, never across two."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ironfn.data import eval_batches, open_dataset, prepare
from ironfn.data.fim import Cut, Sentinels, arrange, cut
from ironfn.data.tokenizer import load
from ironfn.spec.records import DataSpec, FimSpec, SetSpec, SplitSpec, TokenizerSpec

TEXTS = [f"alpha{i} beta gamma\nsecond line über {i}\nthird" for i in range(1000)]


def corpus(folder: Path, texts: list[str]) -> str:
    path = folder / "corpus.txt"
    path.write_text("\x1e".join(texts), encoding="utf-8", newline="")
    return str(path)


def spec(folder: Path, source: str, fim: FimSpec, **more: object) -> DataSpec:
    return DataSpec(
        dir=str(folder),
        sets={"one": SetSpec([source], split_on="\x1e", fim=fim)},
        tokenizer=TokenizerSpec(vocab_size=300),
        split=SplitSpec(validation=0.0),
        **more,  # pyright: ignore[reportArgumentType]
    )


def test_orders() -> None:
    ids = Sentinels(prefix=1, middle=2, suffix=3)
    assert arrange(Cut("p", "m", "s", suffix_first=False), ids) == [1, "p", 3, "s", 2, "m"]
    assert arrange(Cut("p", "m", "s", suffix_first=True), ids) == [1, 3, "s", 2, "p", "m"]


def test_rate_within_binomial_limits_and_depends_on_the_document_alone() -> None:
    half = FimSpec(rate=0.5, spm_rate=0.25)
    cuts = [cut(text, half, 7, text) for text in TEXTS]
    done = [c for c in cuts if c is not None]
    assert 436 <= len(done) <= 564  # 500 +- 4 standard deviations
    assert abs(sum(c.suffix_first for c in done) - 0.25 * len(done)) < 4 * (len(done) * 0.25 * 0.75) ** 0.5
    assert [cut(text, half, 7, text) for text in reversed(TEXTS)] == cuts[::-1]
    assert [cut(text, half, 8, text) for text in TEXTS] != cuts
    assert all(cut(text, FimSpec(rate=0.0), 7, text) is None for text in TEXTS)
    assert all(cut(text, FimSpec(rate=1.0), 7, text) is not None for text in TEXTS)
    assert cut("", FimSpec(rate=1.0), 7, "") is None


def test_ends_of_the_middle_are_uniform() -> None:
    text = "abcdefghi"
    counts = {(a, b): 0 for a in range(10) for b in range(a + 1, 10)}
    draws = 9000
    for i in range(draws):
        c = cut(text, FimSpec(rate=1.0), 0, str(i))
        assert c is not None
        counts[len(c.prefix), len(c.prefix) + len(c.middle)] += 1
    expected = draws / len(counts)
    chi_square = sum((n - expected) ** 2 / expected for n in counts.values())
    assert chi_square < 79.0  # 44 degrees of freedom, p = 0.001: 78.7


def test_line_spans_cut_at_line_starts() -> None:
    for i, text in enumerate([*TEXTS, "no line end", "\n", "\r\n\r\n"]):
        c = cut(text, FimSpec(rate=1.0, spans="line"), 3, str(i))
        assert c is not None
        assert c.prefix + c.middle + c.suffix == text
        assert c.middle
        assert all(part == "" or part.endswith("\n") or not rest for part, rest in zip(
            (c.prefix, c.middle), (c.middle, c.suffix), strict=True))  # fmt: skip


@pytest.mark.parametrize("spans", ["character", "line"])
def test_stores_hold_every_text_and_as_many_ends(tmp_path: Path, spans: str) -> None:
    source = corpus(tmp_path, TEXTS[:200])
    settings = spec(tmp_path / "data", source, FimSpec(rate=0.6, spm_rate=0.5, spans=spans))  # pyright: ignore[reportArgumentType]
    prepared = prepare(settings, seed=1)
    store = open_dataset(settings, "train").stores[0]
    vocabulary = load(tmp_path / "data" / "tokenizer.json")
    assert vocabulary.fim is not None

    def text(ids: list[int]) -> str:
        return vocabulary.tokenizer.decode(ids, skip_special_tokens=False)

    seen = {"plain": 0, "psm": 0, "spm": 0}
    for number, (a, b) in enumerate(zip(store.offsets[:-1], store.offsets[1:], strict=True)):
        *ids, end = store.ids[a:b].tolist()
        assert end == vocabulary.eos
        if vocabulary.fim.prefix not in ids:
            seen["plain"] += 1
            assert text(ids) == TEXTS[number]
            continue
        assert ids[0] == vocabulary.fim.prefix
        assert [ids.count(i) for i in (vocabulary.fim.prefix, vocabulary.fim.suffix, vocabulary.fim.middle)] == [1] * 3
        s, m = ids.index(vocabulary.fim.suffix), ids.index(vocabulary.fim.middle)
        assert 0 < s < m
        seen["spm" if s == 1 else "psm"] += 1
        assert text(ids[1:s]) + text(ids[m + 1 :]) + text(ids[s + 1 : m]) == TEXTS[number]
    assert min(seen.values()) > 20
    assert prepared.sets["one"].fim == seen["psm"] + seen["spm"]
    assert store.ids[:].tolist().count(vocabulary.eos) == 200


def test_sentinels_lengthen_the_document_and_no_row(tmp_path: Path) -> None:
    source = corpus(tmp_path, TEXTS[:1])
    plain = prepare(spec(tmp_path / "plain", source, FimSpec()))
    length = plain.sets["one"].splits["train"].tokens
    settings = spec(tmp_path / "data", source, FimSpec(rate=1.0), length=length)
    prepared = prepare(settings)
    data = open_dataset(settings, "train")
    assert data.tokens == prepared.sets["one"].splits["train"].tokens >= length + 3
    assert data.rows == math.ceil(data.tokens / length)
    (batch,) = eval_batches(data, 8)
    assert batch["targets"].shape == (data.rows, length)
    assert int(batch["weight"].sum()) == data.tokens


def test_documents_keep_their_cut_when_others_come(tmp_path: Path) -> None:
    few = spec(tmp_path / "few", corpus(tmp_path, TEXTS[50:60]), FimSpec(rate=0.5))
    prepare(few, seed=3)
    (tmp_path / "more").mkdir()
    many = spec(tmp_path / "many", corpus(tmp_path / "more", TEXTS[:100]), FimSpec(rate=0.5))
    prepare(many, seed=3)
    marks = []
    for settings, first in ((few, 0), (many, 50)):
        store = open_dataset(settings, "train").stores[0]
        vocabulary = load(Path(settings.dir) / "tokenizer.json")
        ids = [store.ids[store.offsets[d] : store.offsets[d + 1]].tolist() for d in range(first, first + 10)]
        marks.append([vocabulary.tokenizer.decode(i, skip_special_tokens=False) for i in ids])
    assert marks[0] == marks[1]
