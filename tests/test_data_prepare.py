"""Preparation: everything is counted, splits stay, stores are reused exactly when nothing changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from ironfn.data import Dataset, eval_batches, open_dataset, prepare
from ironfn.data.preparation import Prepared
from ironfn.data.tokenizer import load
from ironfn.spec.records import DataSpec, FimSpec, SetSpec, SplitSpec, TokenizerSpec

TEXTS = [f"document {i}: the quick brown fox n° {i * 7919 % 1000} jumps" for i in range(300)]


def write_jsonl(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8")
    return str(path)


@pytest.fixture
def spec(tmp_path: Path) -> DataSpec:
    return DataSpec(
        dir=str(tmp_path / "data"),
        sets={"one": SetSpec([write_jsonl(tmp_path / "one.jsonl", TEXTS)])},
        tokenizer=TokenizerSpec(vocab_size=320),
        split=SplitSpec(validation=0.1, test=0.05),
        length=32,
    )


def change(spec: DataSpec, **settings: Any) -> DataSpec:
    return evolve(spec, sets={"one": evolve(spec.sets["one"], **settings)})


def documents(data: Dataset) -> list[str]:
    """Decode every document of a dataset's first store."""
    store, tokenizer = data.stores[0], load(data.tokenizer).tokenizer
    edges = zip(store.offsets[:-1], store.offsets[1:], strict=True)
    return [tokenizer.decode(store.ids[a : b - 1].tolist(), skip_special_tokens=False) for a, b in edges]


def splits(spec: DataSpec) -> dict[str, list[str]]:
    return {split: documents(open_dataset(spec, split)) for split in ("train", "validation", "test")}


def test_texts_come_back_in_order_and_are_counted(spec: DataSpec) -> None:
    prepared = prepare(spec)
    found = splits(spec)
    assert sorted(t for texts in found.values() for t in texts) == sorted(TEXTS)
    assert all(texts == [t for t in TEXTS if t in texts] for texts in found.values())
    tally = prepared.sets["one"]
    for split, texts in found.items():
        counts = tally.splits[split]
        assert counts.documents == len(texts)
        assert counts.bytes == sum(len(t.encode()) for t in texts)
        data = open_dataset(spec, split)
        assert (data.tokens, data.text_bytes) == (counts.tokens, counts.bytes)
        ids = data.stores[0].ids.tolist()
        assert ids.count(data.eos) == len(texts)
        assert data.byte_lengths[ids].sum() == data.text_bytes
    assert 15 <= len(found["validation"]) <= 45
    assert 4 <= len(found["test"]) <= 30


def test_counts_add_up_and_are_printed_and_stored(tmp_path: Path, spec: DataSpec) -> None:
    path = tmp_path / "one.jsonl"
    with path.open("ab") as file:
        file.write(b'\n  \n{"text": ""}\n{"text": " \\n"}\n' + json.dumps({"text": TEXTS[0]}).encode() + b"\n{broken\n")
    with pytest.raises(ValueError, match=r"one\.jsonl:306: not JSON.*data\.bad_lines: count"):
        prepare(spec)
    lines: list[str] = []
    tally = prepare(evolve(spec, bad_lines="count"), say=lines.append).sets["one"]
    assert (tally.documents, tally.blank, tally.bad, tally.empty, tally.duplicate) == (303, 2, 1, 2, 1)
    assert tally.kept == 300 == tally.documents - tally.empty - tally.duplicate
    assert tally.examples[0].startswith(f"{path}:306: not JSON")
    said = "\n".join(lines)
    assert "1 files, 303 documents in, 2 blank, 1 bad, 2 empty, 1 duplicate" in said
    assert f"passed over {path}:306" in said
    stored = json.loads((tmp_path / "data" / "prepared.json").read_text())["sets"]["one"]
    assert (stored["bad"], stored["splits"]["train"]["documents"]) == (1, tally.splits["train"].documents)


def test_duplicates_are_kept_on_request(tmp_path: Path, spec: DataSpec) -> None:
    write_jsonl(tmp_path / "one.jsonl", TEXTS + TEXTS)
    prepare(change(spec, deduplicate=False))
    found = splits(change(spec, deduplicate=False))
    assert sum(map(len, found.values())) == 600
    assert not set(found["train"]) & set(found["validation"])  # equal texts are in one split


def test_splits_stay_when_documents_are_added_and_shares_change(tmp_path: Path, spec: DataSpec) -> None:
    prepare(spec)
    before = splits(spec)
    write_jsonl(tmp_path / "one.jsonl", [f"new {t}" for t in TEXTS] + TEXTS[::-1])
    prepare(spec)
    after = splits(spec)
    for split, texts in before.items():
        assert set(texts) <= set(after[split])
    larger = evolve(spec, split=SplitSpec(validation=0.3, test=0.05))
    prepare(larger)
    assert set(after["validation"]) < set(splits(larger)["validation"])
    assert sorted(after["test"]) == sorted(splits(larger)["test"])


