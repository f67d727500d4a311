"""Make run directories for the tests of the report."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Collection
from pathlib import Path

from ironfn.report.rows import EvaluationRow, MetricsFile, RunRow, TrainRow

SPEC = """\
name: tiny
model: {preset: llama, layers: 6, width: 384, tied: true}
train: {steps: 300}
"""


def make_run(
    directory: Path, steps: int = 300, *, eval_every: int = 20, bad: Collection[int] = (), spec: str = SPEC
) -> Path:
    """Write a run whose loss falls as one's does; it is NaN at the ``bad`` steps."""
    draw = random.Random(7)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "spec.yaml").write_text(spec, "utf-8")
    with (
        MetricsFile.new(directory / "metrics.jsonl") as metrics,
        MetricsFile.new(directory / "samples.jsonl") as samples,
    ):
        metrics.write(
            RunRow(parameters=12_140_928, flops_per_token=7.2e7, peak_flops=1.1e11, tokens_per_step=2048, device="cpu")
        )
        for step in range(1, steps + 1):
            loss = 2.4 + 6 * math.exp(-20 * step / steps) + draw.gauss(0, 0.1)
            metrics.write(
                TrainRow(
                    step=step, loss=math.nan if step in bad else loss, bits_per_byte=loss / 2,
                    lr=3e-4 * (1 - step / (steps + 1)),
                    grad_norm=0.5 + draw.random(), tokens_per_s=2100 + draw.gauss(0, 60), mfu=0.7, memory=1288490189,
                    seconds=float(step), left=float(steps - step), extra={"noise_scale": 900.0 + step},
                )
            )  # fmt: skip
            if step % eval_every == 0:
                metrics.write(
                    EvaluationRow(step=step, loss=loss + 0.1, perplexity=math.exp(loss + 0.1),
                                  bits_per_byte=loss / 2 + 0.05, tokens=4096, bytes=9000, seconds=float(step))
                )  # fmt: skip
                samples.write({"step": step, "prompt": "Once", "text": f" upon a time {step}"})
    return directory


HOSTILE = (
    "</script></pre><img src=x onerror=alert(1)>&amp;\"'<!-- \x1b[2J \x00 \u202e "
    "<script>document.title='owned'</script>"
)


def hostile_run(directory: Path) -> Path:
    """Write a run in which every text that a report shows would break out of it."""
    make_run(directory, spec=f"name: x\nmodel: {{preset: {json.dumps(HOSTILE)}, layers: 2, width: 8}}\n# <script>\n")
    with MetricsFile(directory / "metrics.jsonl") as metrics, MetricsFile(directory / "samples.jsonl") as samples:
        metrics.write({"kind": "run", "step": 0, "parameters": 5, "device": HOSTILE, "devices": 1})
        metrics.write({"kind": "train", "step": 301, "loss": 2.0, HOSTILE: 1.0})
        metrics.write({"kind": HOSTILE, "step": 301, "loss": 2.0, "perplexity": 7.4, "bits_per_byte": 1.0})
        samples.write({"step": 301, "prompt": HOSTILE, "text": HOSTILE + "\udc80"})
    return directory
