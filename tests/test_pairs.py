"""Preferences from files to rows: what each form says, the prompt once, and pairs that nothing parts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trl.data_utils import extract_prompt

from ironfn.data.chat import Chat, chat_of
from ironfn.data.conversation import Fault
from ironfn.data.dataset import Dataset, eval_batches, rows_at
from ironfn.data.lesson import Lesson
from ironfn.data.opening import open_dataset
from ironfn.data.pairs import PairStore, cut_pairs, lay_pairs
from ironfn.data.preferences import Preference, parse_preference
from ironfn.data.preparation import prepare
from ironfn.data.readers import Row
from ironfn.data.store import open_store
from ironfn.data.supervise import Teaching
from ironfn.data.templates import template_of
from ironfn.data.tokenizer import load
from ironfn.spec.records import DataSpec, SetSpec, SftSpec, SplitSpec, TokenizerSpec

from .test_chat import tokenizer_json
from .test_data_cli import ironfn

ASK, MORE = {"role": "user", "content": "2 + 2?"}, {"role": "user", "content": "sure?"}
FOUR, FIVE = {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "5"}


def read(value: Any, **fields: str) -> Preference:
    return parse_preference(Row(value, "a.jsonl:7"), fields)


@pytest.mark.parametrize(
    ("value", "asked"),
    [
        ({"prompt": [ASK], "chosen": [FOUR], "rejected": [FIVE]}, [ASK]),
        ({"prompt": "2 + 2?", "chosen": [FOUR], "rejected": [FIVE]}, [ASK]),
        ({"prompt": "2 + 2?", "chosen": [ASK, FOUR], "rejected": [ASK, FIVE]}, [ASK]),
        ({"chosen": [ASK, FOUR, MORE, FOUR], "rejected": [ASK, FOUR, MORE, FIVE]}, [ASK, FOUR, MORE]),
        ({"input": {"messages": [ASK]}, "preferred_output": [FOUR], "non_preferred_output": [FIVE]}, [ASK]),
    ],
    ids=["prompt", "text", "repeated", "implicit", "openai"],
)  # fmt: skip
def test_conversations_in_every_form(value: Any, asked: list[Any]) -> None:
    found = read(value)
    assert found.rejected is not None
    assert list(found.chosen.messages) == [*asked, FOUR]
    assert list(found.rejected.messages) == [*asked, FIVE]
    assert found.chosen.weights == found.rejected.weights == (*[0] * len(asked), None)


def test_texts_in_every_form() -> None:
    found = read({"prompt": "2 + 2?", "chosen": " 4", "rejected": " 5"})
    assert found.rejected is not None
    assert (found.chosen.prompt, found.chosen.completion, found.rejected.completion) == ("2 + 2?", " 4", " 5")
    assert read({"q": "2?", "good": "4", "bad": "5"}, prompt="q", chosen="good", rejected="bad").chosen.prompt == "2?"
    judged = [read({"prompt": "2?", "completion": "4", "label": label}) for label in (True, False, 1, 0)]
    assert [each.liked for each in judged] == [True, False, True, False]
    tool = {"type": "function", "function": {"name": "add"}}
    told = {"input": {"messages": [ASK], "tools": [tool]}, "preferred_output": [FOUR], "non_preferred_output": [FIVE]}
    assert read(told).chosen.tools == (tool,)


@pytest.mark.parametrize("sides", [("The sky is blue.", "The sky is green."), ("It is 4", "It was 5")])
def test_an_implicit_prompt_of_text_is_what_both_begin_with(sides: tuple[str, str]) -> None:
    told = {"chosen": sides[0], "rejected": sides[1]}
    found, theirs = read(told), extract_prompt(told)
    assert found.rejected is not None
    assert (found.chosen.prompt, found.chosen.completion) == (theirs["prompt"], theirs["chosen"])
    assert found.rejected.completion == theirs["rejected"]


def test_an_implicit_prompt_ends_with_a_word() -> None:
    found = read({"chosen": "the sky is blue", "rejected": "the sky is black"})
    assert (found.chosen.prompt, found.chosen.completion) == ("the sky is", " blue")
    found = read({"chosen": "it is", "rejected": "it is so"})
    assert (found.chosen.prompt, found.chosen.completion) == ("it", " is")


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "equal texts"),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, "empty chosen"),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, "rejected"),
        ({"chosen": "a", "rejected": "b"}, "no prompt"),
        ({"chosen": [FOUR], "rejected": [FIVE]}, "no prompt"),
        ({"prompt": [ASK], "chosen": [MORE], "rejected": [FIVE]}, "no answer"),
        ({"prompt": "a", "completion": "b", "label": "yes"}, "label"),
        ({"prompt": "a", "completion": "b", "label": 0.0}, "label"),
        ({"prompt": "a", "completion": "b"}, "unknown form"),
        ({"input": "a", "preferred_output": [FOUR], "non_preferred_output": [FIVE]}, "input"),
        ({"prompt": "a", "chosen": "b\ud800", "rejected": "c"}, "lone surrogate"),
        ([], "no object"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(value: Any, kind: str) -> None:
    with pytest.raises(Fault) as found:
        read(value)
    assert (found.value.place, found.value.kind) == ("a.jsonl:7", kind)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_bytes(tokenizer_json())
    vocabulary = load(path)
    made = chat_of(vocabulary, template_of("chatml", vocabulary), {"eos_token": "<|im_end|>"})
    yield path, made
    made.renderer.close()


@pytest.fixture
def opened(tmp_path: Path, chat: tuple[Path, Chat]) -> Callable[..., Dataset]:
    """Return what prepares rows and opens them."""

    def prepared(rows: list[Any], length: int = 64, holds: Any = "pairs", overlong: Any = "truncate") -> Dataset:
        (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
        spec = DataSpec(
            dir=str(tmp_path / "data"),
            sets={"likes": SetSpec(sources=[str(tmp_path / "a.jsonl")])},
            tokenizer=TokenizerSpec(file=str(chat[0])),
            split=SplitSpec(validation=0.0),
            length=length,
            shuffle=False,
        )
        lesson = Lesson(SftSpec(overlong=overlong), Teaching(chat[1].vocabulary, chat[1]), holds)
        prepare(spec, lesson=lesson)
        return open_dataset(spec, "train", lesson)

    return prepared


def pairs_of(data: Dataset) -> dict[tuple[int, ...], list[tuple[int, ...]]]:
    """Return every prompt of a dataset's rows, as a text reads it, with the completions that it is followed by."""
    found: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    batch = rows_at(data, range(data.rows), 0)
    rows = [{name: value[row].numpy() for name, value in batch.items()} for row in range(data.rows)]
    for row in rows:
        for text in range(int(row["until"].max()) + 1):
            held = (row["segment"] <= text) & (text <= row["until"])
            np.testing.assert_array_equal(row["position"][held], np.arange(held.sum()))
            own = (row["segment"] == text) & (row["until"] == text)
            assert not row["weight"][held & ~own].any(), "only completions are asked for"
            ids = [*row["tokens"][held].tolist(), row["targets"][own][-1]]
            np.testing.assert_array_equal(row["targets"][own], row["tokens"][own].tolist()[1:] + ids[-1:])
            size = int(own.sum())
            assert size == int(row["weight"][own].sum())
            found.setdefault(tuple(ids[:-size]), []).append(tuple(ids[-size:]))
    return found


