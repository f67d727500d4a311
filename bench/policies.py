"""Learn from rewards one way, in a process of its own that takes a step whenever it is told to: see `tuners`.

``python -m bench.policies NAME FOLDER``; the folder holds the model (``hf``) and the prompts (``rows.jsonl``). A step
is a rollout, its rewards, and one update.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
from attrs import define, field, fields
from torch import Tensor

from bench.tuners import LR, Finished, Turns, memory, say
from drivers.build import Job, build
from drivers.rollouts import Rollouts
from drivers.specs import resolve
from drivers.taught import taught
from ironfn.data.prompts import Prompts
from ironfn.mesh.axis import SINGLE
from ironfn.model import transformer
from ironfn.rewards.each import each
from ironfn.rewards.manager import Reward
from ironfn.rewards.values import Completion
from ironfn.spec.records import RunSpec
from ironfn.types import Params

PROMPTS, GROUP, TOKENS, STEPS = 2, 4, 64, 4
SPEC = """
name: policy
model: {{init_from: {folder}/hf}}
data:
  form: prompts
  length: 1024
  shuffle: false
  sets: {{sums: {{sources: [{folder}/rows.jsonl]}}}}
  split: {{validation: 0.0}}
sft: {{prompts: text}}
grpo:
  prompts: {prompts}
  group: {group}
  tokens: {tokens}
  rewards: {{vowels: {{kind: pattern, pattern: "[aeiou]"}}}}
optim: {{lr: {lr}, schedule: {{kind: constant}}, adamw: {{weight_decay: 0.0}}}}
train: {{steps: 1000}}
"""

looked_up: Callable[..., Tensor] = transformer._embed


class Endless(Job):
    """Let no text end before its last token, so that every side writes and learns from as many."""

    @property
    def ends(self) -> frozenset[int]:
        """Return no id."""
        return frozenset()


@define
class Counted:
    """Look tokens up as the model does, and count them: in ``tokens`` of the kind that is computed ``now``."""

    now: str = "rolled"
    tokens: Counter[str] = field(factory=Counter)

    def __call__(self, params: Params, tokens: Tensor, *rest: Any) -> Tensor:
        self.tokens[self.now] += tokens.numel()
        return looked_up(params, tokens, *rest)


def spec_of(folder: Path) -> RunSpec:
    """Write and read the spec of our run."""
    path = folder / "policy.yaml"
    path.write_text(SPEC.format(folder=folder, prompts=PROMPTS, group=GROUP, tokens=TOKENS, lr=LR), encoding="utf-8")
    return resolve((str(path),), ())


def vowels(text: str) -> float:
    """Reward a text by the share of its letters that are vowels: no two texts are worth the same."""
    return sum(letter in "aeiou" for letter in text) / max(len(text), 1)


def ours(folder: Path) -> None:
    """Take our steps as `ironfn grpo` does; and write down how many tokens went through the model."""
    spec, lesson = taught(spec_of(folder))
    made = build(spec, SINGLE, torch.device("cpu"), lesson)
    job = Endless(**{one.name: getattr(made, one.name) for one in fields(Job)})

    def graded(completion: Completion) -> float:
        return vowels(completion.text)

    rollouts = Rollouts(job, folder / "rollouts", [Reward("vowels", each(graded, seconds=10.0))])
    state, turns, counted, filled = job.first_state(), Turns(), Counted(), 0
    assert isinstance(job.train, Prompts)
    say(STEPS)
    with patch.object(transformer, "_embed", counted):
        for done in itertools.count(1):
            turns.begin()
            counted.now = "rolled"
            batch, _ = rollouts(state)
            counted.now = "trained"
            state, metrics = job.step(state, job.here(batch))
            turns.end(int((batch["weight"] > 0).sum()), metrics["loss"])
            filled += int((batch["segment"] >= 0).sum())
            asked = sum(len(prompt.ids) for prompt in job.train.at(range(done * PROMPTS), 0))
            told = {"prompts": asked, "texts": done * PROMPTS * GROUP, "filled": filled, **counted.tokens}
            (folder / "counts.json").write_text(json.dumps(told), encoding="utf-8")


def theirs(folder: Path, *, together: int) -> None:
    """Take the steps of `trl.GRPOTrainer` in float32, ``together`` texts in a forward pass of an update."""
    from datasets import Dataset as Rows
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    model: Any = LlamaForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    for leaf in model.parameters():
        leaf.data = leaf.data.clone()  # else some of its memory is the file's, and not counted
    spec, lesson = taught(spec_of(folder))
    assert lesson is not None
    end = lesson.teaching.vocabulary.tokenizer.id_to_token(lesson.teaching.end)
    config: Any = GRPOConfig(
        output_dir=str(folder / "trl"), use_cpu=True, bf16=False, learning_rate=LR, lr_scheduler_type="constant",
        per_device_train_batch_size=together, gradient_accumulation_steps=PROMPTS * GROUP // together,
        num_generations=GROUP, max_completion_length=TOKENS, generation_kwargs={"min_new_tokens": TOKENS},
        gradient_checkpointing=False, report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no",
        max_steps=1000, shuffle_dataset=False,
    )  # fmt: skip

    def graded(completions: Sequence[str], **_: Any) -> list[float | None]:
        return [vowels(text) for text in completions]

    rows = [json.loads(row) for row in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    trainer: Any = GRPOTrainer(
        model=model,
        args=config,
        reward_funcs=graded,
        train_dataset=Rows.from_list([{"prompt": row["prompt"]} for row in rows]),
        processing_class=PreTrainedTokenizerFast(tokenizer_file=spec.data.tokenizer.file, eos_token=end, pad_token=end),
    )
    turns = Turns()

    class Wait(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            turns.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            turns.end(PROMPTS * GROUP * TOKENS, 0.0)

    say(STEPS)
    trainer.add_callback(Wait())
    trainer.train()


POLICIES: MappingProxyType[str, Callable[[Path], None]] = MappingProxyType(
    {
        "ours": ours,
        "trl": partial(theirs, together=PROMPTS * GROUP),
        "trl_halves": partial(theirs, together=GROUP),
    }
)

if __name__ == "__main__":
    with suppress(Finished):
        POLICIES[sys.argv[1]](Path(sys.argv[2]))
    say(memory())
