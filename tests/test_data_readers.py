"""Readers: what a file holds is read, counted or reported with its place; nothing disappears."""

from __future__ import annotations

import gzip
import json
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from ironfn.data.readers import Bad, Blank, Document, Item, read
from ironfn.data.sources import Source, find, fingerprint

Write = Callable[[str, bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def put(name: str, data: bytes) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    return put


def items(path: Path, text: str = "text", split_on: str | None = None) -> list[Item]:
    (source,) = find([str(path)])
    return list(read(source, text, split_on))


def texts(path: Path, **settings: str) -> list[str]:
    return [item.text for item in items(path, **settings) if isinstance(item, Document)]


def test_byte_order_mark_changes_nothing(write: Write) -> None:
    lines = b'{"text": "one"}\n{"text": "two"}\n'
    assert texts(write("bom.jsonl", b"\xef\xbb\xbf" + lines)) == texts(write("plain.jsonl", lines)) == ["one", "two"]
    assert texts(write("bom.txt", b"\xef\xbb\xbfhello")) == ["hello"]
    assert texts(write("parts.txt", b"\xef\xbb\xbfa\n--\nb"), split_on="--") == ["a", "b"]


def test_crlf_blank_lines_and_a_missing_last_line_end(write: Write) -> None:
    got = items(write("a.jsonl", b'{"text": "one"}\r\n\r\n{"text": "two"}'))
    assert [type(item) for item in got] == [Document, Blank, Document]
    assert [item.text for item in got if isinstance(item, Document)] == ["one", "two"]
    assert got[2].place.endswith("a.jsonl:3")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b'{"text": "a"', "not JSON"),
        (b"[1, 2]", "a JSON object"),
        (b'{"body": "a"}', "no field 'text'; the fields are 'body'"),
        (b'{"text": 3}', "holds int, not a string"),
        (b'{"text": null}', "holds NoneType"),
        (b'{"text": "a\xffb"}', "invalid UTF-8: byte 0xFF at byte 11"),
        (b'{"text": "\\ud800"}', "lone surrogate U+D800 at character 0"),
        (b'{"text": ' + b"9" * 5000 + b"}", "not JSON that can be read"),
        (b"[" * 100_000, "not JSON that can be read"),
    ],
)
def test_a_bad_line_is_reported_with_its_place(write: Write, line: bytes, what: str) -> None:
    path = write("a.jsonl", b'{"text": "one"}\n' + line + b'\n{"text": "two"}\n')
    one, bad, two = items(path)
    assert isinstance(one, Document)
    assert isinstance(two, Document)
    assert isinstance(bad, Bad)
    assert bad.place == f"{path}:2"
    assert what in bad.what


def test_invalid_utf8_and_nul_in_a_text_file_name_the_line(write: Write) -> None:
    (bad,) = items(write("a.py", b"x = 1\ny = 2\nz = '\xff'\n"))
    assert isinstance(bad, Bad)
    assert bad.place.endswith("a.py:3")
    assert "0xFF" in bad.what
    (bad,) = items(write("b.py", b"x\n\0"))
    assert isinstance(bad, Bad)
    assert bad.place.endswith("b.py:2")
    assert "NUL" in bad.what


def test_gzip_is_read_and_a_cut_one_stops(write: Write) -> None:
    lines = b"".join(json.dumps({"text": f"line {i}" * 50}).encode() + b"\n" for i in range(2000))
    whole = write("a.jsonl.gz", gzip.compress(lines))
    assert len(texts(whole)) == 2000
    with pytest.raises(ValueError, match=r"cut\.jsonl\.gz: cannot be read to its end"):
        items(write("cut.jsonl.gz", gzip.compress(lines)[:-200]))


def test_a_text_file_is_one_document_kept_as_it_is(write: Write) -> None:
    text = "\n  first\r\nsecond \n\n"
    assert texts(write("a.txt", text.encode())) == [text]


@pytest.mark.parametrize("block", [1, 2, 3, 5, 1 << 20])
def test_split_on_parts_a_file_whatever_the_block(write: Write, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr("ironfn.data.readers._BLOCK", block)
    path = write("a.txt", "\nört\n<|end|>\n<|end|>\r\ntwo\nlines\n<|end|>\nthree\n".encode())
    got = items(path, split_on="<|end|>")
    assert [i.text if isinstance(i, Document) else type(i) for i in got] == ["ört", Blank, "two\nlines", "three"]
    assert [i.place.rsplit(":", 1)[1] for i in got] == ["2", "3", "5", "8"]


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"text": ["one", None, "", "zwei é"], "n": [1, 2, 3, 4]}), path)
    got = items(path)
    assert [i.text if isinstance(i, Document) else i.place for i in got] == ["one", f"{path}:row 2", "", "zwei é"]
    with pytest.raises(ValueError, match="no column 'body'; the columns are text, n"):
        items(path, text="body")
    broken = tmp_path / "b.parquet"
    broken.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"b\.parquet: not a whole parquet file"):
        items(broken)


def test_parquet_without_pyarrow_names_the_extra(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match=r"pip install 'ironfn\[parquet\]'"):
        items(write("a.parquet", b"PAR1"))


def test_directories_and_globs(write: Write, tmp_path: Path) -> None:
    for name in ("src/b.py", "src/a/z.md", "src/.git/config", "src/__pycache__/b.pyc", "src/a/data.jsonl"):
        write(name, b"x")
    found = find([str(tmp_path / "src")])
    assert [(str(s.path.relative_to(tmp_path)), s.kind, s.code) for s in found] == [
        ("src/b.py", "text", True),
        ("src/a/data.jsonl", "jsonl", False),
        ("src/a/z.md", "text", False),
    ]
    assert find([str(tmp_path / "**" / "*.py")]) == [Source(tmp_path / "src/b.py", "text", True)]
    with pytest.raises(ValueError, match=r"names no file .*correct the path"):
        find([str(tmp_path / "*.txt")])


def test_standard_library() -> None:
    root = sysconfig.get_paths()["stdlib"]
    code, prose = find(["stdlib:code"]), find(["stdlib:prose"])
    names = {str(s.path.relative_to(root)) for s in code}
    assert {"argparse.py", "json/decoder.py"} <= names
    assert all(s.code for s in code)
    assert not [n for n in names if {"test", "tests", "site-packages", "lib2to3"} & set(Path(n).parts)]
    assert sum(s.path.stat().st_size for s in code) > 5_000_000
    topics = list(read(prose[0], "text", None))
    assert len(topics) > 50
    assert all(isinstance(t, Document) for t in topics)
    assert find(["stdlib:"]) == code + prose
    with pytest.raises(ValueError, match="stdlib:prose"):
        find(["stdlib:poetry"])


def test_fingerprint_follows_the_bytes(write: Write, tmp_path: Path) -> None:
    one, two = write("one.txt", b"one"), write("two.txt", b"two")
    before = fingerprint(find([str(one), str(two)]))
    one.touch()
    assert fingerprint(find([str(one), str(two)])) == before
    assert fingerprint(find([str(two), str(one)])) != before
    one.write_bytes(b"onE")
    assert fingerprint(find([str(one), str(two)])) != before
