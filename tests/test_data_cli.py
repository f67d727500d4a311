"""The commands prepare and data inspect, run as a user runs them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from drivers.data import _text
from drivers.main import main
from ironfn.data.tokenizer import Vocabulary, load, train
from ironfn.data.view import Span, spans
from ironfn.spec.records import TokenizerSpec

DOCUMENTS = [f"This is document {i} of the small corpus." for i in range(40)]


def ironfn(*words: str, code: int = 0, colour: bool = False) -> str:
    """Run the command line and return what it printed on both streams."""
    run = CliRunner().invoke(main, words, env={"FORCE_COLOR": "1", "TERM": "xterm"} if colour else {})
    assert run.exit_code == code, run.output
    assert code == 0 or isinstance(run.exception, SystemExit)
    return run.output


@pytest.fixture
def spec(tmp_path: Path) -> str:
    (tmp_path / "corpus.txt").write_text("\n\n".join(DOCUMENTS))
    path = tmp_path / "spec.yaml"
    path.write_text(
        f"""
data:
  dir: {tmp_path}/data
  length: 48
  split: {{validation: 0.1}}
  tokenizer: {{vocab_size: 300}}
  sets:
    small:
      sources: [{tmp_path}/corpus.txt]
      split_on: "\\n\\n"
      fim: {{rate: 0.5}}
train: {{batch: 2}}
"""
    )
    return str(path)


def test_prepare_then_inspect(spec: str) -> None:
    first = ironfn("prepare", spec)
    assert "small: 1 files, 40 documents in" in first
    assert "small/train:" in first
    assert "unchanged, taken as they are" in ironfn("prepare", spec)
    assert "written" in ironfn("prepare", spec, "--force")
    changed = ironfn("prepare", spec, "-s", "data.tokenizer.vocab_size=301")
    assert "data.tokenizer.vocab_size: 300 -> 301" in changed
    refused = ironfn("data", "inspect", spec, code=1)
    assert "was prepared with other settings (data.tokenizer.vocab_size: 301 -> 300)" in refused
    assert "Traceback" not in refused

    other = ("-s", "data.tokenizer.vocab_size=301")
    shown = ironfn("data", "inspect", spec, *other, "--rows", "30", "--step", "3")
    assert "\x1b" not in shown
    assert "row 6 (step 3), window" in shown
    assert "row 35 (step 17), window" in shown
    assert all(mark in shown for mark in ("[document 1]", "continued]", "[end]", "[fim prefix]", "[padding x "))
    assert "of the small corpus." in shown
    coloured = ironfn("data", "inspect", spec, *other, "--rows", "30", "--step", "3", colour=True)
    assert "\x1b[1;34m[document 1" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == shown
    table = ironfn("data", "inspect", spec, *other, "--rows", "1", "--split", "validation", "--tokens")
    assert len(table.splitlines()) == 2 + 3 + 48 + 1
    assert "'T'" in table or "'This'" in table


def test_a_bad_file_is_one_clear_line(spec: str, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_bytes(b"fine\n\nbr\xffoken\n")
    said = ironfn("prepare", spec, code=1)
    assert f"{tmp_path}/corpus.txt:3: invalid UTF-8: byte 0xFF" in said
    assert "Traceback" not in said
    counted = ironfn("prepare", spec, "-s", "data.bad_lines=count", "-s", "data.split.validation=0.0")
    assert "1 bad" in counted
    assert f"passed over {tmp_path}/corpus.txt:3" in counted


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    path = tmp_path_factory.mktemp("view") / "tokenizer.json"
    path.write_text(train(DOCUMENTS, TokenizerSpec(vocab_size=300)))
    return load(path)


def test_a_row_is_told_as_it_is(vocabulary: Vocabulary) -> None:
    def ids(text: str) -> list[int]:
        return vocabulary.tokenizer.encode(text, add_special_tokens=False).ids

    fim = vocabulary.fim
    assert fim is not None
    ask, answer, end = ids("what é "), ids("this"), [vocabulary.eos]
    cut = [fim.prefix, *ids("a"), fim.suffix, *ids("c"), fim.middle, *ids("b")]
    targets = [*answer, *end, *ask, *answer, *end, *cut, *end, 0, 0]
    lengths = (len(answer) + 1, len(ask) + len(answer) + 1, len(cut) + 1)
    batch = {
        "targets": torch.tensor([targets]),
        "tokens": torch.tensor([[17, *targets[:-1]]]),
        "weight": torch.tensor([[1.0] * lengths[0] + [0.0] * len(ask) + [1.0] * (len(cut) + len(answer) + 2) + [0, 0]]),
        "segment": torch.tensor([[0] * lengths[0] + [1] * lengths[1] + [2] * lengths[2] + [-1, -1]]),
    }
    told = list(spans(batch, 0, vocabulary))
    assert [(s.kind, s.text, s.part) for s in told] == [
        ("document", "document 1, continued", ""),
        ("trained", "this", ""),
        ("control", "end", ""),
        ("document", "document 2", ""),
        ("masked", "what é ", ""),
        ("trained", "this", ""),
        ("control", "end", ""),
        ("document", "document 3", ""),
        ("control", "fim prefix", ""),
        ("trained", "a", "prefix"),
        ("control", "fim suffix", ""),
        ("trained", "c", "suffix"),
        ("control", "fim middle", ""),
        ("trained", "b", "middle"),
        ("control", "end", ""),
        ("padding", "", ""),
    ]
    assert sum(s.tokens for s in told) == len(targets)
    assert _text(told).plain == (
        "[document 1, continued]\nthis[end]\n[document 2]\n{{what é }}this[end]\n[document 3]\n"
        "[fim prefix]a[fim suffix]c[fim middle]b[end]\n[padding x 2]"
    )
    rowwise = list(spans({k: v for k, v in batch.items() if k != "segment"}, 0, vocabulary))
    assert "document" not in {s.kind for s in rowwise}


def test_data_cannot_drive_the_terminal() -> None:
    shown = _text([Span("trained", "a\x1b[31mred\x07\tb\n[bold]c\x7f", "", 3)]).plain
    assert shown == "a␛[31mred␇\tb\n[bold]c␡"
