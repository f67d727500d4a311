"""The metrics file: valid JSON, exact floats, and the rows of the run never stopped."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from ironfn.report.evaluation import Evaluation
from ironfn.report.rows import EvaluationRow, MetricsFile, RunRow, TrainRow, as_dict, read_lines, read_rows, trim


def train_row(step: int, loss: float = 2.5, **extra: float) -> TrainRow:
    return TrainRow(
        step=step, loss=loss, bits_per_byte=1.0, lr=1e-3, grad_norm=0.5, tokens_per_s=100.0, mfu=0.5, memory=1 << 20,
        seconds=float(step), left=0.0, extra=dict(extra),
    )  # fmt: skip


def test_a_row_is_one_line_of_strict_json(tmp_path: Path) -> None:
    with MetricsFile.new(tmp_path / "metrics.jsonl") as file:
        file.write(RunRow(parameters=12, flops_per_token=72.0, peak_flops=1e11, tokens_per_step=2048, device="cpu"))
        file.write(train_row(1, loss=math.nan, noise_scale=math.inf))
        file.write(EvaluationRow.of(Evaluation(1.5, 4.48, 0.9, 12, 30, {"accuracy": 0.25}), step=1, seconds=2.0))

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    run, train, validation = (json.loads(line, parse_constant=refuse) for line in lines)
    assert (run["kind"], run["step"], run["parameters"]) == ("run", 0, 12)
    assert (train["kind"], train["loss"], train["noise_scale"], train["grad_norm"]) == ("train", "NaN", "Infinity", 0.5)
    assert validation == {
        "kind": "validation", "step": 1, "loss": 1.5, "perplexity": 4.48, "bits_per_byte": 0.9, "tokens": 12,
        "bytes": 30, "seconds": 2.0, "accuracy": 0.25,
    }  # fmt: skip
    assert math.isnan(read_rows(tmp_path / "metrics.jsonl")[1]["loss"])


def test_a_row_is_on_file_when_write_returns(tmp_path: Path) -> None:
    """A process that is killed right after has lost nothing."""
    script = (
        "import os, signal, sys\n"
        "from ironfn.report.rows import MetricsFile\n"
        "file = MetricsFile(sys.argv[1])\n"
        "file.write({'kind': 'train', 'step': 1, 'loss': 0.1})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "m.jsonl")], cwd=Path(__file__).parents[1])
    assert done.returncode == -signal.SIGKILL
    assert read_rows(tmp_path / "m.jsonl") == [{"kind": "train", "step": 1, "loss": 0.1}]


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1))
def test_every_float_reads_back_bit_equal(tmp_path_factory: pytest.TempPathFactory, values: list[float]) -> None:
    path = tmp_path_factory.mktemp("floats") / "metrics.jsonl"
    with MetricsFile.new(path) as file:
        for step, value in enumerate(values):
            file.write({"kind": "train", "step": step, "loss": value})
    read = [row["loss"] for row in read_rows(path)]
    assert [value.hex() for value in read] == [value.hex() for value in values]


def test_an_extra_may_not_hide_a_field() -> None:
    with pytest.raises(ValueError, match="'loss' has the name of a field of TrainRow"):
        as_dict(evolve(train_row(1), extra={"loss": 1.0}))


def write_run(path: Path, start: int, stop: int) -> None:
    """Be a run that logs each step, evaluates each second one, and saves each fifth."""
    with MetricsFile.open(path, start) as file:
        for step in range(start + 1, stop + 1):
            file.write(train_row(step, loss=1.0 / step))
            if step % 2 == 0:
                file.write({"kind": "validation", "step": step, "loss": 2.0 / step})


@pytest.mark.parametrize("killed_at", range(5, 12))
@pytest.mark.parametrize("torn", [0, 1, 17, 10_000])
def test_a_resumed_run_has_the_rows_of_the_one_never_stopped(tmp_path: Path, killed_at: int, torn: int) -> None:
    write_run(tmp_path / "whole.jsonl", 0, 15)
    path = tmp_path / "resumed.jsonl"
    write_run(path, 0, killed_at)
    kept = (tmp_path / "resumed.jsonl").read_bytes()
    lost = max(len(kept) - torn, kept.index(b'"step": 5,') + 400) if torn else len(kept)
    path.write_bytes(kept[:lost])
    write_run(path, 5, 15)
    assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


RUN = """
import sys, time
from pathlib import Path
from ironfn.report.rows import MetricsFile, as_dict
directory = Path(sys.argv[1])
saved = directory / "saved"
start = int(saved.read_text()) if saved.exists() else 0
with MetricsFile.open(directory / "metrics.jsonl", start) as rows:
    for step in range(start + 1, 301):
        rows.write({"kind": "train", "step": step, "loss": 1.0 / step})
        if step % 10 == 0:
            rows.write({"kind": "validation", "step": step, "loss": 2.0 / step})
            rows.sync()
            (directory / "aside").write_text(str(step))
            (directory / "aside").replace(saved)
        time.sleep(0.001)
