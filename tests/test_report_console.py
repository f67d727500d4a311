"""The console: parseable lines, a live display on a terminal, and no way for it to stop a run."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from drivers.console import Console, train_line
from ironfn.report.rows import EvaluationRow, TrainRow
from ironfn.report.words import bytes_in_words, seconds_in_words

ROOT = Path(__file__).parents[1]


def row(step: int = 100, **changes: object) -> TrainRow:
    values: dict[str, object] = {
        "step": step, "loss": 3.21009, "bits_per_byte": 1.93, "lr": 3e-4, "grad_norm": 0.91, "tokens_per_s": 2134.4,
        "mfu": 0.71, "memory": 1288490189, "seconds": 60.0, "left": 192.0,
    }  # fmt: skip
    return TrainRow(**(values | changes))  # type: ignore[arg-type]


def evaluation(step: int = 100) -> EvaluationRow:
    return EvaluationRow(
        step=step, loss=3.3, perplexity=27.1, bits_per_byte=1.98, tokens=4096, bytes=9000, seconds=61.0
    )


def said(*, speak: bool = True, encoding: str = "utf-8", text: str = " upon a time") -> str:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    with Console(300, speak=speak, stream=stream) as console:
        console.train(row())
        console.train(row(skipped=2, extra={"noise_scale": 1234.5, "policy": "two words"}))
        console.evaluation(evaluation())
        console.sample(100, "Once\n", text)
        console.note("saved step-00000100")
        console.warn("tracker wandb is off")
    return raw.getvalue().decode(encoding)


def test_lines_are_words_with_an_equals_sign() -> None:
    first, second, third, fourth, fifth, sixth = said().splitlines()
    expected = "step=100/300 loss=3.2101 bpb=1.9300 lr=3.0e-04 gnorm=0.91 tok/s=2134 mfu=0.710 mem=1.2GiB eta=3m12s"
    assert first == expected
    parsed = dict(word.split("=") for word in second.split(" "))
    assert (parsed["skipped"], parsed["noise_scale"], parsed["policy"]) == ("2", "1234", "two_words")
    assert float(parsed["loss"]) == 3.2101
    assert third == "validation step=100/300 loss=3.3000 ppl=27.1 bpb=1.9800 tokens=4096"
    assert fourth == r'sample step=100 prompt="Once\n" text=" upon a time"'
    assert (fifth, sixth) == ("saved step-00000100", "warning: tracker wandb is off")


def test_other_ranks_are_silent() -> None:
    assert said(speak=False) == ""


NASTY = 'a "quote" \x1b[2J\x9b1m\r\x07 \u202e日本 😀 \udc80 [red]tag[/red]\u2028end'


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_a_sample_stays_one_json_line_in_any_encoding(encoding: str) -> None:
    """A model writes anything: neither the terminal nor the run may be driven by it."""
    output = said(encoding=encoding, text=NASTY)
    line = next(line for line in output.split("\n") if line.startswith("sample"))
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\u202e]", line)
    assert json.loads(line.split(" text=")[1]) == NASTY


@pytest.mark.parametrize(
    "values", [{"loss": float("nan"), "grad_norm": float("inf"), "left": float("inf")}, {"mfu": None}, {"loss": 1e30}]
)
def test_odd_numbers_make_words_too(values: dict[str, object]) -> None:
    line = train_line(row(**values), 300)
    assert all(re.fullmatch(r"[^\s=]+=[^\s=]+", word) for word in line.split(" "))


def test_units() -> None:
    assert [seconds_in_words(s) for s in (0, 59.6, 3599.4, 86400, -3, float("nan"))] == [
        "0s",
        "1m00s",
        "59m59s",
        "1d00h",
        "0s",
        "-",
    ]
    assert [bytes_in_words(b) for b in (0, 1023, 1024, 3 << 40, 5 << 50)] == [
        "0B",
        "1023B",
        "1.0KiB",
        "3.0TiB",
        "5120.0TiB",
    ]


class Broken(io.StringIO):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error, self.writes = error, 0

    def write(self, text: str) -> int:
        self.writes += 1
        raise self.error


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(5, "EIO"), ValueError("I/O operation on closed file")])
def test_a_reader_that_goes_away_silences_the_console_and_no_more(error: Exception) -> None:
    stream = Broken(error)
    with Console(300, stream=stream) as console:
        if isinstance(error, ValueError):
            stream.close()
        for step in range(5):
            console.train(row(step))
    assert stream.writes == 1


def test_no_stdout_or_a_closed_one_is_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    with Console(300, stream=closed) as console:
        console.train(row())
    monkeypatch.setattr(sys, "stdout", None)
    with Console(300) as console:
        console.train(row())


def test_an_error_of_our_own_is_not_taken_for_a_closed_stream() -> None:
    with Console(300, stream=Broken(ValueError("a fault of ours"))) as console:  # noqa: SIM117
        with pytest.raises(ValueError, match="a fault of ours"):
            console.train(row())


def test_a_closed_pipe_does_not_stop_a_real_process() -> None:
    """``ironfn pretrain | head -1`` goes on to its end."""
    script = (
        "import sys, time; sys.path.insert(0, '.')\n"
        "from tests.test_report_console import Console, row\n"
        "with Console(300) as console:\n"
        "    for step in range(2000):\n"
        "        console.train(row(step))\n"
        "sys.stderr.write('finished')\n"
        "sys.stderr.flush()\n"
        "import os; os._exit(0)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().startswith("step=0/300")
    process.stdout.close()
    assert process.stderr.read() == "finished"
    process.stderr.close()
    assert process.wait(timeout=60) == 0


SCRIPT = (
    "import sys; sys.path.insert(0, '.')\n"
    "from tests.test_report_console import Console, evaluation, row, NASTY\n"
    "with Console(300, title='tiny') as console:\n"
    "    console.train(row(100)); console.evaluation(evaluation()); console.sample(100, 'Once', NASTY)\n"
    "    console.warn('[bold]look[/bold]'); console.train(row(200, skipped=3)); console.train(row(300, left=0.0))\n"
)


def on_terminal(env: dict[str, str]) -> str:
    """Run the script on a real pseudo-terminal and return all that it wrote there."""
    pty = pytest.importorskip("pty", reason="pseudo-terminals exist on POSIX systems only")
    primary, secondary = pty.openpty()
    kept = {name: value for name, value in os.environ.items() if name not in ("TERM", "NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, stdin=secondary, stdout=secondary, stderr=subprocess.PIPE,
        env=kept | {"COLUMNS": "100", "LINES": "30"} | env,
    )  # fmt: skip
    os.close(secondary)
    written = b""
    while True:
        try:
            piece = os.read(primary, 65536)
        except OSError:  # EIO: the other side has closed
            break
        if not piece:
            break
        written += piece
    os.close(primary)
    assert process.stderr is not None
    errors = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(timeout=60) == 0, errors
    return written.decode()


def test_a_terminal_gets_a_live_display_and_its_cursor_back() -> None:
    screen = on_terminal({"TERM": "xterm-256color"})
    assert "\x1b[?25l" in screen
    assert screen.rindex("\x1b[?25h") > screen.rindex("\x1b[?25l")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen)
    for part in ("tiny", "200/300", "3.2101", "71.0%", "1.2GiB", "3m12s left", "validation step=100/300"):
        assert part in plain
    assert "warning: [bold]look[/bold]" in plain
    assert "[red]tag[/red]" in plain
    assert "\x1b[2J" not in screen
    assert "\\u001b[2J" in screen
    assert re.search(r"\x1b\[[0-9;]*3[0-9]m", screen)


def test_no_color_keeps_the_display_and_leaves_the_colours() -> None:
    screen = on_terminal({"TERM": "xterm-256color", "NO_COLOR": "1"})
    assert "\x1b[?25l" in screen
    assert not re.search(r"\x1b\[[0-9;]*(3|4)[0-9]m", screen)


@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {}])
def test_a_dumb_terminal_gets_lines(env: dict[str, str]) -> None:
    screen = on_terminal(env)
    assert "\x1b" not in screen
    assert screen.splitlines()[0].startswith("step=100/300 loss=3.2101 ")


def test_a_forced_colour_does_not_make_a_pipe_a_terminal() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=True,
        env=os.environ | {"TERM": "xterm", "FORCE_COLOR": "1"},
    )  # fmt: skip
    assert "\x1b" not in done.stdout
