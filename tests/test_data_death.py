"""A preparation that dies anywhere leaves nothing that opens wrongly, and the next one makes it whole."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from ironfn.data import open_dataset, prepare
from ironfn.data.files import alone
from ironfn.spec.records import DataSpec, SetSpec, SplitSpec, TokenizerSpec

ROOT = Path(__file__).parents[1]

# Each preparation runs in a child of its own, forked before the tokenizer library starts a thread, and ends as if by
# kill -9 (no handler, no flush, no clean-up) in front of its n-th call that reaches the disk.
SCRIPT = """
import os, sys
from pathlib import Path
from ironfn.data import open_dataset, prepare
from tests.test_data_death import settings, snapshot

folder = Path(sys.argv[1])
spec, old = settings(folder, 320), settings(folder, 300)

def child(work):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def done(spec):
    return 0 if prepare(spec) else 1

def dies(n):
    calls = 0
    def before(call):
        def counted(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls > n:
                os._exit(9)
            return call(*args, **kwargs)
        return counted
    for holder, name in ((os, "fsync"), (os, "replace"), (Path, "replace"), (Path, "unlink")):
        setattr(holder, name, before(getattr(holder, name)))
    return done(spec)

def opens():
    try:
        return 10 + open_dataset(spec, "train").vocab_size // 320
    except ValueError as error:
        assert "ironfn prepare" in str(error), error
        return 3

assert child(lambda: done(spec)) == 0
whole = snapshot(folder / "data")
deaths = 0
while True:
    assert child(lambda: done(old)) == 0
    code = child(lambda: dies(deaths))
    state = child(opens)
    assert state == (3 if code == 9 and snapshot(folder / "data") != whole else 11), (deaths, code, state)
    assert child(lambda: done(spec)) == 0
    assert snapshot(folder / "data") == whole, deaths
    if code == 0:
        break
    assert code == 9, code
    deaths += 1
print(deaths)
"""


def settings(folder: Path, vocab_size: int) -> DataSpec:
    corpus = folder / "corpus.txt"
    if not corpus.exists():
        corpus.write_text("\n\n".join(f"document {i} of many words" for i in range(50)))
    return DataSpec(
        dir=str(folder / "data"),
        sets={"one": SetSpec([str(corpus)], split_on="\n\n")},
        tokenizer=TokenizerSpec(vocab_size=vocab_size),
        split=SplitSpec(validation=0.1),
    )


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_death_before_every_disk_operation(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) >= 15  # 5 files, each forced, moved, and its folder forced; and one removal


def test_two_preparations_take_turns(tmp_path: Path) -> None:
    spec = settings(tmp_path, 300)
    lines: list[str] = []
    waiting = threading.Event()

    def say(line: str) -> None:
        lines.append(line)
        waiting.set()

    with alone(tmp_path / "data", lines.append):
        other = threading.Thread(target=lambda: prepare(spec, say=say))
        other.start()
        assert waiting.wait(60)
        assert lines == [f"{tmp_path / 'data'}: another process is preparing it; waiting for that"]
        assert not (tmp_path / "data" / "tokenizer.json").exists()
    other.join(60)
    assert open_dataset(spec, "train").tokens
    assert prepare(spec).reused
