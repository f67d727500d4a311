"""Rows for fine-tuning, in the forms that people have: what each teaches, and what is wrong with it, in its place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ironfn.data.conversation import Fault, detect, parse
from ironfn.data.readers import Bad, Row, rows

CALL = {"function": {"name": "add", "arguments": {"a": 1}}}
ASK, ANSWER = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
DOLLY = Path(__file__).parents[2] / "shared/data/sft/dolly_hhrlhf_small.jsonl"


def read(value: Any, **fields: str) -> Any:
    return parse(Row(value, "a.jsonl:7"), fields)


@pytest.mark.parametrize(
    ("kind", "value", "messages"),
    [
        ("messages", {"messages": [ASK, ANSWER], "prompt": "x", "response": "y"}, [ASK, ANSWER]),
        ("conversations", {"conversations": [ASK, ANSWER]}, [ASK, ANSWER]),
        (
            "conversations",
            {
                "system": "brief",
                "conversations": [
                    {"from": "human", "value": "2 + 2?"},
                    {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                    {"from": "observation", "value": "4"},
                    {"from": "gpt", "value": "4"},
                ],
            },
            [
                {"role": "system", "content": "brief"},
                ASK,
                {"role": "assistant", "tool_calls": [{"type": "function", **CALL}]},
                {"role": "tool", "content": "4"},
                ANSWER,
            ],
        ),
        ("alpaca", {"instruction": "2", "input": "+ 2?", "output": "4"}, [{**ASK, "content": "2\n+ 2?"}, ANSWER]),
        ("alpaca", {"instruction": "2 + 2?", "input": "", "output": "4", "text": "all"}, [ASK, ANSWER]),
        (
            "alpaca",
            {"instruction": "x", "input": None, "output": "y", "system": "s", "history": [["2 + 2?", "4"]]},
            [
                {"role": "system", "content": "s"},
                ASK,
                ANSWER,
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": "y"},
            ],
        ),
        ("completion", {"prompt": [ASK], "completion": [ANSWER]}, [ASK, ANSWER]),
    ],
    ids=["openai", "messages-in-conversations", "sharegpt", "alpaca", "alpaca-no-input", "alpaca-history", "trl"],
)  # fmt: skip
def test_conversations_in_every_form_are_messages(kind: str, value: Any, messages: list[Any]) -> None:
    assert detect(Row(value, "p"), {}) == kind
    example = read(value)
    assert (example.kind, example.place) == (kind, "a.jsonl:7")
    assert list(example.messages) == messages


def test_texts_and_tokens() -> None:
    assert read({"text": "all"}).completion == "all"
    example = read({"prompt": "", "response": "y"})
    assert (example.kind, example.prompt, example.completion) == ("completion", "", "y")
    assert read({"prompt": "x", "response": "z", "completion": "y"}).completion == "y"
    example = read({"input_ids": [5, 6, 7, 0], "labels": [-100, 6, 7, -100], "attention_mask": [1, 1, 1, 0]})
    assert (example.ids, example.trained) == ((5, 6, 7), (False, True, True))
    assert read({"input_ids": [5, 6]}).trained == (True, True)


def test_fields_are_renamed() -> None:
    assert read({"question": "q", "answer": "a"}, prompt="question", response="answer").completion == "a"
    example = read({"prompt": "2 + 2?", "response": "4"}, instruction="prompt", output="response")
    assert list(example.messages) == [ASK, ANSWER]
    assert read({"prompt": "no", "text": "other", "body": "text"}, text="body").completion == "text"


def test_calls_and_tools_are_what_templates_read() -> None:
    function = {"name": "add", "arguments": '{"a": 1}'}
    modern = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}
    legacy = {"role": "assistant", "content": None, "function_call": function}
    for turn, call in ((modern, {"id": "1", **CALL}), (legacy, {"type": "function", **CALL})):
        assert read({"messages": [ASK, turn]}).messages[1] == {"role": "assistant", "tool_calls": [call]}
    tool = {"type": "function", "function": {"name": "add"}}
    for told in ({"tools": [tool]}, {"tools": json.dumps([tool])}, {"functions": [{"name": "add"}]}):
        assert read({"messages": [ASK, ANSWER], **told}).tools == (tool,)
    assert read({"messages": [ASK, ANSWER], "tools": []}).tools is None


def test_weights_are_taken_out_of_the_messages() -> None:
    turns = [ASK, {**ANSWER, "weight": 0}, {**ASK, "weight": 0}, {**ANSWER, "weight": 1}, ASK, ANSWER]
    example = read({"messages": turns})
    assert example.weights == (None, 0, 0, 1, None, None)
    assert list(example.messages) == [ASK, ANSWER] * 3
    assert read({"prompt": [ASK, ANSWER, ASK], "completion": [ANSWER]}).weights == (0, 0, 0, None)


def messages(*turns: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(turns), **more}


def calling(calls: Any) -> dict[str, Any]:
    return messages(ASK, {"role": "assistant", "tool_calls": calls})


@pytest.mark.parametrize(
    ("value", "kind", "what"),
    [
        ([1], "no object", "a JSON object belongs here, not list"),
        ({"a": 1, "text": None}, "unknown form", "the fields that hold something ('a') are of no known form"),
        ({"messages": "x"}, "messages", "messages is a list, not str"),
        (messages(), "messages", "at least one message"),
        (messages("x"), "messages[]", "messages[0]: a message is an object"),
        (messages(ASK, {"role": "admin", "content": "x"}), "messages[].role", "messages[1].role: 'admin'"),
        (messages(ASK, {"role": "assistant"}), "messages[].content", "messages[1].content is missing"),
        (messages(ASK), "no answer", "no message of the assistant"),
        (messages(ASK, {**ANSWER, "weight": 0}), "no answer", "no message of the assistant"),
        (messages(ASK, {**ANSWER, "content": " \n"}), "empty answer", "messages[1].content is empty"),
        (messages(ASK, {**ANSWER, "weight": 0.5}), "messages[].weight", "messages[1]: weight is '0.5'"),
        (messages(ASK, {**ANSWER, "weight": "1"}), "messages[].weight", "weight is '1'"),
        (messages({**ASK, "weight": 1}, ANSWER), "messages[].weight", "messages[0]: only the assistant's"),
        (calling([]), "messages[].tool_calls", "messages[1].tool_calls is a list of at least one call"),
        (calling([{"function": {}}]), "messages[].tool_calls", "tool_calls[0] needs a function with a name"),
        (calling([{"function": {"name": "f", "arguments": "{"}}]), "messages[].tool_calls", "is not JSON"),
        (calling([{"function": {"name": "f", "arguments": "3"}}]), "messages[].tool_calls", "an object, or its JSON"),
        (messages(ASK, ANSWER, tools="{"), "tools", "tools is not JSON"),
        (messages(ASK, ANSWER, tools=["x"]), "tools", "tools is a list of objects"),
        (messages(ASK, {**ANSWER, "content": "\ud800"}), "lone surrogate", "U+D800"),
        (messages(ASK, {**ANSWER, "name": b"x"}), "no JSON value", "bytes"),
        ({"conversations": [{"from": "bot", "value": "x"}]}, "conversations[].from", "[0].from: 'bot' is none of"),
        ({"conversations": [{"from": "function_call", "value": "x"}]}, "conversations[].value", "not the JSON of"),
        ({"instruction": "", "output": "x"}, "empty instruction", "instruction is empty"),
        ({"instruction": "x", "output": 3}, "output", "holds int"),
        ({"instruction": "x", "output": "y", "history": [["a"]]}, "history", "history[0] is a list of a question"),
        ({"prompt": "x", "response": " "}, "empty response", "response is empty"),
        ({"prompt": [ASK], "completion": "x"}, "prompt", "holds list"),
        ({"text": ""}, "empty text", "text is empty"),
        ({"text": "\udfff"}, "lone surrogate", "U+DFFF"),
        ({"input_ids": []}, "input_ids", "at least one"),
        ({"input_ids": [1, True]}, "input_ids", "whole numbers"),
        ({"input_ids": [1, -2]}, "input_ids", "no id is below 0"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels", "labels has 1 numbers for 2 input_ids"),
        ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "labels", "labels[0] is 2, but input_ids[0] is 1"),
    ],
    ids=lambda value: None if isinstance(value, str) else "row",
)  # fmt: skip
def test_a_fault_has_its_kind_its_place_and_a_remedy(value: Any, kind: str, what: str) -> None:
    with pytest.raises(Fault) as caught:
        read(value)
    assert caught.value.kind == kind
    assert str(caught.value).startswith("a.jsonl:7: ")
    assert what in str(caught.value)


def test_the_same_rows_from_every_kind_of_file(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    told = [messages(ASK, ANSWER), messages(ASK, ANSWER, ASK, {**ANSWER, "content": "é\n漢"})]
    lines = "\r\n\r\n".join(json.dumps(each) for each in told).encode()
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines)
    (tmp_path / "b.json").write_bytes(b"\xef\xbb\xbf\n " + json.dumps(told, indent=1).encode() + b"\n")
    (tmp_path / "c.json").write_bytes(lines)
    (tmp_path / "d.json.gz").write_bytes(gzip.compress(json.dumps(told).encode()))
    parquet.write_table(arrow.Table.from_pylist(told), tmp_path / "e.parquet")
    places: list[list[str]] = []
    for path in sorted(tmp_path.iterdir()):
        found = [row for row in rows(path) if isinstance(row, Row)]
        assert [parse(row, {}).messages for row in found] == [tuple(each["messages"]) for each in told]
        places.append([row.place.removeprefix(f"{path}:") for row in found])
    assert places == [["1", "3"], ["3", "15"], ["1", "3"], ["1", "1"], ["row 1", "row 2"]]


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b'[{"a": 1},\n{"a": ', ":2: the list ends here"),
        (b'[{"a": 1}', ":1: the list ends here"),
        (b'[{"a": 1}]]', ":1: the list ends here"),
        (b'[{"a": 1}\n, "\xff"]', ":2: invalid UTF-8: byte 0xFF"),
        (b"[" * 100_000, ":1: the list ends here"),
    ],
    ids=["cut", "open", "more", "utf8", "deep"],
)
def test_a_broken_list_is_no_shorter_list(tmp_path: Path, data: bytes, what: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"{path}{what}"):
        list(rows(path))


def test_a_bad_line_leaves_the_others(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n{broken\n{"text": "b"}\n')
    assert [isinstance(row, Bad) for row in rows(path)] == [False, True, False]


@pytest.mark.skipif(not DOLLY.is_file(), reason="the shared folder with real data is not beside this checkout")
def test_real_rows_are_completions() -> None:
    found = [parse(row, {}) for row in rows(DOLLY) if isinstance(row, Row)]
    assert len(found) == 1000
    assert {example.kind for example in found} == {"completion"}
    assert all(example.prompt.endswith("### Response:\n") and example.completion for example in found)
