"""Write a run's report: one HTML file that loads nothing, runs no script but its own, and needs none to be read."""

from __future__ import annotations

import base64
import hashlib
import os
import statistics
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from ironfn.report.charts import Chart, Series, draw
from ironfn.report.run import REWARD, Run
from ironfn.report.samples import sample_section
from ironfn.report.series import Points, brief, finite, is_finite, smooth
from ironfn.report.words import bytes_in_words, safe, seconds_in_words

POLICY = ("default-src 'none'", "style-src 'unsafe-inline'", "base-uri 'none'", "form-action 'none'")
"""What a browser may load or run besides the page's own script, told apart by its hash: nothing. A sample that slipped
through the escapes could still do no harm."""
PLAIN = ("loss", "bits_per_byte", "lr", "grad_norm", "tokens_per_s", "mfu", "memory", "seconds", "left", "skipped")
TITLES: Mapping[str, str] = {
    "bits_per_byte": "Bits per byte",
    "lr": "Learning rate",
    "grad_norm": "Gradient norm",
    "tokens_per_s": "Tokens per second",
}
SMOOTHED_FROM = 60
"""As many rows get a smooth line."""
MORE_CHARTS = 16
"""As many metrics of the run's own as are drawn; those with a slash, of single experts, are left to metrics.jsonl."""


def write_report(run_dir: str | Path, commands: Mapping[str, str] | None = None) -> Path:
    """Write ``report.html`` in a run's directory from its metrics, samples and spec, and return its path.

    commands: what to type next, by what it does. The file is replaced atomically. Rows that no one wrote are not
    missed: a run of one row, or of none, has a report too. OSError where the directory cannot be written.
    """
    directory = Path(run_dir)
    page = render(Run.read(directory), commands or {})
    target = directory / "report.html"
    aside = directory / f"report.html.{os.getpid()}.new"
    aside.write_bytes(page.encode("utf-8", "replace"))
    aside.replace(target)
    return target


def render(run: Run, commands: Mapping[str, str]) -> str:
    """Return the page."""
    here = resources.files("ironfn.report")
    style, script = (here.joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = "; ".join((*POLICY, f"script-src 'sha256-{digest}'"))
    sections = [_header(run), _tiles(run), _charts(run), sample_section(run.samples), _evaluations(run)]
    sections += [_facts(run), _spec(run), _commands(commands), _footer(run)]
    name = safe(run.name)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name} · ironfn</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(section for section in sections if section)
        + f"\n</main>\n<script>{script}</script>\n</body>\n</html>\n"
    )


def _header(run: Run) -> str:
    model, start, total, done = run.section("model"), run.last("run"), run.section("train").get("steps"), run.steps[1]
    state, words = ("done", "finished") if done and done == total else ("open", "not finished")
    if "loss" in run.last("train") and not is_finite(run.last("train")["loss"]):
        state, words = "bad", "the loss is not finite"
    progress = f" · step {done:,}" + (f" of {total:,}" if isinstance(total, int) else "")
    parts = [
        f"{brief(start['parameters'])} parameters" if "parameters" in start else "",
        str(model.get("preset", "")),
        f"{model['layers']} layers × {model['width']}" if {"layers", "width"} <= model.keys() else "",
        f"{start.get('devices', 1)} × {start['device']}" if "device" in start else "",
    ]
    return (
        f'<header><p class="state {state}">{words}{progress}</p><h1>{safe(run.name)}</h1>'
        f'<p class="what">{safe(" · ".join(part for part in parts if part))}</p></header>'
    )


def _tiles(run: Run) -> str:
    train, start, subject = run.last("train"), run.last("run"), run.subject
    tiles: list[tuple[str, str, str]] = []
    if train:
        last = next((value for _, value in reversed(finite(run.column("train", subject.train)))), train.get("loss"))
        tiles.append((f"Training {subject.title.lower()}", brief(last), subject.unit))
    for kind in run.kinds:
        if subject is REWARD:
            tiles.append(_of_rewards(run, kind))
            continue
        row, best = run.last(kind), min(finite(run.column(kind, "bits_per_byte")), key=lambda p: p[1], default=None)
        notes = [f"perplexity {brief(row.get('perplexity'))}"]
        if best and best[0] != row["step"]:
            notes.append(f"best {brief(best[1])} at step {best[0]:,}")
        tiles.append((f"{_title(kind)} bits/byte", brief(row.get("bits_per_byte")), ", ".join(notes)))
    if train:
        speed, share = (finite(run.column("train", name)) for name in ("tokens_per_s", "mfu"))
        tokens = start["tokens_per_step"] * train["step"] if "tokens_per_step" in start else None
        tiles.append(("Tokens/s", brief(_median(speed)), "median"))
        tiles.append(("MFU", f"{_median(share):.1%}" if share else "–", "median, of the peak"))
        tiles.append(("Peak memory", bytes_in_words(train.get("memory")), "of a device" if start else ""))
        tiles.append(("Time", seconds_in_words(train.get("seconds")), f"{brief(tokens)} tokens" if tokens else ""))
    items = "".join(
        f"<div><dt>{safe(title)}</dt><dd>{safe(value)}<small>{safe(note)}</small></dd></div>"
        for title, value, note in tiles
    )
    return f'<dl class="tiles">{items}</dl>' if items else '<p class="empty">No step has been logged yet.</p>'


