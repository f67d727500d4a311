"""Files of examples that nobody would write, and people have: no row is lost without a word, and nothing crashes."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from ironfn.data.chat import chat_of
from ironfn.data.examples import examples, taught
from ironfn.data.readers import DEPTH, Blank, Row, rows
from ironfn.data.supervise import Teaching
from ironfn.data.template import Limits
from ironfn.data.tokenizer import load, pieces

from .test_chat import ENDLESS, SPECIALS, tokenizer_json
from .test_data_cli import ironfn

ASK, ANSWER = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
GOOD = {"messages": [ASK, ANSWER]}
CALL = {"function": {"name": "add", "arguments": {}}}


def lines(*rows: Any, end: bytes = b"\n") -> bytes:
    return end.join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)


def nested(depth: int) -> bytes:
    """Return a row whose lists and objects lie so deep in each other."""
    inner = depth - 3
    return lines({"messages": [{**ASK, "x": 0}, ANSWER]}).replace(b"0", b"[" * inner + b"]" * inner, 1)


# name -> the bytes of a.jsonl, how many examples are in it, and of each faulty row its line and what is said
FILES: dict[str, tuple[bytes, int, list[tuple[int, str]]]] = {
    "broken": (lines(GOOD, b"{", b'{"text": "cu'), 1, [(2, "Expecting property name"), (3, "starting at column 10")]),
    "bom": (b"\xef\xbb\xbf" + lines(GOOD, {"text": "a"}), 2, []),
    "files with a bom each, joined": (lines(GOOD, b'\xef\xbb\xbf{"text": "a"}'), 2, []),
    "crlf": (lines(GOOD, {"text": "a"}, b"", {"text": "b"}, end=b"\r\n"), 3, []),
    "carriage returns": (lines(GOOD, {"text": "a"}, end=b"\r"), 0, [(1, "more follows behind a whole value")]),
    "utf-16": (lines({"text": "a"}).decode().encode("utf-16"), 0, [(1, "invalid UTF-8: byte 0xFF at byte 0")]),
    "NUL": (lines({"text": "a\0b"}, b'{"text": "a\0b"}', b"\0" * 9), 1, [(2, "column 12 is a NUL"), (3, "NUL byte")]),
    "as deep as may be": (lines(nested(DEPTH), GOOD), 2, []),
    "deeper": (lines(nested(DEPTH + 1), GOOD), 1, [(1, f"more than {DEPTH} deep")]),
    "far deeper": (lines(nested(900), b"[" * 10**6, GOOD), 1, [(1, "deep in each other"), (2, "deep in each other")]),
    "deep tools": (lines(GOOD | {"tools": "[" * 10**5}), 0, [(1, "tools is not JSON: lists and objects lie more")]),
    "a name twice": (
        lines(b'{"text": "a", "text": "b"}', b'{"messages": [{"role": "user", "role": "x"}]}', GOOD),
        1,
        [(1, "the name 'text' twice"), (2, "the name 'role' twice")],
    ),
    "surrogates": (
        lines({"text": "\ud800"}, {"messages": [{**ASK, "\udc00": 1}, ANSWER]}, GOOD | {"tools": [{"a": "\ud800"}]}),
        0,
        [(1, "U+D800"), (2, "U+DC00"), (3, "U+D800")],
    ),
    "roles": (
        lines(*({"messages": [{"role": role, "content": "x"}, ANSWER]} for role in ("admin", None, ["user"], {}))),
        0,
        [(line, "messages[0].role: ") for line in (1, 2, 3, 4)],
    ),
    "calls": (
        lines(
            {"messages": [ASK, {"role": "assistant", "tool_calls": [CALL]}]},
            {"messages": [{"role": "user", "tool_calls": [CALL]}, ANSWER]},
            {"messages": [ASK, {"role": "assistant", "function_call": "x"}]},
        ),
        1,
        [(2, "only the assistant calls tools, not the user"), (3, "tool_calls[0] needs a function with a name")],
    ),
    "weights": (
        lines(*({"messages": [ASK, {**ANSWER, "weight": weight}]} for weight in (2, -1, "1", [1], 1e400, 1))),
        1,
        [(line, "give 1 to train a message, 0 not to") for line in (1, 2, 3, 4, 5)],
    ),
    "large numbers": (
        lines(b'{"input_ids": [' + b"9" * 30 + b"]}", b'{"text": ' + b"9" * 5000 + b"}"),
        0,
        [(1, "more than 64 bits"), (2, "too many digits")],
    ),
    "no objects": (lines(1, "x", None, True, []), 0, [(line, "a JSON object belongs here") for line in range(1, 6)]),
    "nothing in it": (
        lines({}, {"messages": []}, {"conversations": []}, {"input_ids": []}),
        0,
        [(1, "(none)"), (2, "at least one message"), (3, "at least one message"), (4, "at least one")],
    ),
    "huge names": (
        lines({"k" * 10**5: 1}, {str(n): n for n in range(999)}),
        0,
        [(1, "of no known form"), (2, "'9', …)")],
    ),
}


@pytest.mark.parametrize("name", list(FILES))
def test_every_row_is_used_or_told(name: str, tmp_path: Path) -> None:
    data, good, faults = FILES[name]
    (tmp_path / "a.jsonl").write_bytes(data)
    told = json.loads(ironfn("data", "check", f"{tmp_path}/a.jsonl", "--json", code=int(bool(faults) or not good)))
    assert told["examples"] == good
    said = sorted((int(text.split(":")[1]), text) for kept in told["faults"].values() for text in kept["first"])
    assert [line for line, _ in said] == [line for line, _ in faults]
    for (_, text), (_, what) in zip(said, faults, strict=True):
        assert what in text
        assert len(text) < 600


def test_what_fits_into_no_run_together_is_told(tmp_path: Path) -> None:
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    (tmp_path / "a.jsonl").write_bytes(lines(GOOD, {"text": "a"}, {"input_ids": [1]}))
    assert "part the files" not in ironfn("data", "check", f"{tmp_path}/a.jsonl")
    (tmp_path / "a.jsonl").write_bytes(lines(GOOD, pair))
    assert "part the files by what they hold" in ironfn("data", "check", f"{tmp_path}/a.jsonl")
    (tmp_path / "a.jsonl").write_bytes(b"")
    assert "nothing to train on" in ironfn("data", "check", f"{tmp_path}/a.jsonl", code=1)


@pytest.mark.parametrize(
    ("data", "places"),
    [
        (json.dumps(GOOD, indent=1).encode(), ["1"]),
        (b"\n\n" + json.dumps([GOOD, {"text": "a"}], indent=1).encode(), ["4", "16"]),
        (b'[{"text": "a", "text": "b"},\n{"text": "c"}]', ["bad 1", "2"]),
        (b'[{"text": "a", "n": ' + b"[" * 300 + b"]" * 300 + b'},\n{"text": "c"}]', ["bad 1", "2"]),
    ],
    ids=["one row on many lines", "a list", "a name twice", "deep"],
)
def test_a_json_file_holds_a_row_or_a_list(tmp_path: Path, data: bytes, places: list[str]) -> None:
    (tmp_path / "a.json").write_bytes(data)
    found = [("" if isinstance(row, Row) else "bad ") + row.place.split(":")[-1] for row in rows(tmp_path / "a.json")]
    assert found == places


def test_parquet_with_nulls(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    told = [GOOD, {"messages": None}, {"messages": [ASK, {**ANSWER, "content": None}]}, {"messages": [None, ANSWER]}]
    parquet.write_table(arrow.Table.from_pylist(told), tmp_path / "a.parquet")
    parquet.write_table(arrow.table({"text": [b"a", None]}), tmp_path / "b.parquet")
    said = ironfn("data", "check", f"{tmp_path}/a.parquet", f"{tmp_path}/b.parquet", code=1)
    assert "1 examples (1 messages), 5 faulty rows" in said
    assert f"{tmp_path}/a.parquet:row 2: the fields that hold something (none)" in said
    assert f"{tmp_path}/a.parquet:row 3: messages[1].content is missing" in said
    assert f"{tmp_path}/a.parquet:row 4: messages[0]: a message is an object" in said
    assert f"{tmp_path}/b.parquet:row 1: the field 'text' holds bytes" in said


def test_a_pipe_is_read_once_and_refused_where_that_is_not_enough(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    os.mkfifo(path)
    feeder = threading.Thread(target=lambda: path.write_bytes(lines(GOOD, {"text": "a"})), daemon=True)
    feeder.start()
    assert "2 examples" in ironfn("data", "check", str(path))
    feeder.join(10)
    spec = tmp_path / "spec.yaml"
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_json())
    data = f"{{form: examples, dir: {tmp_path}/data, tokenizer: {{file: {tmp_path}/tokenizer.json}}, sets: "
    spec.write_text(f"data: {data}{{a: {{sources: [{path}]}}}}}}\n")
    assert "is a pipe" in ironfn("prepare", str(spec), code=1)


def test_folders_and_files_that_may_not_be_read() -> None:
    me = os.geteuid()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        assert "is a directory" in ironfn("data", "check", name, code=2)
        (folder / "a.jsonl").write_bytes(lines(GOOD))
        (folder / "a.jsonl").chmod(0)
        if me == 0:
            os.seteuid(65534)  # root reads everything
        try:
            said = ironfn("data", "check", f"{name}/a.jsonl", code=1 if me == 0 else 2)
        finally:
            os.seteuid(me)
    assert "Permission denied" in said or "is not readable" in said


def test_a_template_that_never_ends_is_given_up(tmp_path: Path) -> None:
    """Two seconds for every row of a large file would be days."""
    vocabulary = load_tokenizer(tmp_path)
    chat = chat_of(vocabulary, ENDLESS, SPECIALS, Limits(seconds=0.1))
    (tmp_path / "a.jsonl").write_bytes(lines(*[GOOD] * 50))
    with pytest.raises(ValueError, match=r"a.jsonl:5: the chat template did not come to an end .* 5 examples in a row"):
        taught_of(tmp_path, Teaching(vocabulary, chat))
    chat = chat_of(vocabulary, "{% if messages[0].content == 'x' %}" + ENDLESS + "{% endif %}", SPECIALS,
                   Limits(seconds=0.1))  # fmt: skip
    bad = {"messages": [{**ASK, "content": "x"}, ANSWER]}
    (tmp_path / "a.jsonl").write_bytes(lines(*[bad] * 4, GOOD, *[bad] * 4))
    found = taught_of(tmp_path, Teaching(vocabulary, chat))
    assert [getattr(item, "kind", "") for item in found].count("endless template") == 8
    assert len(found) == 9


def taught_of(folder: Path, teaching: Teaching) -> list[Any]:
    rows = (row for row in examples(folder / "a.jsonl", {}) if not isinstance(row, Blank))
    return list(taught(rows, teaching))


def load_tokenizer(folder: Path) -> Any:
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    return load(folder / "tokenizer.json")


def test_calls_and_texts_that_a_template_would_lose_are_told(tmp_path: Path) -> None:
    vocabulary = load_tokenizer(tmp_path)
    silent = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    teaching = Teaching(vocabulary, chat_of(vocabulary, silent, SPECIALS))
    called = [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    marks = "".join(map(chr, range(0xFDD0, 0xFDF0)))
    told = [{"messages": called}, {"messages": [{**ASK, "content": marks}, ANSWER]}, {"messages": [ASK, ANSWER]}]
    (tmp_path / "a.jsonl").write_bytes(lines(*told))
    one, two, three = taught_of(tmp_path, teaching)
    assert "leaves out the call of 'add' in messages[1]" in str(one)
    assert "U+FDD0 to U+FDEF" in str(two)
    assert isinstance(three, tuple)


def test_a_long_text_is_encoded_in_pieces_and_as_if_whole(tmp_path: Path) -> None:
    vocabulary = load_tokenizer(tmp_path)
    vocabulary = evolve(vocabulary, joins=True)
    text = "the words of a long\ntext, é漢 " * 9000
    assert len(pieces(text, vocabulary)) > 2
    (tmp_path / "a.jsonl").write_bytes(lines({"text": text}))
    ((_, (ours,)),) = taught_of(tmp_path, Teaching(vocabulary))
    assert ours.ids[:-1].tolist() == vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
    assert ours.trained.tolist() == [False] + [True] * (len(ours.ids) - 1)


def test_a_pair_among_examples_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_json())
    (tmp_path / "a.jsonl").write_bytes(lines({"prompt": "a", "chosen": "b", "rejected": "c"}))
    spec = tmp_path / "spec.yaml"
    data = f"{{form: examples, dir: {tmp_path}/data, tokenizer: {{file: {tmp_path}/tokenizer.json}}, sets: "
    spec.write_text(f"data: {data}{{a: {{sources: [{tmp_path}/a.jsonl]}}}}}}\n")
    said = ironfn("prepare", str(spec), code=1)
    assert "a.jsonl:1: pair is a form of preferences, not of examples; set data.form to pairs" in said