def ids_of(chat: tuple[Path, Chat], text: str) -> tuple[int, ...]:
    return tuple(chat[1].vocabulary.tokenizer.encode(text, add_special_tokens=False).ids)


def test_rows_hold_every_pair_once_and_the_prompt_once(opened: Any, chat: Any) -> None:
    """Pairs of lengths (3, 9) and (8, 2), and others, stay together, whatever row they are laid into."""
    words = [("x" * a, "y" * b) for a, b in ((3, 9), (8, 2), (1, 1), (5, 6), (2, 7))]
    rows = [{"prompt": f"ask {n}:", "chosen": good, "rejected": bad} for n, (good, bad) in enumerate(words)]
    data = opened([*rows, rows[1]])
    end = chat[1].end
    expected = {
        ids_of(chat, f"ask {n}:"): [(*ids_of(chat, good), end), (*ids_of(chat, bad), end)]
        for n, (good, bad) in enumerate(words)
    }
    assert pairs_of(data) == expected
    assert data.tokens == sum(len(p) - 1 + sum(map(len, both)) for p, both in expected.items())
    assert data.rows < len(words)


def test_a_conversation_ends_its_prompt_where_the_answer_is_asked_for(opened: Any, chat: Any) -> None:
    data = opened([{"prompt": [ASK], "chosen": [FOUR], "rejected": [FIVE]}])
    asked = tuple(chat[1].encode([ASK]))
    ((prompt, (good, bad)),) = pairs_of(data).items()
    assert prompt == asked
    assert (*prompt, *good) == tuple(chat[1].encode([ASK, FOUR], add_generation_prompt=False))[: len(prompt + good)]
    assert good[-1] == bad[-1] == chat[1].end


@pytest.mark.parametrize("kind", ["truncate", "drop"])
def test_what_is_too_long_is_cut_together_and_counted(opened: Any, chat: Any, kind: str) -> None:
    """A prompt of 20, completions of 3 and 9: 16 places leave the prompt its last 5 ids, the same for both."""
    letters = "wq" * 10
    row = {"prompt": letters, "chosen": "zq", "rejected": "zqzqzqzq"}
    sizes = [len(ids_of(chat, row[name])) for name in ("prompt", "chosen", "rejected")]
    assert sizes == [20, 2, 8], "a letter is a token"
    short = {"prompt": "ab", "chosen": "c", "rejected": "d"}
    data = opened([row, short], length=16, overlong=kind)
    (store,) = data.stores
    assert isinstance(store, PairStore)
    found = pairs_of(data)
    assert found.pop(ids_of(chat, "ab")) is not None
    assert (store.fit.overlong, store.fit.lost, store.fit.targets) == (1, int(kind == "drop"), 12)
    if kind == "drop":
        assert (found, store.fit.lost_targets) == ({}, 12)
        return
    end = chat[1].end
    assert found == {ids_of(chat, letters)[-5:]: [(*ids_of(chat, "zq"), end), (*ids_of(chat, "zqzqzqzq"), end)]}
    assert store.fit.lost_targets == 0