"""


def test_processes_killed_at_random_leave_the_rows_of_one_that_was_not(tmp_path: Path) -> None:
    draw = random.Random(11)
    for name, kills in (("whole", 0), ("killed", 6)):
        directory = tmp_path / name
        directory.mkdir()
        for _ in range(kills):
            seen = (directory / "metrics.jsonl").stat().st_size if (directory / "metrics.jsonl").exists() else 0
            process = subprocess.Popen([sys.executable, "-c", RUN, str(directory)], cwd=Path(__file__).parents[1])
            target = seen + draw.randrange(400, 1600)
            while process.poll() is None and (
                not (directory / "metrics.jsonl").exists() or (directory / "metrics.jsonl").stat().st_size < target
            ):
                time.sleep(0.001)
            process.kill()
            process.wait()
        subprocess.run([sys.executable, "-c", RUN, str(directory)], cwd=Path(__file__).parents[1], check=True)
    whole, killed = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "killed"))
    assert whole.count(b"\n") == 330
    assert killed == whole


def test_a_kill_during_the_trim_leaves_the_old_file_or_the_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    write_run(path, 0, 8)
    before = path.read_bytes()

    def die(*_: object) -> None:
        raise OSError("power cut")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, die)
            with pytest.raises(OSError, match="power cut"):
                trim(path, 5)
        assert path.read_bytes() == before
    trim(path, 5)
    assert [row["step"] for row in read_rows(path)] == [1, 2, 2, 3, 4, 4, 5]


def test_a_trim_with_nothing_to_drop_touches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_run(path, 0, 5)
    before = path.stat()
    trim(path, 5)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    trim(tmp_path / "absent.jsonl", 5)
    assert not (tmp_path / "absent.jsonl").exists()


def test_a_whole_last_row_without_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "train", "step": 1}\n{"kind": "train", "step": 2}')
    trim(path, 2)
    assert path.read_bytes() == b'{"kind": "train", "step": 1}\n{"kind": "train", "step": 2}\n'


def test_what_a_power_cut_left_is_dropped_past_the_checkpoint_and_refused_before_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\x00\x00\x00\x00\n{"step": 2}\n\xff\xfe')
    trim(path, 1)
    assert path.read_bytes() == b'{"step": 1}\n'
    path.write_bytes(b'{"step": 1}\n\x00\x00\x00\x00\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: this line is no metric row.*step 2 follow"):
        trim(path, 2)


def test_a_file_of_a_live_run_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n[' * 3 + b"[" * 200_000 + b'\n{"step": 2}\n{"st')
    assert [row["step"] for row in read_rows(path)] == [1, 2]
    assert read_rows(tmp_path / "absent.jsonl") == []


def test_samples_keep_any_text(tmp_path: Path) -> None:
    text = "NaN \udc80 \x1b[2J </script> \u2028 日本"
    with MetricsFile.open(tmp_path / "samples.jsonl", 0) as file:
        file.write({"step": 1, "prompt": "NaN", "text": text})
    assert read_lines(tmp_path / "samples.jsonl") == [{"step": 1, "prompt": "NaN", "text": text}]


class Narrow:
    """Be a file on a disk that takes three bytes at a time, and is full after ten."""

    def __init__(self) -> None:
        self.taken = b""

    def write(self, data: bytes) -> int:
        if len(self.taken) >= 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.taken += data[:3]
        return len(data[:3])


def test_a_row_that_the_disk_takes_in_parts_is_written_whole_or_refused_with_the_file(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl")
    file._file.close()
    file._file = narrow = Narrow()  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space left") as caught:
        file.write({"kind": "x", "step": 1})
    assert caught.value.filename == str(tmp_path / "m.jsonl")
    assert narrow.taken == b'{"kind": "x"'
