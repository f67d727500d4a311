"""Run every shipped spec for a few steps, as it stands but for its size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ironfn.model.families import PRESETS
from ironfn.spec.load import load_spec
from ironfn.spec.records import RunSpec
from tests.test_rewards import GYM

ROOT = Path(__file__).parents[1]
SHIPPED = sorted((ROOT / "specs").rglob("*.yaml"))


CALLS = """
import sys
from drivers.main import main
for words in sys.argv[1].split("\\f"):
    try:
        main(words.split("\\t"), standalone_mode=False)
    except SystemExit as end:
        assert not end.code, end.code
"""


def ironfn(*calls: list[str], cwd: Path) -> list[str]:
    """Make these calls of the command line in one process, and return the lines they print."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{cwd}", "OMP_NUM_THREADS": "1"}
    words = "\f".join("\t".join(call) for call in calls)
    command = [sys.executable, "-W", "error", "-c", CALLS, words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def smaller(file: Path, sources: Path) -> list[str]:
    """Return the overrides that make a spec small: its size and its text, nothing of what it is there to show."""
    spec = load_spec([file], [], PRESETS)
    smaller = ["train.steps=3", "optim.schedule.warmup=1", "checkpoint.every=2", "report.log_every=1"]
    smaller += ["report.eval_rows=2", "report.eval_every=3", "report.sample_tokens=4", "data.split.validation=0.2"]
    if spec.data.form != "prompts":
        smaller.append("train.batch=4")
    if spec.model.init_from is None:
        smaller += ["model.layers=2", "model.width=32", "model.ffn=64", "data.tokenizer.vocab_size=600"]
    smaller += [f"data.sets.{name}.sources=[{sources}]" for name in spec.data.sets]
    if spec.optim.schedule.kind == "wsd":
        smaller.append("optim.schedule.decay_steps=1")
    return [word for override in smaller for word in ("-s", override)]


def with_a_model(spec: RunSpec, texts: Path, folder: Path) -> Path:
    """Train the model that a spec begins from, a small one, and return a file of rows that it can learn from."""
    place = Path(str(spec.model.init_from))
    quickstart = ROOT / "specs/pretrain/quickstart.yaml"
    overrides = [*smaller(quickstart, texts), "-s", f"out={place.parent}", "-s", f"name={place.name}"]
    overrides += ["-s", "model.context=512"]
    ironfn(*([word, str(quickstart), *overrides] for word in ("prepare", "pretrain")), cwd=folder)
    (folder / "reasoning_gym.py").write_text(GYM)  # the real one and these tests want other versions of a package
    (kind,) = {reward.kind for reward in spec.grpo.rewards.values()} or {""}
    rows = [{"prompt": f"def f{n}(x):"} | _taught(kind or spec.data.form, n) for n in range(60)]
    (folder / "examples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "examples.jsonl"


def _taught(by: str, n: int) -> dict[str, Any]:
    """Return what a row has beside its prompt, for a form of data or a kind of reward."""
    return {
        "examples": {"completion": f" return x + {n}"},
        "pairs": {"chosen": f" return x + {n}", "rejected": " pass"},
        "exact": {"answer": str(n)},
        "code": {"answer": {"entry": f"f{n}", "before": f"def f{n}(x):", "cases": [{"args": [1], "expected": 1 + n}]}},
        "gym": {"gym": {"name": "sums", "size": 60, "seed": 0, "settings": {}, "index": n}},
    }[by]


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_shipped_spec_prepares_and_trains(file: Path, tmp_path: Path) -> None:
    sources = tmp_path / "texts"
    sources.mkdir()
    for number, path in enumerate(sorted((ROOT / "ironfn").rglob("*.py"))[:30]):
        (sources / f"{number}.py").write_bytes(path.read_bytes())
    name, overrides = f"{file.parent.name}/{file.stem}", smaller(file, sources)
    spec = load_spec([file], [], PRESETS)
    if spec.model.init_from is not None:
        overrides = smaller(file, with_a_model(spec, sources, tmp_path))
    train, sample = (
        [file.parent.name, name, *overrides],
        ["generate", f"{spec.out}/{file.stem}", "--tokens", "4", "-p", "def"],
    )
    lines = ironfn(["prepare", name, *overrides], train, train, sample, cwd=tmp_path)
    steps = [line.split()[0] for line in lines if line.startswith("step=")]
    assert steps == ["step=1/3", "step=2/3", "step=3/3"], "each once: the second call finds the run done"
    assert any(line.startswith("def") for line in lines)
    assert (tmp_path / spec.out / file.stem / "metrics.jsonl").is_file()
