"""Fine-tune one way, in a process of its own that takes a step whenever it is told to.

``python -m bench.tuners NAME FOLDER`` says how many steps an epoch has; then, for every line that it is given, it takes
the next one and says the seconds, the trained tokens and the loss; and when no line is left, its peak of memory. The
folder holds the model (``hf``), the rows (``rows.jsonl``) and what was prepared of them (``data``).
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from attrs import define, evolve

from drivers.trained import Trained, open_model
from drivers.wording import open_wording
from ironfn.algo.step import State, make_step
from ironfn.data.conversation import Example
from ironfn.data.dataset import Dataset, rows_at
from ironfn.data.examples import examples
from ironfn.data.lesson import Lesson
from ironfn.data.opening import open_dataset
from ironfn.data.supervise import supervised
from ironfn.grad.remat import recompute
from ironfn.grad.value_and_grad import value_and_grad
from ironfn.loss.lm import lm_loss
from ironfn.model.adapters import adapting, first_adapter, frozen_base
from ironfn.model.forward import DEFAULT, Forward
from ironfn.model.tables import table
from ironfn.optim.adamw import adamw
from ironfn.report.meter import peak_memory
from ironfn.spec.adapter_records import AdapterSpec
from ironfn.spec.records import DataSpec, SetSpec, SftSpec, SplitSpec, TokenizerSpec
from ironfn.types import Batch, Params

LENGTH, LR = 512, 1e-5
PACKED_ROWS, PADDED_ROWS = 2, 8
NO_ADAPTER = AdapterSpec()
LORA = AdapterSpec(kind="lora", rank=16, alpha=32.0)


class Finished(Exception):
    """Tell that nobody wants another step."""


@define
class Turns:
    """Take a step when a line comes in, and say what it gave."""

    _start: tuple[float, float] = (0.0, 0.0)

    def begin(self) -> None:
        """Wait for the next line. `Finished` where there is none."""
        if not sys.stdin.readline():
            raise Finished
        self._start = time.perf_counter(), time.process_time()

    def end(self, tokens: int, loss: float) -> None:
        """Say what the step took and gave."""
        say(time.perf_counter() - self._start[0], time.process_time() - self._start[1], tokens, loss)


def say(*values: float) -> None:
    """Write numbers as a line."""
    print(*values, file=sys.stdout, flush=True)


def lesson(folder: Path, length: int = LENGTH) -> tuple[DataSpec, Lesson]:
    """Say how ``rows.jsonl`` is prepared for the model beside it: all of the rows to train on."""
    wording = open_wording(folder / "hf")
    end = wording.vocabulary.tokenizer.id_to_token(wording.vocabulary.eos)
    spec = DataSpec(
        dir=str(folder / "data"),
        sets={"rows": SetSpec(sources=[str(folder / "rows.jsonl")])},
        tokenizer=TokenizerSpec(file=str(folder / "hf/tokenizer.json"), eos=end),
        split=SplitSpec(validation=0.0),
        length=length,
    )
    return spec, Lesson(SftSpec(), wording.teaching(None, "all", "split"))


def opened(folder: Path) -> Dataset:
    """Open what was prepared."""
    spec, how = lesson(folder)
    return open_dataset(spec, "train", how)


def batches(folder: Path) -> list[Batch]:
    """Return the steps' rows of an epoch."""
    data = opened(folder)
    firsts = range(0, data.rows, PACKED_ROWS)
    return [rows_at(data, range(first, min(first + PACKED_ROWS, data.rows)), 0) for first in firsts]


def parted(model: Trained, spec: AdapterSpec) -> tuple[Params, Params, Forward]:
    """Return what is trained, what is frozen, and the forward pass."""
    if spec.kind == "none":
        return model.params, {}, DEFAULT
    base = frozen_base(spec, model.params, table(False))
    return first_adapter(spec, model.arch, base, 0, table(False)), base, Forward(adapt=adapting(spec))


