"""Say which command trains a spec: what the data hold and how the model ends decide."""

from __future__ import annotations

import click

from ironfn.spec.records import RunSpec


def mode(spec: RunSpec) -> str:
    """Return the command of a spec."""
    if spec.model.score:
        return "reward-model"
    return {"documents": "pretrain", "examples": "sft", "pairs": "dpo", "judged": "dpo", "prompts": "grpo"}[
        spec.data.form
    ]


def of_this_mode(spec: RunSpec, name: str) -> None:
    """Raise a click error where a spec is not for this command."""
    if (other := mode(spec)) == name:
        return
    how = "model.score is true" if other == "reward-model" else f"data.form is {spec.data.form}"
    wants = {
        "pretrain": "set data.form to documents",
        "sft": "set data.form to examples",
        "dpo": "set data.form to pairs or judged, and leave model.score out",
        "grpo": "set data.form to prompts",
        "reward-model": "set data.form to pairs and model.score to true",
    }[name]
    raise click.UsageError(f"{how}, which is for `ironfn {other}`; for `ironfn {name}`, {wants}")