def _of_rewards(run: Run, kind: str) -> tuple[str, str, str]:
    row, known = run.last(kind), finite(run.column(kind, REWARD.held))
    notes = [f"{brief(known[0][1])} at step {known[0][0]:,}"] if len(known) > 1 else []
    notes += [f"{name} {brief(row[name])}" for name in _tries(run, kind) if name in row]
    return f"{_title(kind)} reward", brief(row.get(REWARD.held)), ", ".join(notes)


def _tries(run: Run, kind: str) -> list[str]:
    return sorted(name for of, name in run.columns if of == kind and name.startswith(("mean_", "pass_")))


def _median(series: Points) -> float | None:
    return statistics.median(value for _, value in series) if series else None


def _charts(run: Run) -> str:
    subject, shown = run.subject, {*PLAIN, run.subject.train}
    own = sorted(name for kind, name in run.columns if kind == "train" and name not in shown and "/" not in name)
    charts = [
        Chart(
            f"{subject.title} ({subject.unit})",
            _both(run, subject.train, subject.held),
            _note(run),
            True,
            subject.outliers,
        ),
        Chart(TITLES["bits_per_byte"], _both(run, "bits_per_byte", "bits_per_byte")),
        *(Chart(TITLES[name], _smoothed(run, name)) for name in ("lr", "grad_norm", "tokens_per_s")),
        *(Chart(_title(name), _smoothed(run, name)) for name in own[:MORE_CHARTS]),
    ]
    first, last = run.steps
    steps = (0 if first < last / 10 else first, last)
    drawn = "\n".join(draw(chart, steps) for chart in charts if any(finite(each.points) for each in chart.series))
    return f'<h2>Charts</h2>\n<div class="charts">\n{drawn}\n</div>' if drawn else ""


def _note(run: Run) -> str:
    skipped = run.last("train").get("skipped") or 0
    bad = [step for step, value in run.column("train", "loss") if not is_finite(value)]
    notes: list[str] = []
    if bad:
        notes.append(f"The loss was not finite in {len(bad):,} of the rows, first at step {bad[0]:,}.")
    if skipped:
        notes.append(f"{skipped:,} steps were passed over for gradients that were not finite.")
    return " ".join(notes)


def _both(run: Run, train: str, held: str) -> list[Series]:
    evaluated = [Series(kind, run.column(kind, held), _tone(kind), "dots") for kind in run.kinds]
    return _smoothed(run, train) + evaluated


def _smoothed(run: Run, name: str) -> list[Series]:
    """Return the column as it is, faint behind its moving mean where it has enough rows for one."""
    raw = run.column("train", name)
    if len(raw) < SMOOTHED_FROM or name == "lr":
        return [Series("train", raw, "train")]
    return [Series("each row", raw, "train", "faint"), Series("train", smooth(raw), "train")]


def _evaluations(run: Run) -> str:
    kinds = run.kinds
    rows = [row for row in run.rows if row.get("kind") in kinds]
    if not rows:
        return ""
    columns = {"loss": "loss", "perplexity": "perplexity", "bits_per_byte": "bits/byte", "tokens": "tokens"}
    if run.subject is REWARD:
        columns = {REWARD.held: "reward"} | {name: name for kind in kinds for name in _tries(run, kind)}
    shown = rows if len(rows) <= 60 else [rows[at * (len(rows) - 1) // 59] for at in range(60)]
    body = "".join(
        f"<tr><td>{row['step']:,}</td><td>{safe(row['kind'])}</td>"
        + "".join(f"<td>{brief(row.get(name))}</td>" for name in columns)
        + "</tr>"
        for row in shown
    )
    names = "".join(f'<th scope="col">{safe(name)}</th>' for name in ("step", "split", *columns.values()))
    return (
        f'<section class="card long"><details><summary>All evaluations ({len(rows):,})</summary><div class="scroll">'
        f"<table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table></div></details></section>"
    )


def _facts(run: Run) -> str:
    start, model = run.last("run"), run.section("model")
    facts = {name: model[name] for name in model if isinstance(model[name], int | float | str | bool)}
    named: dict[str, str] = {
        title: brief(start[name])
        for name, title in {
            "parameters": "parameters",
            "flops_per_token": "FLOPs a token",
            "peak_flops": "peak FLOP/s",
            "tokens_per_step": "tokens a step",
        }.items()
        if isinstance(start.get(name), int | float) and start[name]
    }
    named |= {name.replace("_", " "): _plain(value) for name, value in facts.items()}
    items = "".join(f"<div><dt>{safe(name)}</dt><dd>{safe(value)}</dd></div>" for name, value in named.items())
    return f'<h2>Model</h2>\n<section class="card"><dl class="facts">{items}</dl></section>' if items else ""


def _plain(value: object) -> str:
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def _spec(run: Run) -> str:
    if not run.spec_text:
        return ""
    return (
        '<section class="card long"><details><summary>The resolved spec</summary>'
        f"<pre>{safe(run.spec_text[:100_000])}</pre></details></section>"
    )


def _commands(commands: Mapping[str, str]) -> str:
    items = "".join(
        f'<div class="command"><span>{safe(what)}</span><pre><code>{safe(command)}</code></pre></div>'
        for what, command in commands.items()
    )
    return f'<h2>Next</h2>\n<section class="card">{items}</section>' if items else ""


def _footer(run: Run) -> str:
    when = f"The last row was written on {run.written:%Y-%m-%d at %H:%M} UTC. " if run.written else ""
    return f"<footer>{when}This file holds all that it shows and loads nothing.</footer>"


def _title(name: str) -> str:
    words = name.replace("_", " ")
    return words[:1].upper() + words[1:]


def _tone(kind: str) -> str:
    return "validation" if kind == "validation" else "test"
