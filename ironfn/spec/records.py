"""Hold a run's description: frozen records, one for each section of the YAML file."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen

from ironfn.spec.adapter_records import AdapterSpec as AdapterSpec
from ironfn.spec.grpo_records import GraderSpec as GraderSpec
from ironfn.spec.grpo_records import GrpoSpec as GrpoSpec
from ironfn.spec.grpo_records import JudgeSpec as JudgeSpec
from ironfn.spec.model_records import ModelSpec as ModelSpec
from ironfn.spec.model_records import MoeSpec as MoeSpec
from ironfn.spec.model_records import RopeSpec as RopeSpec
from ironfn.spec.preference_records import DpoSpec as DpoSpec
from ironfn.spec.preference_records import RewardSpec as RewardSpec


@frozen
class TokenizerSpec:
    """Train a tokenizer of ``kind`` with ``vocab_size`` ids on the training split, or take ``file`` (a tokenizer.json).

    eos: the token of ``file`` that ends a document; None looks for a usual name.
    """

    kind: Literal["bpe", "wordpiece", "unigram"] = "bpe"
    vocab_size: int = 4096
    file: str | None = None
    eos: str | None = None


@frozen
class FimSpec:
    """Rearrange a share ``rate`` of the training documents: fill-in-the-middle (Bavarian 2022, arXiv 2207.14255).

    Validation and test stay as written, so that their loss compares between runs.
    spm_rate: the share of those written suffix first. spans: cut at any character, or only at line starts.
    """

    rate: float = 0.0
    spm_rate: float = 0.5
    spans: Literal["character", "line"] = "character"


@frozen
class SetSpec:
    """Name the sources of one token store: files, directories, globs, ``stdlib:code``, ``stdlib:prose`` or ``stdlib:``.

    text: the field that holds the text in jsonl and parquet. split_on: what parts the documents of a text file, such as
    a blank line ("\\n\\n"); None makes each file one document. weight: the set's share of a mixture.
    clean: repair prose with ftfy (never program text). deduplicate: keep the first of documents with equal text.
    """

    sources: list[str]
    text: str = "text"
    split_on: str | None = None
    weight: float = 1.0
    clean: bool = False
    deduplicate: bool = True
    fim: FimSpec = field(factory=FimSpec)


@frozen
class SplitSpec:
    """Send these shares of the documents to validation and test, by a hash of the document's text.

    So a document's split stays when others are added, and equal documents are never on both sides.
    """

    validation: float = 0.02
    test: float = 0.0


@frozen
class DataSpec:
    """Describe the text of a run and how rows are cut from it.

    dir: where ``ironfn prepare`` writes the tokenizer and the stores. length: tokens a row.
    form: what the sources hold, ``documents`` to read on in, ``examples`` that teach, such as conversations, ``pairs``
    of which one text is preferred, completions that are ``judged`` one by one, or ``prompts`` to be answered.
    temperature: None mixes the sets by their weights, T by p proportional to tokens^(1/T).
    attend: whether a token sees only its own document or the whole row before it.
    bad_lines: whether a malformed line stops the preparation or is counted and passed over.
    workers: threads that make batches ahead of the loop.
    """

    dir: str = "data"
    form: Literal["documents", "examples", "pairs", "judged", "prompts"] = "documents"
    sets: dict[str, SetSpec] = field(factory=lambda: {"stdlib": SetSpec(sources=["stdlib:"])})
    tokenizer: TokenizerSpec = field(factory=TokenizerSpec)
    split: SplitSpec = field(factory=SplitSpec)
    length: int = 256
    temperature: float | None = None
    attend: Literal["document", "row"] = "document"
    shuffle: bool = True
    bad_lines: Literal["stop", "count"] = "stop"
    workers: int = 1


@frozen
class SftSpec:
    """Describe how a model is taught by examples, and how pairs are written: unless ``data.form`` is ``documents``.

    fields: our name of a field -> what the rows call it. template: a chat template's name or file; None takes the
    model's own. train_on: all answers of a conversation, or its last. overlong: what becomes of a text that is longer
    than ``data.length``. rewritten: whether a template that writes earlier answers in another way gets a text for each.
    prompts: whether ``report.prompts`` are asked as messages, where there is a template, or continued as they stand.
    """

    fields: dict[str, str] = field(factory=dict)
    template: str | None = None
    train_on: Literal["all", "last"] = "all"
    overlong: Literal["truncate", "split", "drop"] = "truncate"
    rewritten: Literal["split", "refuse"] = "split"
    prompts: Literal["chat", "text"] = "chat"


@frozen
class AdamWSpec:
    """Set AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101)."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1


@frozen
class MuonSpec:
    """Set Muon (Jordan 2024). scale: Keller Jordan's sqrt(max(1, rows / columns)) or Moonshot's 0.2 sqrt(max)."""

    momentum: float = 0.95
    nesterov: bool = True
    steps: int = 5
    weight_decay: float = 0.1
    scale: Literal["jordan", "moonshot"] = "moonshot"
    lr_factor: float = 1.0
    precision: Literal["float32", "bfloat16"] = "float32"


