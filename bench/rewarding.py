"""Learn from rewards with SmolLM2-135M, here and with `trl.GRPOTrainer`: time and memory, and what is computed once."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.figure import Figure
from bench.finetuning import NAME, alternating
from bench.policies import PROMPTS, STEPS, TOKENS
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
    asked, written = told["prompts"], told["texts"] * TOKENS
    # the last token of a completion is drawn and never read, and the last of a prompt begins each of its completions
    rolled, trained = told["rolled"] - written + told["texts"], told["filled"] - written
    note = f"{told['rolled']} tokens went through the model, {asked} of them prompts'"
    yield Figure("prompt_once_rollout", rolled / asked, "<= 1", note)
    note = f"{told['filled']} tokens in {told['trained']} places went through the model"
    yield Figure("prompt_once_training", trained / asked, "<= 1", note)
