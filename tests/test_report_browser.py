"""The report page in a real browser: its script runs, the keyboard reads the charts, nothing foreign does."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ironfn.report.page import write_report
from tests.report_runs import hostile_run, make_run

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here")

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=2000",
    "--allow-file-access-from-files",
    "--enable-logging=stderr",
]


def browse(page: Path, profile: Path, *flags: str) -> tuple[str, str]:
    """Return the page as the browser holds it after its scripts ran, and what these wrote to the console."""
    done = subprocess.run(
        [BROWSER or "", *FLAGS, f"--user-data-dir={profile}", *flags, f"file://{page}"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


PROBE = """<!doctype html>
<meta charset="utf-8"><iframe id="frame" style="width:WIDTHpx;height:3000px"></iframe><pre id="out"></pre>
<script>
const frame = document.getElementById("frame");
const say = (words) => document.getElementById("out").append(words + "\\n");
frame.onload = () => {
  const page = frame.contentDocument, view = frame.contentWindow, figure = page.querySelector("figure");
  const press = (key) => figure.dispatchEvent(new view.KeyboardEvent("keydown", { key, cancelable: true }));
  const output = () => figure.querySelector("output"), dots = () => figure.querySelectorAll(".dot").length;
  say("overflow " + (page.documentElement.scrollWidth > page.documentElement.clientWidth));
  say("hidden " + output().hidden);
  press("End");
  say("end " + output().textContent + " dots " + dots());
  press("ArrowLeft");
  say("left " + output().textContent);
  press("Escape");
  say("escape " + output().hidden + " dots " + dots());
  const plot = figure.querySelector(".plot"), box = plot.getBoundingClientRect();
  const place = { clientX: box.left + box.width / 2, clientY: box.top + 5 };
  plot.dispatchEvent(new view.PointerEvent("pointermove", place));
  say("pointer " + output().textContent);
  say("title " + page.title + " scripts " + page.scripts.length + " images " + page.images.length);
  say("background " + view.getComputedStyle(page.body).backgroundColor);
};
frame.src = "PAGE";
</script>"""


def probe(run_dir: Path, tmp_path: Path, width: int = 1000, *flags: str) -> dict[str, str]:
    """Open a run's page in a frame, press keys, move the pointer, and return what was seen."""
    outer = tmp_path / "probe.html"
    outer.write_text(PROBE.replace("PAGE", write_report(run_dir).as_uri()).replace("WIDTH", str(width)))
    dom, console = browse(outer, tmp_path / "profile", "--dump-dom", *flags)
    found = re.search(r'<pre id="out">(.*?)</pre>', dom, re.DOTALL)
    assert found, dom
    assert found[1], console
    return dict(line.split(" ", 1) for line in found[1].splitlines()) | {"console": console}


def test_keys_and_pointer_read_the_charts_and_the_page_fits(tmp_path: Path) -> None:
    run = make_run(tmp_path / "tiny", steps=40, eval_every=10)
    seen = probe(run, tmp_path)
    assert (seen["overflow"], seen["hidden"]) == ("false", "true")
    assert re.fullmatch(r"step 40train [\d.]+validation [\d.]+ dots 2", seen["end"])
    assert re.fullmatch(r"step 39train [\d.]+validation [\d.]+ \(step 40\)", seen["left"])
    assert seen["escape"] == "true dots 0"
    assert re.match(r"step 20train [\d.]+validation", seen["pointer"])
    assert seen["title"] == "tiny · ironfn scripts 1 images 0"
    assert seen["console"] == ""
    assert seen["background"] == "rgb(246, 247, 249)"


def test_a_telephone_in_the_dark_fits_too(tmp_path: Path) -> None:
    run = make_run(tmp_path / ("a_rather_long_name_for_a_run_that_has_no_place_to_break" * 2), steps=40, eval_every=10)
    seen = probe(run, tmp_path, 340, "--blink-settings=preferredColorScheme=0")
    assert seen["overflow"] == "false"
    assert seen["background"] == "rgb(16, 19, 25)"


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    seen = probe(hostile_run(tmp_path / "<img src=y onerror=1>"), tmp_path)
    assert seen["title"] == "<img src=y onerror=1> · ironfn scripts 1 images 0".replace("<", "&lt;").replace(
        ">", "&gt;"
    )
    assert seen["overflow"] == "false"
    assert seen["console"] == ""


def test_a_script_that_slipped_in_would_not_run(tmp_path: Path) -> None:
    """The page's policy allows its own script by hash: were an escape forgotten, the browser would still refuse."""
    path = write_report(make_run(tmp_path / "tiny", steps=5))
    broken = path.read_text("utf-8").replace(
        "<h1>", "<script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\"><h1>"
    )
    path.write_text(broken, "utf-8")
    dom, console = browse(path, tmp_path / "profile", "--dump-dom")
    assert "<title>tiny · ironfn</title>" in dom
    assert "Content Security Policy" in console
