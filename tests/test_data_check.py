"""The command data check: every fault with its kind and line, sizes, repeats, and how long to train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ironfn.data.check import Findings, suggest
from ironfn.data.packing import pack

from .chat_templates import TEMPLATES
from .test_chat import tokenizer_json
from .test_data_cli import ironfn

ASK, ANSWER = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}


def write(path: Path, rows: list[Any]) -> str:
    path.write_bytes(b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows))
    return str(path)


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_json())
    return str(tmp_path / "tokenizer.json")


def test_faults_are_counted_by_kind_with_their_lines(tmp_path: Path) -> None:
    good = {"messages": [ASK, ANSWER]}
    bad = {"messages": [{"role": "admin", "content": "x"}]}
    path = write(tmp_path / "a.jsonl", [good, bad, b"{", b"", good, *[bad] * 6, {"messages": [ASK]}, {"x": 1}])
    said = ironfn("data", "check", path, code=1)
    assert "2 examples (2 messages), 10 faulty rows, 1 blank lines" in said
    assert f"faulty, messages[].role: 7\n  {path}:2: messages[0].role: 'admin' is none of" in said
    assert "  and 2 more" in said
    assert f"{path}:3: not JSON" in said
    assert f"{path}:12: no message of the assistant" in said
    assert f"{path}:13: the fields that hold something ('x') are of no known form" in said
    assert f"repeats of an earlier example: 1\n  {path}:5\n" in said
    assert "messages a conversation: 2: 2" in said
    assert "characters: 14; each text least 7" in said
    told = json.loads(ironfn("data", "check", path, "--json", code=1))
    assert {kind: kept["count"] for kind, kept in told["faults"].items()} == {
        "messages[].role": 7, "unreadable row": 1, "no answer": 1, "unknown form": 1,
    }  # fmt: skip
    assert told["examples"] == 2
    assert told["duplicates"] == {"count": 1, "first": [f"{path}:5"]}


def test_several_files_of_several_forms(tmp_path: Path) -> None:
    one = write(tmp_path / "a.jsonl", [{"prompt": "a", "response": "b"}, {"text": "c"}])
    two = tmp_path / "b.json"
    two.write_text(json.dumps([{"q": "a", "a": "b"}, {"instruction": "a", "output": "b"}]))
    said = ironfn("data", "check", one, str(two), "--field", "prompt=q", "--field", "completion=a")
    assert "4 examples (2 completion, 1 text, 1 alpaca), 0 faulty rows" in said
    two.write_text('[{"text": "x"}, {"te')
    said = ironfn("data", "check", one, str(two), code=1)
    assert "3 examples" in said
    assert f"faulty, unreadable file: 1\n  {two}:1: the list ends here" in said


def test_tokens_are_those_that_a_run_would_see(tmp_path: Path, tokenizer: str) -> None:
    rows = [{"prompt": "é" * n, "completion": "ab " * 5} for n in range(1, 30)]
    path = write(tmp_path / "a.jsonl", rows)
    told = json.loads(ironfn("data", "check", path, "--tokenizer", tokenizer, "--length", "40", "--json"))
    from ironfn.data.tokenizer import load

    vocabulary = load(tokenizer)
    parts = [[len(vocabulary.tokenizer.encode(row[name]).ids) for name in ("prompt", "completion")] for row in rows]
    sizes = [prompt + completion + 1 for prompt, completion in parts]
    assert told["sizes"]["total"] == sum(sizes)
    assert (told["sizes"]["least"], told["sizes"]["most"]) == (min(sizes), max(sizes))
    assert told["trained"] == sum(completion + 1 for _, completion in parts)
    assert told["over"]["count"] == sum(size > 41 for size in sizes) > 0
    assert told["cut_away"]["count"] == sum(prompt > 40 for prompt, _ in parts) > 0
    kept = [min(size - 1, 40) for size, (prompt, _) in zip(sizes, parts, strict=True) if prompt <= 40]
    assert told["plan"]["rows"] == pack(np.array(kept), 40).rows


def test_conversations_are_written_by_the_template(tmp_path: Path, tokenizer: str) -> None:
    path = write(tmp_path / "a.jsonl", [{"messages": [ASK, ANSWER]}, {"messages": [ASK, ASK, ANSWER]}])
    said = ironfn("data", "check", path, "--tokenizer", tokenizer, code=1)
    assert "faulty, no template: 2" in said
    (tmp_path / "inst.jinja").write_text(TEMPLATES["inst"].replace("bos_token", "'<s>'"))
    said = ironfn("data", "check", path, "--tokenizer", tokenizer, "--template", str(tmp_path / "inst.jinja"), code=1)
    assert f"{path}:2: the chat template cannot write this conversation: roles must alternate" in said
    told = json.loads(ironfn("data", "check", path, "--tokenizer", tokenizer, "--template", "chatml", "--json"))
    assert told["trained"] == 4  # "4" and its end, twice


def test_what_cannot_be_asked_is_refused(tmp_path: Path, tokenizer: str) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "a"}])
    assert "--length and --template count tokens" in ironfn("data", "check", path, "--length", "9", code=2)
    assert "write our name and theirs" in ironfn("data", "check", path, "--field", "text", code=2)
    assert "not both" in ironfn("data", "check", path, "--model", str(tmp_path), "--tokenizer", tokenizer, code=2)
    assert "is no model" in ironfn("data", "check", path, "--model", str(tmp_path), code=1)
    assert "0 examples (none)" in ironfn("data", "check", write(tmp_path / "b.jsonl", []), code=1)


@pytest.mark.parametrize(("count", "epochs"), [(1, 25), (10, 10), (34, 3), (8_333, 3), (8_334, 2), (50_000, 1)])
def test_epochs_are_those_of_the_cookbook(count: int, epochs: int) -> None:
    found = Findings()
    found.forms["text"] = count
    plan = suggest(found, 8, None)
    assert (plan.epochs, plan.steps) == (epochs, -(-count * epochs // 8))
