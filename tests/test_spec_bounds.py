"""Refuse hostile and broken files by a clear line: each bound is there so that no file takes long to refuse."""

from __future__ import annotations

import random
from pathlib import Path

import attrs
import pytest

from bench.startup import HOSTILE
from ironfn.spec.errors import SpecError
from ironfn.spec.load import load_spec
from ironfn.spec.records import RunSpec

KEYS = ", ".join(field.name for field in attrs.fields(RunSpec))

FIRST = {
    "nested flow lists": ":1:34: is nested more than 32 levels deep",
    "nested flow mappings": ":1:133: is nested more than 32 levels deep",
    "nested blocks": ":34:34: is nested more than 32 levels deep",
    "nested dashes": ":1:67: is nested more than 32 levels deep",
    "billion laughs": ":4:15: here the spec passes 2000 values, its aliases written out",
    "billion laughs in mappings": ":9:23: here the spec passes 2000 values, its aliases written out",
    "a long list": ":1:4000: here the spec passes 2000 values, its aliases written out",
    "a number of 60,000 digits": ":1:16: a number of 60000 digits",
    "larger than a spec": ": is larger than 64 KiB; a spec is a short text",
    "unknown keys": f":1:1 key0: unknown key; the keys here are {KEYS}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_by_one_of_the_bounds(name: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(HOSTILE[name])
    with pytest.raises(SpecError) as caught:
        load_spec([file], [], {})
    assert str(caught.value).split("\n")[0] == f"{file}{FIRST[name]}"


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        (b"", ": is empty; a spec needs at least one section, such as `train:`"),
        (b"# a comment\n", ": is empty; a spec needs at least one section, such as `train:`"),
        (b"train:\n\tsteps: 1\n", ":2:1: is not YAML: a tab stands where YAML wants spaces; indent with spaces"),
        (
            b"train:\n  steps:\t1\n\tbatch: 1\n",
            ":2:9: is not YAML: a tab stands where YAML wants spaces; indent with spaces",
        ),
        (b"name: caf\xe9\n", ":1:10: byte 0xe9 is not UTF-8; save the file as UTF-8"),
        ("name: x".encode("utf-16"), ":1:1: byte 0xff is not UTF-8; save the file as UTF-8"),
        (b"out: x\nname: a\0b\n", ":2:8: character U+0000 is not allowed in YAML"),
        (b"- a\n", ":1:1: a list is not a spec; write `section:` lines"),
        (b"hello\n", ":1:1: 'hello' is not a spec; write `section:` lines"),
        (b"name: a\n---\nname: b\n", ":2:1: a second document begins; a spec is one document"),
        (b"train: {steps: 1\n", ":1:8: is not YAML: the bracket that opens here is never closed"),
        (b"out: x\nname: 'x\n", ":2:7: is not YAML: the quote that opens here is never closed"),
        (b"name: b: c\n", ":1:8: is not YAML: a second `:` in one value; quote the value, or check the indentation"),
        (b"train:\n   steps: 1\n  batch: 2\n", ":3:3: is not YAML: the indentation fits none of the lines above"),
        (b"[a, b]: 1\n", ":1:1: a key has to be a word"),
        (b"name: *x\n", ":1:7: *x is named nowhere above"),
        (b"out: x\nmodel: &m {a: *m}\n", ":2:15: *m stands inside what it names"),
        (
            b"name: !!python/name:os.system x\n",
            ":1:7 name: the tag tag:yaml.org,2002:python/name:os.system has no meaning in a spec; write the bare value",
        ),
        (
            b"train: &t {steps: 3}\nmodel: {<<: *t}\n",
            ":2:9 model.<<: YAML 1.2 has no merge key; put what is shared in a spec of its own",
        ),
        (b"%YAML 1.1\n---\ntrain: {compile: no}\n", ":3:18 train.compile: 'no' is neither true nor false; write false"),
    ],
)
def test_a_broken_file_is_told_where_it_breaks(raw: bytes, line: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(raw)
    with pytest.raises(SpecError) as caught:
        load_spec([file], [], {})
    assert str(caught.value) == f"{file}{line}"


def test_a_file_without_leave_to_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)  # root may read anything, so a mode of 000 would show nothing
    with pytest.raises(SpecError, match=r"run.yaml: cannot be read: permission denied$"):
        load_spec([tmp_path / "run.yaml"], [], {})


def test_bytes_at_random_and_shipped_specs_with_flipped_bytes_never_raise_anything_else(tmp_path: Path) -> None:
    draw, file = random.Random(0), tmp_path / "run.yaml"
    quickstart = (Path(__file__).parents[1] / "specs/pretrain/quickstart.yaml").read_bytes()
    outcomes: set[str] = set()
    for _ in range(150):
        raw = bytearray(quickstart)
        for _ in range(draw.randrange(1, 6)):
            raw[draw.randrange(len(raw))] = draw.choice(b"{}[]:,&*!|>'\"%@`#-\t\n 0aeE.\xff\x00")
        file.write_bytes(draw.choice([raw, raw, draw.randbytes(200)]))
        try:
            load_spec([file], [], {})
            outcomes.add("loaded")
        except SpecError as error:
            outcomes.add("refused")
            assert error.faults  # noqa: PT017
    assert outcomes == {"loaded", "refused"}