def test_completions_lose_their_ends_only_where_the_prompt_is_not_enough(opened: Any, chat: Any) -> None:
    data = opened([{"prompt": "abcd", "chosen": "qz", "rejected": "wqwqwqwqwqwqwqwq"}], length=8)
    good, bad = (*ids_of(chat, "qz"), chat[1].end), ids_of(chat, "wqwqw")
    assert pairs_of(data) == {ids_of(chat, "abcd")[-1:]: [good, bad]}
    (store,) = data.stores
    assert isinstance(store, PairStore)
    assert (store.fit.targets, store.fit.lost_targets) == (20, 12)


def test_judged_completions_bring_the_next_ones_along(opened: Any, chat: Any) -> None:
    rows = [{"prompt": f"ask {n}:", "completion": "x" * n, "label": n % 2 == 1} for n in (1, 2, 3)]
    data = opened(rows, holds="judged")
    texts = {n: (*ids_of(chat, "x" * n), chat[1].end) for n in (1, 2, 3)}
    assert pairs_of(data) == {ids_of(chat, f"ask {n}:"): [texts[n], texts[n % 3 + 1]] for n in (1, 2, 3)}
    batch = rows_at(data, range(data.rows), 0)
    own = (batch["segment"] % 2 == 0) & (batch["weight"] > 0)
    liked = {len(run) for run in "".join(map(str, batch["liked"][own].tolist())).split("0") if run}
    assert batch["liked"].sum() == 2 + 4
    assert liked <= {2, 4, 6}


def test_other_forms_and_lone_completions_are_refused(opened: Any) -> None:
    with pytest.raises(ValueError, match="does not go with an objective of pairs"):
        opened([{"prompt": "a", "completion": "b", "label": True}])
    with pytest.raises(ValueError, match="a single judged completion"):
        opened([{"prompt": "a", "completion": "b", "label": True}], holds="judged")
    with pytest.raises(ValueError, match="truncate or drop"):
        opened([{"prompt": "a", "chosen": "b", "rejected": "c"}], overlong="split")


def test_an_evaluation_blanks_the_rows_that_stand_in(opened: Any) -> None:
    rows = [{"prompt": f"ask {n}:", "chosen": "x" * 30, "rejected": "y" * 20} for n in range(3)]
    data = opened(rows)
    assert data.rows == 3
    last = next(eval_batches(data, 2, share=1, shares=2))
    assert last["weight"].sum(1).tolist() == [last["weight"][0].sum(), 0.0]
    assert last["until"][1].unique().tolist() == last["segment"][1].unique().tolist() == [-1]


def test_data_check_knows_preferences(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_json())
    good = {"prompt": "ab", "chosen": "c", "rejected": "d"}
    rows = [good, good, {"prompt": "ab", "completion": "c", "label": True}, {"prompt": "a", "response": "b"}]
    rows += [{"prompt": "ab", "chosen": "c", "rejected": "c"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    said = ironfn(
        "data", "check", str(tmp_path / "a.jsonl"), "--tokenizer", str(tmp_path / "tokenizer.json"), "--length", "4",
        code=1,
    )  # fmt: skip
    assert "4 examples (2 pair, 1 judged, 1 completion), 1 faulty rows" in said
    assert "faulty, equal texts: 1\n" in said
    assert "repeats of an earlier example: 1\n" in said
    assert f"longer than a row of 4: 2\n  {tmp_path}/a.jsonl:1: 5 places" in said


def test_texts_that_are_scored_are_in_the_row_to_their_last_id(opened: Any, chat: Any, tmp_path: Path) -> None:
    rows = [
        {"prompt": "wq" * 10, "chosen": "zq", "rejected": "zqzqzqzq"},
        {"prompt": "ab", "chosen": "c", "rejected": "d"},
    ]
    (laid,) = opened(rows).stores
    assert isinstance(laid, PairStore)
    store, end = open_store(laid.path, "likes/train"), chat[1].end
    for length, kept in ((64, 20), (16, 4), (10, 1)):
        data = cut_pairs(lay_pairs(store, laid.bits, length, "truncate", scored=True), np.arange(1))
        prompt = ids_of(chat, "wq" * 10)[-kept:]
        texts = {tuple(data["tokens"][0][(data["segment"][0] <= n) & (n <= data["until"][0])]) for n in (0, 1)}
        full = (*ids_of(chat, "zqzqzqzq"), end)
        assert texts == {(*prompt, *ids_of(chat, "zq"), end), (*prompt, *full[: length - kept - 3])}
        ends = np.flatnonzero(data["weight"][0])
        assert {int(data["tokens"][0][at]) for at in ends} == ({end} if length > 10 else {end, full[5]})
        assert len(ends) == (4 if length == 64 else 2)
