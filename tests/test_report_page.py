"""The report page: whole with any run, escaped, self-contained, small."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from drivers.report import command
from ironfn.report.page import write_report
from ironfn.report.plots import loss_png
from ironfn.report.rows import EvaluationRow, MetricsFile, TrainRow
from tests.report_runs import HOSTILE, SPEC, hostile_run, make_run

VOID = {"meta", "path"}


class Page(HTMLParser):
    """Hold a page's elements and words as the standard library's parser sees them; fail where tags do not match."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.source = path.read_text("utf-8")
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: dict[str, list[str]] = {}
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.setdefault(self.open[-1] if self.open else "", []).append(data)

    @property
    def text(self) -> str:
        return "\n".join(word for tag, words in self.words.items() if tag not in ("style", "script") for word in words)

    @property
    def charts(self) -> list[dict[str, object]]:
        return [json.loads(attrs["data-chart"] or "") for _, attrs in self.tags if "data-chart" in attrs]


def report(run_dir: Path, **commands: str) -> Page:
    return Page(write_report(run_dir, commands))


def test_the_headline_says_what_the_rows_say(tmp_path: Path) -> None:
    page = report(make_run(tmp_path / "tiny"), Resume="ironfn pretrain spec.yaml")
    tiles = dict(zip(page.words["dt"], page.words["dd"], strict=False))
    last = [json.loads(line) for line in (tmp_path / "tiny/metrics.jsonl").read_text().splitlines()]
    train = [row for row in last if row["kind"] == "train"][-1]
    validation = [row for row in last if row["kind"] == "validation"][-1]
    assert float(tiles["Training loss"]) == pytest.approx(train["loss"], rel=1e-3)
    assert float(tiles["Validation bits/byte"]) == pytest.approx(validation["bits_per_byte"], rel=1e-3)
    assert tiles["MFU"] == "70.0%"
    assert tiles["Peak memory"] == "1.2GiB"
    assert tiles["Time"] == "5m00s"
    for words in (
        "finished · step 300 of 300",
        "12.14 M parameters · llama · 6 layers × 384 · 1 × cpu",
        "614,400 tokens",
    ):
        assert words in page.text
    assert page.words["h3"][:6] == [
        "Loss (nats per token)", "Bits per byte", "Learning rate", "Gradient norm", "Tokens per second", "Noise scale"
    ]  # fmt: skip
    assert page.words["code"] == ["ironfn pretrain spec.yaml"]
    assert SPEC in page.words["pre"]
    assert "step 300" in page.text
    assert " upon a time 300" in page.text


def test_the_charts_hold_the_rows(tmp_path: Path) -> None:
    page = report(make_run(tmp_path / "tiny", steps=50, eval_every=10))
    loss = page.charts[0]
    rows = [json.loads(line) for line in (tmp_path / "tiny/metrics.jsonl").read_text().splitlines()]
    (train, validation) = loss["series"]
    for kind, series in (("train", train), ("validation", validation)):
        expected = [(row["step"], row["loss"]) for row in rows if row["kind"] == kind]
        assert series["x"] == [step for step, _ in expected]
        assert series["y"] == pytest.approx([value for _, value in expected], rel=1e-4)
    assert loss["x"] == [0, 50]
    label = next(attrs["aria-label"] for tag, attrs in page.tags if tag == "svg")
    assert re.fullmatch(
        r"Loss \(nats per token\) by step: train from \S+ at step 1 to \S+ at step 50; validation .*", label or ""
    )


def test_the_page_loads_nothing_and_runs_its_own_script_only(tmp_path: Path) -> None:
    page = report(make_run(tmp_path / "tiny"))
    for _, attrs in page.tags:
        assert not attrs.keys() & {"src", "href", "srcset", "action", "background", "xlink:href"}
        assert not any(name.startswith("on") for name in attrs)
    assert not re.search(r"@import|url\(|https?://", page.source)
    policy = next(attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    (script,) = page.words["script"]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


SEEN = HOSTILE.replace("\x1b", "\\u001b").replace("\x00", "\\u0000").replace("\u202e", "\\u202e")


def test_no_text_gets_out_of_its_place(tmp_path: Path) -> None:
    plain = report(make_run(tmp_path / "plain"))
    page = report(hostile_run(tmp_path / "<img src=y onerror=1>"), **{HOSTILE: HOSTILE})
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in plain.tags} | {"div", "span", "code", "b", "h3"}
    assert len(page.words["script"]) == 1
    assert not any(name.startswith("on") or name == "src" for _, attrs in page.tags for name in attrs)
    assert page.text.count(SEEN) >= 7
    assert page.words["h1"] == ["<img src=y onerror=1>"]
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e]", page.source)