def test_no_share_means_no_document(spec: DataSpec) -> None:
    prepare(evolve(spec, split=SplitSpec(validation=0.0)))
    with pytest.raises(ValueError, match="the validation split is empty"):
        open_dataset(evolve(spec, split=SplitSpec(validation=0.0)), "validation")
    with pytest.raises(ValueError, match="split 'dev' is unknown"):
        open_dataset(spec, "dev")


def test_the_tokenizer_sees_the_training_split_only(tmp_path: Path, spec: DataSpec) -> None:
    prepare(spec)
    before = (tmp_path / "data" / "tokenizer.json").read_bytes()
    found = splits(spec)
    write_jsonl(tmp_path / "one.jsonl", found["train"])
    prepare(evolve(spec, split=SplitSpec(validation=0.1, test=0.05)), force=True)
    assert (tmp_path / "data" / "tokenizer.json").read_bytes() == before


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_second_preparation_reuses_and_force_gives_the_same_bytes(tmp_path: Path, spec: DataSpec) -> None:
    first = prepare(spec)
    before = snapshot(tmp_path / "data")
    stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "data").rglob("*")}
    (tmp_path / "one.jsonl").touch()
    second = prepare(spec)
    assert (first.reused, second.reused) == (False, True)
    assert second == evolve(first, reused=True)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "data").rglob("*")} == stamps
    assert prepare(spec, force=True).reused is False
    assert snapshot(tmp_path / "data") == before