@frozen
class ScheduleSpec:
    """Set the learning rate over the run: ``warmup`` steps up, then ``kind`` down to ``final`` x lr at the last step.

    decay_steps: the length of the last phase of ``wsd``. power: the exponent of ``polynomial``.
    """

    kind: Literal["constant", "linear", "cosine", "polynomial", "wsd"] = "cosine"
    warmup: int = 0
    final: float = 0.1
    decay_steps: int = 0
    power: float = 1.0


@frozen
class OptimSpec:
    """Choose the optimizer. groups: path regex -> muon, muon_no_decay, adamw, adamw_no_decay; first match wins."""

    name: Literal["adamw", "muon"] = "adamw"
    lr: float = 3e-4
    clip: float | None = 1.0
    nonfinite: Literal["stop", "skip"] = "stop"
    schedule: ScheduleSpec = field(factory=ScheduleSpec)
    adamw: AdamWSpec = field(factory=AdamWSpec)
    muon: MuonSpec = field(factory=MuonSpec)
    groups: dict[str, Literal["muon", "muon_no_decay", "adamw", "adamw_no_decay"]] = field(factory=dict)


@frozen
class MeshSpec:
    """Give the number of ranks along each axis: dp and ep split the rows, tp each layer, ep the experts as well.

    sequence_parallel: between the layers' halves, split the positions over tp. zero1: share the optimizer's state out
    over dp. fsdp: share the parameters and all that goes with them out over dp; a block is gathered when it runs.
    bucket_mb: gradients are reduced together, this many megabytes at a time. timeout: seconds that a rank waits for the
    others before it gives the run up.
    """

    dp: int = 1
    tp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    zero1: bool = False
    fsdp: bool = False
    bucket_mb: int = 25
    timeout: float = 300.0


@frozen
class PrecisionSpec:
    """State the dtypes of the parameters, of the products, and which leaves (path regex) compute in float32.

    bfloat16 parameters are trained through float32 master weights.
    """

    params: Literal["float32", "bfloat16"] = "float32"
    compute: Literal["float32", "bfloat16"] = "float32"
    keep_float32: list[str] = field(factory=lambda: ["norm"])


@frozen
class TrainSpec:
    """Set the loop: ``steps`` of ``batch`` rows, computed ``micro_batch`` rows at a time (None: all at once).

    remat: recompute each block in the backward pass. loss_chunk: positions whose logits exist at one time; None takes
    what fits in 32 MiB. noise_scale_every: steps between measurements of the gradient
    noise scale (McCandlish et al. 2018, arXiv 1812.06162); None measures never.
    """

    steps: int = 1000
    batch: int = 8
    micro_batch: int | None = None
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = None
    precision: PrecisionSpec = field(factory=PrecisionSpec)
    compile: bool = False
    remat: bool = False
    loss_chunk: int | None = None
    noise_scale_every: int | None = None


@frozen
class CheckpointSpec:
    """Save every ``every`` steps and at the end; keep the newest ``keep`` and each multiple of ``keep_every``.

    asynchronous: write while the next steps go on, from a copy of what each rank writes; the last save is waited for.
    """

    every: int = 100
    keep: int = 2
    keep_every: int | None = None
    asynchronous: bool = False


@frozen
class ReportSpec:
    """Watch the run. peak_flops: one device's peak in FLOP/s, for MFU; None looks a GPU up by its name or measures it.

    log_every, eval_every: in steps. eval_rows: validation rows scored each time.
    prompts: texts continued at each evaluation by ``sample_tokens`` tokens. trackers: besides metrics.jsonl.
    """

    log_every: int = 10
    eval_every: int = 100
    eval_rows: int = 64
    prompts: list[str] = field(factory=list)
    sample_tokens: int = 64
    peak_flops: float | None = None
    trackers: list[Literal["tensorboard", "wandb", "mlflow", "swanlab", "trackio"]] = field(factory=list)


@frozen
class RunSpec:
    """Describe one run, whole. ``name`` is the run's directory under ``out``."""

    name: str = "run"
    out: str = "runs"
    model: ModelSpec = field(factory=ModelSpec)
    data: DataSpec = field(factory=DataSpec)
    sft: SftSpec = field(factory=SftSpec)
    dpo: DpoSpec = field(factory=DpoSpec)
    reward: RewardSpec = field(factory=RewardSpec)
    grpo: GrpoSpec = field(factory=GrpoSpec)
    adapter: AdapterSpec = field(factory=AdapterSpec)
    optim: OptimSpec = field(factory=OptimSpec)
    mesh: MeshSpec = field(factory=MeshSpec)
    train: TrainSpec = field(factory=TrainSpec)
    checkpoint: CheckpointSpec = field(factory=CheckpointSpec)
    report: ReportSpec = field(factory=ReportSpec)