@pytest.mark.parametrize("steps", [1, 2, 59, 61])
def test_a_short_run_has_a_report(tmp_path: Path, steps: int) -> None:
    page = report(make_run(tmp_path / "tiny", steps=steps, eval_every=1))
    assert f"not finished · step {steps:,} of 300" in page.text
    assert len(page.charts) == 6
    if steps == 1:
        paths = [attrs for tag, attrs in page.tags if tag == "path" and "points" in (attrs["class"] or "")]
        assert len(paths) >= 6
        assert all(re.fullmatch(r"M[\d.]+ \d+h0", attrs["d"] or "") for attrs in paths)


def test_a_run_without_rows_has_a_report(tmp_path: Path) -> None:
    page = report(tmp_path)
    assert "No step has been logged yet." in page.text
    (tmp_path / "metrics.jsonl").write_bytes(b'{"kind": "run", "step": 0}\n{"kind": "tr')
    (tmp_path / "spec.yaml").write_text("a: [")
    page = report(tmp_path)
    assert "No step has been logged yet." in page.text
    assert "a: [" in page.text


def test_rows_that_are_not_finite_break_the_line_and_are_counted(tmp_path: Path) -> None:
    page = report(make_run(tmp_path / "tiny", steps=30, bad={10, 11, 20}))
    assert "The loss was not finite in 3 of the rows, first at step 10." in page.text
    line = next(attrs["d"] for tag, attrs in page.tags if tag == "path" and attrs["class"] == "line train")
    assert (line or "").count("M") == 3
    assert "nan" not in page.source.lower().replace("nano", "")
    page = report(make_run(tmp_path / "all", steps=30, bad=range(1, 31)))
    assert "the loss is not finite · step 30 of 300" in page.text
    assert page.charts[0]["series"][0]["x"] == []


@pytest.mark.parametrize("value", [0.0, -3.5, 1e308, -1e308, 5e-324, math.inf, -math.inf])
def test_odd_values_are_drawn(tmp_path: Path, value: float) -> None:
    with MetricsFile.new(tmp_path / "metrics.jsonl") as metrics:
        for step, loss in enumerate([1.0, value, 2.0, value, value], start=1):
            metrics.write({"kind": "train", "step": step, "loss": loss, "mine": -loss})
            metrics.write({"kind": "validation", "step": step, "loss": loss})
    page = report(tmp_path)
    for _, attrs in page.tags:
        if "d" in attrs:
            assert re.fullmatch(r"([ML][\d.]+ \d+(h0|H1000)?)*", attrs["d"] or "")


def test_two_rows_of_a_step_are_one_point(tmp_path: Path) -> None:
    """A run that was resumed by other means may have logged a step twice: the later row counts."""
    with MetricsFile.new(tmp_path / "metrics.jsonl") as metrics:
        for step in [1, 2, 3, 4, 3, 4, 5]:
            metrics.write({"kind": "train", "step": step, "loss": 1.0 / step})
    (chart,) = report(tmp_path).charts
    assert chart["series"][0]["x"] == [1, 2, 3, 4, 5]


def test_a_long_run_has_a_small_page_and_keeps_its_spikes(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "long", steps=100_000, eval_every=200, bad={777})
    path = write_report(directory)
    assert path.stat().st_size < 400_000
    page = Page(path)
    assert "The loss was not finite in 1 of the rows, first at step 777." in page.text
    assert all(len(series["x"]) <= 900 for chart in page.charts for series in chart["series"])
    assert "16 from between" in page.text
    assert "480 more are in samples.jsonl." in page.text


def test_a_page_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path, steps=5)
    before = write_report(tmp_path).read_bytes()
    make_run(tmp_path, steps=9)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("power cut")))
        with pytest.raises(OSError, match="power cut"):
            write_report(tmp_path)
    assert (tmp_path / "report.html").read_bytes() == before


def png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(head[16:20]), int.from_bytes(head[20:24])


@pytest.mark.parametrize("bad", [(), range(1, 61), (3, 4)])
@pytest.mark.parametrize("steps", [1, 60])
def test_the_plot_is_a_picture_of_any_run(tmp_path: Path, steps: int, bad: range | tuple[int, ...]) -> None:
    pytest.importorskip("matplotlib")
    directory = make_run(tmp_path / "a$b$_c", steps=steps, eval_every=5, bad=bad)
    path = loss_png(directory / "metrics.jsonl", tmp_path / "loss.png")
    assert path == tmp_path / "loss.png"
    assert png_size(path) == (1350, 960)


