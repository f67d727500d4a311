"""Learn from rewards with SmolLM2-135M, here and with `trl.GRPOTrainer`: time and memory, and what is computed once."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.figure import Figure
from bench.finetuning import NAME, alternating
from bench.policies import PROMPTS, STEPS
from drivers.exported import export_run
from drivers.fetch import WHEELS, fetch

GSM8K = Path(__file__).parents[2] / "shared/data/eval/gsm8k.jsonl"


def figures() -> Iterator[Figure]:
    """Yield what a step takes of TRL's time and memory, and how often a group's prompt goes through the model.

    A step writes 4 completions of 64 tokens to each of 2 prompts of GSM8K, grades them, and trains the whole model on
    them once. Both sides have the same prompts and take their steps in turn, the first of which is not counted.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = Path("models") / NAME
        fetch(WHEELS[NAME], model, lambda _: None)
        export_run(model, folder / "hf", None, None, 5 << 30, lambda _: None)
        rows = [json.loads(row) for row in GSM8K.read_text(encoding="utf-8").splitlines()]
        kept = [
            json.dumps({"prompt": row["context"], "answer": row["answer"]}) for row in rows[: PROMPTS * (STEPS + 1)]
        ]
        (folder / "rows.jsonl").write_text("\n".join(kept) + "\n", encoding="utf-8")
        mine, other = alternating(["ours", "trl"], folder, "bench.policies")
        told = json.loads((folder / "counts.json").read_text(encoding="utf-8"))
    note = f"medians of {STEPS} steps: {mine.median:.2f} and {other.median:.2f} s; {mine}; {other}"
    yield Figure("step_ratio", mine.median / other.median, "<= 0.38", note)
    yield Figure(
        "memory_ratio", mine.peak / other.peak, "<= 0.5", f"{mine.peak / 1e9:.2f} and {other.peak / 1e9:.2f} GB"
    )
    asked, written = told["prompts"], told["written"]
    # the last token of a completion is drawn and never read
    rolled = (told["rolled"] - written + told["texts"]) / asked
    yield Figure("prompt_once_rollout", rolled, "<= 1", f"{told['rolled']} tokens, {asked} of them prompts'")
    note = f"{told['trained']} tokens in {told['places']} places, prompts but for their last tokens once"
    yield Figure("prompt_once_training", (told["trained"] - written) / asked, "<= 1", note)
