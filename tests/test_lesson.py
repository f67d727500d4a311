"""Examples from files to rows: what was taught is what is trained, once, and every row that is left out is counted."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from ironfn.data.chat import Chat, chat_of
from ironfn.data.conversation import parse
from ironfn.data.dataset import rows_at
from ironfn.data.examples import digest
from ironfn.data.lesson import Lesson
from ironfn.data.opening import open_dataset
from ironfn.data.packed import PackedStore
from ironfn.data.preparation import prepare
from ironfn.data.readers import Row
from ironfn.data.supervise import Teaching, supervised
from ironfn.data.templates import template_of
from ironfn.data.tokenizer import load
from ironfn.data.view import spans
from ironfn.spec.records import DataSpec, SetSpec, SftSpec, SplitSpec, TokenizerSpec

from .test_chat import tokenizer_json

ROWS: list[Any] = [
    {"messages": [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"{n} is " + "x" * n}]}
    for n in range(60)
]
LONG = {"prompt": "y " * 99, "completion": "too late"}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_bytes(tokenizer_json())
    vocabulary = load(path)
    made = chat_of(vocabulary, template_of("chatml", vocabulary), {"eos_token": "<|im_end|>"})
    yield path, made
    made.renderer.close()


@pytest.fixture
def make(tmp_path: Path, chat: tuple[Path, Chat]) -> Callable[..., tuple[DataSpec, Lesson]]:
    """Return a maker of the settings for rows."""

    def settings(rows: list[Any], **changes: Any) -> tuple[DataSpec, Lesson]:
        lines = b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)
        (tmp_path / "a.jsonl").write_bytes(lines)
        spec = DataSpec(
            dir=str(tmp_path / "data"),
            sets={"talk": SetSpec(sources=[str(tmp_path / "a.jsonl")])},
            tokenizer=TokenizerSpec(file=str(chat[0])),
            split=SplitSpec(validation=0.2),
            length=200,
        )
        return spec, Lesson(evolve(SftSpec(), **changes), Teaching(chat[1].vocabulary, chat[1]))

    return settings


def texts(store: PackedStore) -> set[tuple[int, ...]]:
    return {tuple(store.ids[a:b].tolist()) for a, b in zip(store.offsets, store.offsets[1:], strict=False)}


def test_what_is_taught_is_what_is_trained(make: Any) -> None:
    spec, lesson = make([*ROWS, ROWS[3], {"text": "plain"}])
    said: list[str] = []
    prepared = prepare(spec, say=said.append, lesson=lesson)
    tally = prepared.sets["talk"]
    assert (tally.documents, tally.duplicate, tally.bad, tally.kept) == (62, 1, 0, 61)
    assert any("talk/train: " in line and "trained)" in line for line in said)
    found: dict[str, set[tuple[int, ...]]] = {}
    for split in ("train", "validation"):
        data = open_dataset(spec, split, lesson)
        (store,) = data.stores
        assert isinstance(store, PackedStore)
        found[split] = texts(store)
        batch = rows_at(data, range(data.rows), 0)
        assert int((batch["weight"] > 0).sum()) == tally.splits[split].trained > 0
        assert (data.tokens, data.text_bytes) == (int((batch["segment"] >= 0).sum()), tally.splits[split].bytes)
    assert not found["train"] & found["validation"]
    expected = {
        tuple(text.ids.tolist())
        for row in [*ROWS, {"text": "plain"}]
        for text in supervised(parse(Row(row, "p"), {}), lesson.teaching)
    }
    assert found["train"] | found["validation"] == expected
    learned = [
        learned
        for split in found
        for data in [open_dataset(spec, split, lesson)]
        for batch in [rows_at(data, range(data.rows), 0)]
        for learned in batch["targets"][batch["weight"] > 0].tolist()
    ]
    answers = sum(
        int(text.trained.sum())
        for row in [*ROWS, {"text": "plain"}]
        for text in supervised(parse(Row(row, "p"), {}), lesson.teaching)
    )
    assert len(learned) == answers


def test_a_row_is_shown_as_its_texts_are_taught(make: Any) -> None:
    spec, lesson = make([*ROWS[:9], {"prompt": "say it", "completion": " now"}])
    prepare(spec, lesson=lesson)
    data = open_dataset(spec, "train", lesson)
    vocabulary = lesson.teaching.vocabulary
    batch = rows_at(data, range(data.rows), 0)
    whole: set[str] = set()
    learned: list[str] = []
    for row in range(data.rows):
        found = list(spans(batch, row, vocabulary, packed=True))
        for number, span in enumerate(found):
            if span.kind == "document":
                assert not span.text.endswith("continued")
                here = list(itertools.takewhile(lambda s: s.kind not in ("document", "padding"), found[number + 1 :]))
                whole.add("".join(s.text.removeprefix("masked ") for s in here))
                trained = (s for s in here if s.kind == "trained" or (s.kind == "control" and "masked" not in s.text))
                learned.append("".join(s.text for s in trained))
    taught = [text for (store,) in [data.stores] for text in texts(store)]  # type: ignore[arg-type]
    names = {vocabulary.eos: "end"}
    shown = (
        "".join(
            names.get(i) or vocabulary.controls.get(i) or vocabulary.tokenizer.decode([i], skip_special_tokens=False)
            for i in ids
        )
        for ids in taught
    )
    assert whole == set(shown)
    said = {f"{n} is " + "x" * n for n in range(9)} | {" now"}
    assert len(learned) == len(taught)
    assert all(any(text.startswith(answer) for answer in said) for text in learned)


def test_a_second_preparation_takes_what_is_there(make: Any, tmp_path: Path) -> None:
    spec, lesson = make(ROWS)
    assert not prepare(spec, lesson=lesson).reused
    before = {path.name: path.read_bytes() for path in (tmp_path / "data/talk").iterdir()}
    assert set(before) == {
        f"{split}{end}.tokens" for split in ("train", "validation", "test") for end in ("", ".trained")
    }
    assert prepare(spec, lesson=lesson).reused
    longer = evolve(spec, length=128)
    other = evolve(lesson, spec=evolve(lesson.spec, overlong="drop"))
    assert prepare(longer, lesson=other).reused  # what is chosen when rows are laid out needs no new stores
    assert open_dataset(longer, "train", other).checksum != open_dataset(longer, "train", lesson).checksum
    said: list[str] = []
    last = evolve(lesson, teaching=evolve(lesson.teaching, train_on="last"))
    with pytest.raises(ValueError, match=r"examples.train_on: all -> last"):
        open_dataset(spec, "train", last)
    with pytest.raises(ValueError, match=r"examples.train_on: all -> absent"):
        open_dataset(spec, "train")
    assert not prepare(spec, lesson=last, say=said.append).reused
    assert any("these changed: lesson" in line for line in said)
    assert not prepare(spec, lesson=lesson).reused
    assert {path.name: path.read_bytes() for path in (tmp_path / "data/talk").iterdir()} == before
    path = tmp_path / "data/talk/train.trained.tokens"
    path.write_bytes(before[path.name][:-1] + bytes([before[path.name][-1] ^ 1]))
    assert not prepare(spec, lesson=lesson).reused
    assert path.read_bytes() == before[path.name]


def test_the_split_of_an_example_stays_when_others_come(make: Any) -> None:
    spec, lesson = make(ROWS[:30])
    prepare(spec, lesson=lesson)
    before = texts(open_dataset(spec, "validation", lesson).stores[0])  # pyright: ignore[reportArgumentType]
    spec, lesson = make([*ROWS[30:], *reversed(ROWS[:30])])
    prepare(spec, lesson=lesson)
    assert before
    assert before <= texts(open_dataset(spec, "validation", lesson).stores[0])  # pyright: ignore[reportArgumentType]
    one, two = (
        parse(Row(row, place), {}) for row, place in ((ROWS[0], "a:1"), (dict(reversed(ROWS[0].items())), "b:2"))
    )
    assert digest(one) == digest(two)


def test_bad_rows_stop_or_are_counted(make: Any) -> None:
    many = [{"role": "user", "content": "?"}]
    called = {"messages": [*ROWS[0]["messages"], {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]}
    spec, lesson = make([*ROWS, {"messages": many}, called, b"{", {"input_ids": [5, 6], "labels": [-100, -100]}])
    with pytest.raises(ValueError, match=r"a.jsonl:61: no message of the assistant .* set data.bad_lines: count"):
        prepare(spec, lesson=lesson)
    tally = prepare(evolve(spec, bad_lines="count"), lesson=lesson).sets["talk"]
    assert (tally.documents, tally.bad, tally.untaught, tally.kept) == (61, 3, 1, 60)
    assert [place.split(": ")[0].rsplit(":", 1)[1] for place in tally.examples] == ["61", "62", "63"]
    assert "writes no tool calls" in tally.examples[1]


def test_a_file_that_is_cut_short_is_no_shorter_set(make: Any, tmp_path: Path) -> None:
    spec, lesson = make(ROWS)
    (tmp_path / "b.json").write_text(json.dumps(ROWS)[:-20])
    spec = evolve(spec, bad_lines="count", sets={"talk": SetSpec(sources=[str(tmp_path / "b.json")])})
    with pytest.raises(ValueError, match=r"b.json:1: the list ends here"):
        prepare(spec, lesson=lesson)


@pytest.mark.parametrize("overlong", ["truncate", "drop", "split"])
def test_texts_that_are_too_long(make: Any, overlong: str) -> None:
    spec, lesson = make([*ROWS, LONG], overlong=overlong)
    spec = evolve(spec, split=SplitSpec(validation=0), length=90)  # the longest of the others takes 89
    prepare(spec, lesson=lesson)
    (store,) = open_dataset(spec, "train", lesson).stores
    assert isinstance(store, PackedStore)
    (text,) = supervised(parse(Row(LONG, "p"), {}), lesson.teaching)
    assert len(text.ids) > 2 * 90
    empty = sum(not text.trained[at + 1 : at + 91].any() for at in range(0, len(text.ids) - 1, 90))
    assert empty >= 2
    assert (store.fit.overlong, store.fit.lost) == (1, empty if overlong == "split" else 1)
    assert store.fit.lost_targets == (0 if overlong == "split" else int(text.trained.sum()))


@pytest.mark.parametrize("short", [0, 1], ids=["fits", "cut"])
def test_an_end_is_learned_where_it_is_there_and_never_made_up(make: Any, short: int) -> None:
    """The fault: an end that is lost, or invented, only where a text is cut."""
    spec, lesson = make([{"prompt": "a b", "completion": " c d e f"}])
    (text,) = supervised(parse(Row({"prompt": "a b", "completion": " c d e f"}, "p"), {}), lesson.teaching)
    spec = evolve(spec, split=SplitSpec(validation=0), length=len(text.ids) - 1 - short)
    prepare(spec, lesson=lesson)
    batch = rows_at(open_dataset(spec, "train", lesson), [0], 0)
    assert batch["targets"][0].tolist() == text.ids[1 : len(text.ids) - short].tolist()
    assert batch["weight"][0].bool().tolist() == text.trained[1 : len(text.ids) - short].tolist()
    assert (batch["targets"][0, -1] == lesson.teaching.end) == (not short)


def test_what_fills_a_row_is_no_end_though_it_is_the_same_id(make: Any) -> None:
    """The fault: padding with the end's id hides the end, and the model never stops."""
    spec, lesson = make([{"prompt": "a", "completion": "b"}, {"prompt": "aa", "completion": "bb cc"}])
    lesson = evolve(lesson, teaching=Teaching(lesson.teaching.vocabulary))
    spec = evolve(spec, split=SplitSpec(validation=0))
    prepare(spec, lesson=lesson)
    data = open_dataset(spec, "train", lesson)
    batch = rows_at(data, [0], 0)
    end, (targets, weight, segment) = data.eos, (batch[name][0] for name in ("targets", "weight", "segment"))
    assert lesson.teaching.end == end == int(targets[-1])
    assert (targets[segment == -1] == end).all()
    assert not weight[segment == -1].any()
    assert int((weight[targets == end] > 0).sum()) == 2


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"attend": "row"}, "data.attend is row"),
        ({"tokenizer": TokenizerSpec()}, "data.tokenizer.file is not given"),
        ({"sets": {"x": SetSpec(sources=["stdlib:prose"])}}, "holds no examples"),
        ({"clean": True}, r"data.sets.talk.clean is for documents"),
        ({"split_on": "x"}, r"data.sets.talk.split_on is for documents"),
    ],
    ids=["attend", "tokenizer", "source", "clean", "split-on"],
)
def test_settings_of_no_use_are_refused(make: Any, change: dict[str, Any], what: str) -> None:
    spec, lesson = make(ROWS)
    if not hasattr(spec, next(iter(change))):
        change = {"sets": {"talk": evolve(spec.sets["talk"], **change)}}
    with pytest.raises(ValueError, match=what):
        prepare(evolve(spec, **change), lesson=lesson)


def test_nothing_to_learn_is_an_error(make: Any) -> None:
    spec, lesson = make([{"input_ids": [5, 6], "labels": [-100, -100]}])
    with pytest.raises(ValueError, match="nothing to train on"):
        prepare(spec, lesson=lesson)