def test_the_plot_shows_the_loss_in_its_colour(tmp_path: Path) -> None:
    """The line of the train loss stands where the metrics say: high at the left, low at the right."""
    image = pytest.importorskip("matplotlib.image")
    picture = image.imread(loss_png(make_run(tmp_path / "tiny") / "metrics.jsonl", tmp_path / "loss.png"))
    rows, columns = picture.shape[:2]
    blue = (abs(picture[..., :3] - [0x24 / 255, 0x57 / 255, 0xD6 / 255]) < 0.05).all(axis=-1)
    upper = blue[: int(rows * 0.62)]
    assert upper[: rows // 5, : columns // 6].any()
    assert not upper[rows // 3 :, : columns // 20].any()
    assert upper[rows // 2 :, columns // 2 : columns * 9 // 10].any()


def rewarded(directory: Path, **more: float) -> str:
    """Write a run whose reward rises from 0 to 0.8, and at evaluations to 0.909, and return its report."""
    with MetricsFile.new(directory / "metrics.jsonl") as metrics:
        for step in range(101):
            common = {"step": step, "bits_per_byte": math.nan, "seconds": float(step)}
            if step:
                extra = {"reward": step / 125, "truncated": 0.25, **more}
                metrics.write(TrainRow(**common, loss=0.0, lr=1e-4, grad_norm=1.0, tokens_per_s=9.0, mfu=None, memory=1,
                                       left=0.0, extra=extra))  # fmt: skip
            if step % 50 == 0:
                metrics.write(EvaluationRow(**common, kind="validation", loss=math.nan, perplexity=math.nan, tokens=0,
                                            bytes=0, extra={"accuracy": step / 110, "pass_4": 0.75}))  # fmt: skip
    return write_report(directory).read_text("utf-8")


def test_what_is_called_a_reward_in_a_loss_is_not_what_a_run_is_about(tmp_path: Path) -> None:
    """KTO's, to wit."""
    written = rewarded(tmp_path)
    assert "<dt>Training loss</dt><dd>0<" in written
    assert "<h3>Reward</h3>" in written


def test_where_there_are_rewards_they_are_shown_and_not_the_loss(tmp_path: Path) -> None:
    """Rewards rise at a loss of nothing: low at the left, high at the right, and in the page's tiles and tables."""
    written = rewarded(tmp_path, reward_std=0.1)
    assert "<dt>Training reward</dt><dd>0.8<" in written
    assert "<dt>Validation reward</dt><dd>0.909<small>0 at step 0, pass_4 0.75<" in written
    assert "<h3>Truncated</h3>" in written
    assert not re.search("bits/byte|Bits per byte|perplexity|Loss", written)
    image = pytest.importorskip("matplotlib.image")
    picture = image.imread(loss_png(tmp_path / "metrics.jsonl", tmp_path / "loss.png"))
    rows, columns = picture.shape[:2]
    blue = (abs(picture[..., :3] - [0x24 / 255, 0x57 / 255, 0xD6 / 255]) < 0.05).all(axis=-1)
    middle = slice(rows // 8, int(rows * 0.62))  # without the legend
    assert blue[rows // 2 : middle.stop, : columns // 5].any()
    assert not blue[rows // 8 : rows // 3, : columns // 5].any()
    assert blue[middle.start : rows // 3, columns * 2 // 3 : columns * 9 // 10].any()
    orange = (abs(picture[..., :3] - [0xC2 / 255, 0x41 / 255, 0x0C / 255]) < 0.05).all(axis=-1)
    assert orange[: int(rows * 0.62), : columns // 12].any()  # the first evaluation, though it stands alone


def test_plotting_leaves_no_state_and_needs_no_screen(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    make_run(tmp_path / "tiny", steps=5)
    script = (
        "import sys; from ironfn.report.plots import loss_png\n"
        "assert 'matplotlib' not in sys.modules\n"
        "loss_png(sys.argv[1], sys.argv[2])\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run(
        [sys.executable, "-W", "error", "-c", script, str(tmp_path / "tiny/metrics.jsonl"), str(tmp_path / "x.png")],
        cwd=Path(__file__).parents[1],
        check=True,
    )


def test_the_command_writes_both_and_says_where(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    directory = make_run(tmp_path / "my run", steps=5)
    done = CliRunner().invoke(command, [str(directory)])
    assert done.exit_code == 0, done.output
    assert done.output.split("\n")[:2] == [str(directory / "report.html"), str(directory / "loss.png")]
    assert f"ironfn generate '{directory}'" in Page(directory / "report.html").text


def test_the_command_goes_without_matplotlib_and_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = CliRunner().invoke(command, [str(make_run(tmp_path / "tiny", steps=5))])
    assert done.exit_code == 0
    assert "pip install 'ironfn[plots]'" in done.output
    assert (tmp_path / "tiny" / "report.html").exists()
    assert not (tmp_path / "tiny" / "loss.png").exists()


def test_the_command_refuses_what_is_no_run(tmp_path: Path) -> None:
    done = CliRunner().invoke(command, [str(tmp_path)])
    assert done.exit_code == 1
    assert "holds no metrics.jsonl" in done.output