CHANGES: dict[str, Any] = {
    "kind": lambda s: evolve(s, tokenizer=evolve(s.tokenizer, kind="wordpiece")),
    "vocabulary": lambda s: evolve(s, tokenizer=evolve(s.tokenizer, vocab_size=321)),
    "split": lambda s: evolve(s, split=SplitSpec(validation=0.2, test=0.05)),
    "fim": lambda s: change(s, fim=FimSpec(rate=0.5)),
    "deduplicate": lambda s: change(s, deduplicate=False),
    "clean": lambda s: change(s, clean=True),
    "bad lines": lambda s: evolve(s, bad_lines="count"),
    "a set": lambda s: evolve(s, sets=s.sets | {"two": s.sets["one"]}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_setting_prepares_anew_and_is_noticed_before(spec: DataSpec, what: str) -> None:
    prepare(spec)
    other, lines = CHANGES[what](spec), []
    if what != "bad lines":  # which changes nothing in what was written
        with pytest.raises(ValueError, match=r"prepared with other settings .*run `ironfn prepare`"):
            open_dataset(other, "train")
    assert not prepare(other, say=lines.append).reused
    assert "prepared anew, as these changed" in lines[0]
    assert prepare(other).reused


def test_what_is_chosen_later_needs_no_preparation(spec: DataSpec) -> None:
    prepare(spec)
    other = evolve(change(spec, weight=3.0), length=16, attend="row", shuffle=False, temperature=2.0, workers=4)
    assert prepare(other).reused
    assert open_dataset(other, "train").length == 16


def test_the_seed_matters_to_fim_only(spec: DataSpec) -> None:
    prepare(spec, seed=0)
    assert prepare(spec, seed=1).reused
    fim = change(spec, fim=FimSpec(rate=0.5))
    prepare(fim, seed=0)
    assert not prepare(fim, seed=1).reused


def test_changed_sources_prepare_anew(tmp_path: Path, spec: DataSpec) -> None:
    prepare(spec)
    write_jsonl(tmp_path / "one.jsonl", [*TEXTS[:-1], TEXTS[-1].replace("quick", "quicK")])
    assert not prepare(spec).reused


def test_a_changed_tokenizer_file_prepares_anew(tmp_path: Path, spec: DataSpec) -> None:
    prepare(spec)
    mine = tmp_path / "mine.json"
    shutil.copy(tmp_path / "data" / "tokenizer.json", mine)
    taken = evolve(spec, tokenizer=TokenizerSpec(file=str(mine)))
    assert not prepare(taken).reused
    assert prepare(taken).reused
    assert (tmp_path / "data" / "tokenizer.json").read_bytes() == mine.read_bytes()
    mine.write_bytes(mine.read_bytes() + b"\n")
    assert not prepare(taken).reused
    mine.unlink()
    with pytest.raises(ValueError, match=r"mine\.json: cannot be read.*data\.tokenizer\.file"):
        prepare(taken)


@pytest.mark.parametrize("name", ["one/train.tokens", "tokenizer.json", "prepared.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_damaged_data_are_noticed_and_made_again(tmp_path: Path, spec: DataSpec, name: str, damage: str) -> None:
    prepare(spec)
    before = snapshot(tmp_path / "data")
    path = tmp_path / "data" / name
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data[: len(data) // 2] + (b"" if damage == "cut" else b"\x07" + data[len(data) // 2 + 1 :]))
    lines: list[str] = []
    assert not prepare(spec, say=lines.append).reused
    assert (name == "prepared.json" and damage == "gone") or "prepared anew" in lines[0]
    assert snapshot(tmp_path / "data") == before


def test_stores_of_another_preparation_are_refused(tmp_path: Path, spec: DataSpec) -> None:
    prepare(spec)
    other = evolve(spec, dir=str(tmp_path / "other"), split=SplitSpec(validation=0.2, test=0.05))
    prepare(other)
    shutil.copy(tmp_path / "other/one/train.tokens", tmp_path / "data/one/train.tokens")
    with pytest.raises(ValueError, match=r"train\.tokens belongs to another preparation"):
        open_dataset(spec, "train")
    assert not prepare(spec).reused
    (tmp_path / "data" / "tokenizer.json").write_bytes((tmp_path / "data" / "tokenizer.json").read_bytes() + b" ")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not the tokenizer"):
        open_dataset(spec, "train")


def test_an_interrupted_preparation_leaves_what_was_there(
    tmp_path: Path, spec: DataSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(spec)
    before = open_dataset(spec, "train").checksum

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ironfn.data.preparation.write", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(evolve(spec, tokenizer=TokenizerSpec(vocab_size=300)))
    assert not list((tmp_path / "data").rglob("*.part"))
    assert not (tmp_path / "data" / ".preparing").exists()
    assert open_dataset(spec, "train").checksum == before


@pytest.mark.parametrize("fault", ["tokenizer", "source"])
def test_a_failed_preparation_leaves_what_was_there(tmp_path: Path, spec: DataSpec, fault: str) -> None:
    prepare(spec)
    before = open_dataset(spec, "train").checksum
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{no json\n", encoding="utf-8")
    changed = evolve(spec, tokenizer=TokenizerSpec(file=str(bad)))
    if fault == "source":
        changed = evolve(spec, sets={**spec.sets, "bad": SetSpec([str(bad)])})
    with pytest.raises(ValueError, match=r"bad\.jsonl"):
        prepare(changed)
    assert open_dataset(spec, "train").checksum == before


@pytest.mark.parametrize("texts", [[], ["", "  "]])
def test_nothing_to_train_on_is_an_error(tmp_path: Path, spec: DataSpec, texts: list[str]) -> None:
    write_jsonl(tmp_path / "one.jsonl", texts)
    with pytest.raises(ValueError, match=r"data\.sets\.one: nothing to train on"):
        prepare(spec)


def test_an_empty_validation_split_is_said(tmp_path: Path, spec: DataSpec) -> None:
    write_jsonl(tmp_path / "one.jsonl", TEXTS[:2])
    lines: list[str] = []
    prepared: Prepared = prepare(evolve(spec, split=SplitSpec(validation=0.001)), say=lines.append)
    assert prepared.sets["one"].splits["validation"].documents == 0
    assert any("the validation split is empty" in line and "split_on" in line for line in lines)


def test_fim_needs_its_tokens(tmp_path: Path, spec: DataSpec) -> None:
    prepare(spec)
    layout = json.loads((tmp_path / "data" / "tokenizer.json").read_text())
    layout["added_tokens"] = layout["added_tokens"][:1]
    layout["model"]["vocab"] = {
        token.replace("<|fim_", "<|no_"): i for token, i in layout["model"]["vocab"].items()
    }  # fmt: skip
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps(layout))
    taken = evolve(spec, tokenizer=TokenizerSpec(file=str(mine)))
    prepare(taken)
    with pytest.raises(ValueError, match=r"mine\.json: has no fill-in-the-middle tokens.*fim\.rate to 0"):
        prepare(change(taken, fim=FimSpec(rate=0.1)))


def test_fim_needs_a_tokenizer_that_joins(tmp_path: Path, spec: DataSpec) -> None:
    prepare(spec)
    layout = json.loads((tmp_path / "data" / "tokenizer.json").read_text())
    layout["pre_tokenizer"]["add_prefix_space"] = True
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps(layout))
    with pytest.raises(ValueError, match=r"adds or drops a space"):
        prepare(change(evolve(spec, tokenizer=TokenizerSpec(file=str(mine))), fim=FimSpec(rate=0.1)))


def test_validation_stays_as_written_under_fim(spec: DataSpec) -> None:
    plain = change(spec, fim=FimSpec(rate=0.0))
    prepare(plain)
    before = splits(plain)
    fim = change(spec, fim=FimSpec(rate=1.0))
    prepare(fim)
    after = splits(fim)
    assert after["validation"] == before["validation"]
    assert after["test"] == before["test"]
    assert all("<|fim_middle|>" in text for text in after["train"])


def test_cleaning_repairs_prose_and_refuses_code(tmp_path: Path, spec: DataSpec) -> None:
    pytest.importorskip("ftfy")
    source = write_jsonl(tmp_path / "one.jsonl", ["dÃ©jÃ  vu &amp; more\r\n", "déjà vu &amp; more\n", "plain"])
    clean = evolve(change(spec, sources=[source], clean=True), split=SplitSpec(validation=0.0))
    prepared = prepare(clean)
    assert documents(open_dataset(clean, "train")) == ["déjà vu &amp; more\n", "plain"]
    assert (prepared.sets["one"].cleaned, prepared.sets["one"].duplicate) == (1, 1)
    code = tmp_path / "a.py"
    code.write_text("x = 'dÃ©jÃ '")
    for sources in ([str(code)], ["stdlib:code"], [source, "stdlib:"]):
        with pytest.raises(ValueError, match=r"\.py: cleaning is for prose"):
            prepare(change(clean, sources=sources))


def test_cleaning_without_ftfy_names_the_extra(spec: DataSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "ftfy", None)
    with pytest.raises(ValueError, match=r"pip install 'ironfn\[clean\]'"):
        prepare(change(spec, clean=True))


def test_unknown_tokens_are_counted(tmp_path: Path, spec: DataSpec) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[UNK]": 0, "[EOS]": 1, "document": 2, "fox": 3}
    tokenizer = Tokenizer(models.WordLevel(vocab=words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["[UNK]", "[EOS]"])
    tokenizer.save(str(tmp_path / "words.json"))
    write_jsonl(tmp_path / "one.jsonl", ["document fox document", "fox cat [EOS]"])
    settings = evolve(spec, tokenizer=TokenizerSpec(file=str(tmp_path / "words.json")), split=SplitSpec(0.0))
    lines: list[str] = []
    assert prepare(settings, say=lines.append).sets["one"].unknown == 4  # cat [ EOS ]
    assert any("4 unknown" in line for line in lines)
    assert open_dataset(settings, "train").stores[0].ids.tolist() == [2, 3, 2, 1, 3, 0, 0, 0, 0, 1]


def test_faulty_settings_are_all_named(spec: DataSpec) -> None:
    faulty = evolve(
        spec,
        sets={"a/b": SetSpec([], weight=-1.0, fim=FimSpec(rate=2.0, spm_rate=-0.1), split_on="")},
        split=SplitSpec(validation=0.6, test=0.6),
        length=0,
        temperature=0.0,
    )
    with pytest.raises(ValueError, match="data") as caught:
        prepare(faulty)
    names = ("length", "temperature", "split", "sources", "weight", "fim.rate", "fim.spm_rate", "split_on", "letters")
    assert all(name in str(caught.value) for name in names)


def test_a_long_document_is_encoded_as_a_whole(tmp_path: Path, spec: DataSpec) -> None:
    long = "\n".join(TEXTS * 20)
    assert len(long) > 1 << 18
    prepare(spec)
    (tmp_path / "long.txt").write_text(long)
    taken = evolve(
        change(spec, sources=[str(tmp_path / "long.txt")]),
        dir=str(tmp_path / "long"),
        tokenizer=TokenizerSpec(file=str(tmp_path / "data" / "tokenizer.json")),
        split=SplitSpec(validation=0.0),
    )
    prepare(taken)
    data = open_dataset(taken, "train")
    tokenizer = load(data.tokenizer).tokenizer
    assert data.stores[0].ids.tolist() == [*tokenizer.encode(long, add_special_tokens=False).ids, data.eos]


def test_arxiv_sample(spec: DataSpec) -> None:
    path = Path(__file__).parents[2] / "shared" / "data" / "arxiv_sample.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not on this machine")
    settings = evolve(change(spec, sources=[str(path)]), split=SplitSpec(validation=0.2))
    tally = prepare(settings).sets["one"]
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert tally.documents == len(texts) == 20
    found = documents(open_dataset(settings, "train")) + documents(open_dataset(settings, "validation"))
    assert sorted(found) == sorted(set(texts))
    batches = list(eval_batches(open_dataset(settings, "validation"), 8))
    assert sum(int(b["weight"].sum()) for b in batches) == open_dataset(settings, "validation").tokens