def ours(folder: Path, spec: AdapterSpec = NO_ADAPTER, *, remat: bool = False) -> None:
    """Take our steps over packed rows, with AdamW and buffers that are used again."""
    model = open_model(folder / "hf", lambda _: None)
    params, base, how = parted(model, spec)
    optimizer = adamw(0.9, 0.999, 1e-8, 0.0)
    vg = value_and_grad(lm_loss(model.arch, evolve(how, run=recompute) if remat else how))
    step = make_step(vg, optimizer, lambda s: LR, clip=1.0, donate=True)
    state = State(0, params, optimizer.init(params), extra={"fixed": base} if base else {})
    del model, params, base
    given, turns = batches(folder), Turns()
    say(len(given))
    for batch in itertools.cycle(given):
        turns.begin()
        state, metrics = step(state, batch)
        turns.end(int(metrics["tokens"]), metrics["loss"])


def theirs(folder: Path, *, packed: bool, lora: bool = False, remat: bool = False) -> None:
    """Take the steps of `trl.SFTTrainer`, with `peft`'s LoRA or without, in float32 and on the ids that we train on.

    packed: by its packing, else by padding. remat: with its gradient checkpointing, which is slower and smaller, as
    ours is; it is TRL's default, but not that of the trainer below it.
    """
    from datasets import Dataset as Rows
    from peft import LoraConfig
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    model: Any = LlamaForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    for leaf in model.parameters():
        leaf.data = leaf.data.clone()  # else some of its memory is the file's, and not counted
    spec, how = lesson(folder)
    end = how.teaching.vocabulary.tokenizer.id_to_token(how.teaching.end)
    config: Any = SFTConfig(
        output_dir=str(folder / "trl"), use_cpu=True, bf16=False, learning_rate=LR, lr_scheduler_type="constant",
        max_length=LENGTH, packing=packed, per_device_train_batch_size=PACKED_ROWS if packed else PADDED_ROWS,
        gradient_checkpointing=remat, report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no",
        train_sampling_strategy="sequential", num_train_epochs=9,
    )  # fmt: skip
    linear = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    trainer: Any = SFTTrainer(
        model=model,
        args=config,
        train_dataset=Rows.from_list(labelled(folder, how)),
        processing_class=PreTrainedTokenizerFast(tokenizer_file=spec.tokenizer.file, eos_token=end, pad_token=end),
        peft_config=LoraConfig(r=LORA.rank, lora_alpha=int(LORA.alpha), target_modules=linear) if lora else None,
    )
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in trainer.get_train_dataloader()]
    turns = Turns()

    class Wait(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            turns.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            turns.end(counts[(state.global_step - 1) % len(counts)], 0.0)

    say(len(counts))
    trainer.add_callback(Wait())
    trainer.train()


def labelled(folder: Path, how: Lesson) -> list[dict[str, list[int]]]:
    """Return the rows as TRL takes them: ids, and labels that are -100 where nothing is trained."""
    found: list[dict[str, list[int]]] = []
    for example in examples(folder / "rows.jsonl", {}):
        assert isinstance(example, Example)
        for text in supervised(example, how.teaching):
            labels = np.where(text.trained, text.ids, -100)
            found.append({"input_ids": text.ids.tolist(), "labels": labels.tolist()})
    return found


TUNERS: MappingProxyType[str, Callable[[Path], None]] = MappingProxyType(
    {
        "full": ours,
        "lora": partial(ours, spec=LORA),
        "full_remat": partial(ours, remat=True),
        "lora_remat": partial(ours, spec=LORA, remat=True),
        "trl_packed": partial(theirs, packed=True),
        "trl": partial(theirs, packed=False),
        "trl_remat": partial(theirs, packed=False, remat=True),
        "peft_packed": partial(theirs, packed=True, lora=True),
        "peft": partial(theirs, packed=False, lora=True),
    }
)


def memory() -> int:
    """Return the most bytes that this process had in memory, but for those of files."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return peak_memory(torch.device("cpu")) - int(status["RssFile"].split()[0]) * 1024


if __name__ == "__main__":
    with suppress(Finished):
        TUNERS[sys.argv[1]](Path(sys.argv[2]))
    say(memory())
