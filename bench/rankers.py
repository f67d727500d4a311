"""Learn what is preferred one way, in a process of its own that takes a step whenever it is told to: see `tuners`.

``python -m bench.rankers NAME FOLDER``; the folder holds the model (``hf``) and the pairs (``rows.jsonl``).
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from attrs import evolve

from bench.tuners import LORA, LR, Finished, Turns, lesson, memory, parted, say
from drivers.references import referenced
from drivers.trained import open_model
from ironfn.algo.step import State, make_step
from ironfn.data.dataset import Dataset, rows_at
from ironfn.data.opening import open_dataset
from ironfn.data.pairs import PairStore
from ironfn.grad.value_and_grad import value_and_grad
from ironfn.loss.pairs import base_model, frozen_model, in_batch, pair_loss
from ironfn.loss.preference import dpo
from ironfn.mesh.axis import SINGLE
from ironfn.optim.adamw import adamw

LENGTH, ROWS, PAIRS, BETA = 1024, 1, 4, 0.1
"""Our rows have so many places, theirs so many pairs: about as many tokens a step."""


def opened(folder: Path) -> Dataset:
    """Open the pairs that were prepared."""
    spec, how = lesson(folder, LENGTH)
    return open_dataset(spec, "train", evolve(how, holds="pairs"))


def ours(folder: Path, *, kept: bool = False) -> None:
    """Take our steps. kept: with what the reference gives computed beforehand, which is not counted."""
    model = open_model(folder / "hf", lambda _: None)
    params, base, how = parted(model, LORA)
    data, cpu = opened(folder), torch.device("cpu")
    reference = in_batch if kept else base_model(model.arch, how)
    if kept:
        live = frozen_model(model.params, model.arch)
        data = referenced(data, "bench", lambda: live, lambda batch: batch, ROWS, SINGLE, cpu, lambda line: None)
        del live
    optimizer = adamw(0.9, 0.999, 1e-8, 0.0)
    vg = value_and_grad(pair_loss(model.arch, dpo(BETA), reference, how))
    step = make_step(vg, optimizer, lambda s: LR, clip=1.0, donate=True)
    state = State(0, params, optimizer.init(params), extra={"fixed": base} if base else {})
    del model, params, base
    turns, given = Turns(), [rows_at(data, range(at, min(at + ROWS, data.rows)), 0) for at in range(0, data.rows, ROWS)]
    say(len(given))
    for batch in itertools.cycle(given):
        turns.begin()
        state, metrics = step(state, batch)
        turns.end(int(metrics["tokens"]), metrics["loss"])


def theirs(folder: Path) -> None:
    """Take the steps of `trl.DPOTrainer` with `peft`'s LoRA, in float32, without gradient checkpointing."""
    from datasets import Dataset as Rows
    from peft import LoraConfig
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    model: Any = LlamaForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    for leaf in model.parameters():
        leaf.data = leaf.data.clone()  # else some of its memory is the file's, and not counted
    spec, how = lesson(folder, LENGTH)
    end = how.teaching.vocabulary.tokenizer.id_to_token(how.teaching.end)
    config: Any = DPOConfig(
        output_dir=str(folder / "trl"), use_cpu=True, bf16=False, learning_rate=LR, lr_scheduler_type="constant",
        max_length=LENGTH, per_device_train_batch_size=PAIRS, gradient_checkpointing=False, report_to=[], beta=BETA,
        save_strategy="no", disable_tqdm=True, logging_strategy="no", num_train_epochs=9, dataloader_drop_last=False,
    )  # fmt: skip
    linear = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    trainer: Any = DPOTrainer(
        model=model,
        args=config,
        train_dataset=Rows.from_list([json.loads(row) for row in (folder / "rows.jsonl").read_text().splitlines()]),
        processing_class=PreTrainedTokenizerFast(tokenizer_file=spec.tokenizer.file, eos_token=end, pad_token=end),
        peft_config=LoraConfig(r=LORA.rank, lora_alpha=int(LORA.alpha), target_modules=linear),
    )
    counts = [len(batch["input_ids"]) // 2 for batch in trainer.get_train_dataloader()]
    turns = Turns()

    class Wait(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            turns.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            turns.end(counts[(state.global_step - 1) % len(counts)], 0.0)

    say(len(counts))
    trainer.add_callback(Wait())
    trainer.train()


def shared(folder: Path) -> float:
    """Return the share of the prompts among the tokens of all texts."""
    (store,) = opened(folder).stores
    assert isinstance(store, PairStore)
    prompts = 2 * int(store.asked[:, 0].sum())
    return prompts / (prompts + int(store.size.sum()))


RANKERS: MappingProxyType[str, Callable[[Path], None]] = MappingProxyType(
    {
        "dpo": ours,
        "dpo_kept": partial(ours, kept=True),
        "trl_dpo": theirs,
    }
)

if __name__ == "__main__":
    with suppress(Finished):
        RANKERS[sys.argv[1]](Path(sys.argv[2]))
    say(memory())
