"""Show what the model wrote over the run, prompt by prompt."""

from __future__ import annotations

from ironfn.report.rows import Row
from ironfn.report.words import safe

SHOWN, MORE, LONGEST, PROMPTS = 4, 16, 2000, 12
"""Samples of a prompt in view, and behind a click, each spread over the run; characters of one; prompts."""


def sample_section(samples: list[Row]) -> str:
    """Return a card for each prompt, its samples from the last to the first. A text holds what follows its prompt."""
    by_prompt: dict[str, dict[int, str]] = {}
    for row in samples:
        by_prompt.setdefault(str(row.get("prompt", "")), {})[row["step"]] = str(row.get("text", ""))
    cards = [_card(prompt, texts) for prompt, texts in list(by_prompt.items())[:PROMPTS]]
    left_out = len(by_prompt) - len(cards)
    more = f'<p class="note">{left_out:,} more prompts are in samples.jsonl.</p>' if left_out else ""
    return f"<h2>What it wrote</h2>\n{''.join(cards)}{more}" if cards else ""


def _card(prompt: str, texts: dict[int, str]) -> str:
    steps = sorted(texts, reverse=True)
    seen = _spread(steps, SHOWN)
    more = _spread([step for step in steps if step not in seen], MORE)
    shown, hidden = ("".join(_sample(step, prompt, texts[step]) for step in part) for part in (seen, more))
    left_out = len(steps) - len(seen) - len(more)
    note = f'<p class="note">{left_out:,} more are in samples.jsonl.</p>' if left_out else ""
    behind = f"<details><summary>{len(more)} from between</summary>{hidden}{note}</details>" if more else ""
    return f'<section class="card long"><h3 class="prompt">{_text(prompt)}</h3>{shown}{behind}</section>'


def _sample(step: int, prompt: str, text: str) -> str:
    return (
        f'<div class="sample"><div class="at">step {step:,}</div>'
        f'<div class="text"><b>{_text(prompt)}</b>{_text(text.removeprefix(prompt))}</div></div>'
    )


def _spread(steps: list[int], count: int) -> list[int]:
    """Return ``count`` of the steps, the first and the last among them, evenly spread."""
    if len(steps) <= count:
        return steps
    return [steps[round(at * (len(steps) - 1) / (count - 1))] for at in range(count)]


def _text(text: str) -> str:
    return safe(text if len(text) <= LONGEST else text[:LONGEST] + " …")
