"""Check the values of a spec: each one's range, and what has to fit together."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from types import MappingProxyType
from typing import Any

import attrs

from ironfn.spec.check_experts import experts
from ironfn.spec.check_model import model_faults
from ironfn.spec.check_policy import policy
from ironfn.spec.check_preference import preference
from ironfn.spec.check_teaching import teaching
from ironfn.spec.records import RunSpec
from ironfn.spec.structure import Path, show

Found = tuple[tuple[Path, ...], str]
"""The fields that a fault concerns, the one to name first, and what is wrong."""

Rule = tuple[Callable[[Any], bool], str]


def _at_least(low: int) -> Rule:
    return lambda value: value >= low, f"has to be at least {low}"


def _between(low: int, high: int) -> Rule:
    return lambda value: low <= value <= high, f"has to lie between {low} and {high}"


ABOVE_ZERO: Rule = (lambda value: value > 0, "has to be above 0")
NOT_NEGATIVE: Rule = (lambda value: value >= 0, "cannot be negative")
SHARE: Rule = (lambda value: 0 <= value <= 1, "has to lie between 0 and 1")
ABOVE_ZERO_TO_ONE: Rule = (lambda value: 0 < value <= 1, "has to be above 0 and at most 1")
BELOW_ONE: Rule = (lambda value: 0 <= value < 1, "has to be at least 0 and below 1")
WRITTEN: Rule = (lambda value: bool(value.strip()) and "\0" not in value, "cannot be empty")
ONE_NAME: Rule = (
    lambda value: re.fullmatch(r"[\w.+-]{1,100}", value) is not None and value not in (".", ".."),
    "has to be the name of one directory: up to 100 letters, digits, . _ + -",
)

RANGES: MappingProxyType[str, Rule] = MappingProxyType(
    {
        "name": ONE_NAME,
        "out": WRITTEN,
        "model.vocab_size": _at_least(1),
        "model.pad_vocab_to": _at_least(1),
        "model.width": _at_least(1),
        "model.layers": _between(1, 10_000),
        "model.heads": _at_least(1),
        "model.kv_heads": _at_least(1),
        "model.head_dim": _at_least(1),
        "model.ffn": _at_least(1),
        "model.context": _at_least(1),
        "model.norm_eps": ABOVE_ZERO,
        "model.rope_theta": ABOVE_ZERO,
        "model.rope_fraction": ABOVE_ZERO_TO_ONE,
        "model.rope_local_theta": ABOVE_ZERO,
        "model.rope.factor": _at_least(1),
        "model.rope.original_context": _at_least(1),
        "model.rope.low_freq_factor": ABOVE_ZERO,
        "model.rope.high_freq_factor": ABOVE_ZERO,
        "model.rope.beta_fast": ABOVE_ZERO,
        "model.rope.beta_slow": ABOVE_ZERO,
        "model.rope.attention_factor": ABOVE_ZERO,
        "model.windows": (lambda value: all(n >= 0 for n in value), "cannot hold a negative window"),
        "model.attention_scale": ABOVE_ZERO,
        "model.attention_softcap": ABOVE_ZERO,
        "model.attention_clip": ABOVE_ZERO,
        "model.logit_softcap": ABOVE_ZERO,
        "model.dropout": BELOW_ONE,
        "model.init_std": ABOVE_ZERO,
        "model.moe.experts": NOT_NEGATIVE,
        "model.moe.top_k": _at_least(1),
        "model.moe.ffn": _at_least(1),
        "model.moe.shared": NOT_NEGATIVE,
        "model.moe.shared_ffn": _at_least(1),
        "model.moe.dense_layers": NOT_NEGATIVE,
        "model.moe.every": _at_least(1),
        "model.moe.groups": _at_least(1),
        "model.moe.group_top_k": _at_least(1),
        "model.moe.scale": ABOVE_ZERO,
        "model.moe.balance_weight": NOT_NEGATIVE,
        "model.moe.bias_rate": NOT_NEGATIVE,
        "model.moe.z_weight": NOT_NEGATIVE,
        "model.moe.jitter": BELOW_ONE,
        "model.moe.capacity": ABOVE_ZERO,
        "data.dir": WRITTEN,
        "data.tokenizer.vocab_size": _at_least(1),
        "data.split.validation": BELOW_ONE,
        "data.split.test": BELOW_ONE,
        "data.length": _at_least(1),
        "data.temperature": ABOVE_ZERO,
        "data.workers": _at_least(1),
        "adapter.rank": _at_least(1),
        "adapter.alpha": ABOVE_ZERO,
        "adapter.dropout": BELOW_ONE,
        "adapter.tokens": _at_least(1),
        "dpo.beta": ABOVE_ZERO,
        "dpo.smoothing": BELOW_ONE,
        "dpo.margin": NOT_NEGATIVE,
        "dpo.supervised": NOT_NEGATIVE,
        "dpo.liked": NOT_NEGATIVE,
        "dpo.disliked": NOT_NEGATIVE,
        "reward.center": NOT_NEGATIVE,
        "grpo.prompts": _at_least(1),
        "grpo.group": _at_least(2),
        "grpo.tokens": _at_least(1),
        "grpo.temperature": ABOVE_ZERO,
        "grpo.epochs": _at_least(1),
        "grpo.batches": _at_least(1),
        "grpo.refill": NOT_NEGATIVE,
        "grpo.low": BELOW_ONE,
        "grpo.high": NOT_NEGATIVE,
        "grpo.dual": _at_least(1),
        "grpo.kl_weight": NOT_NEGATIVE,
        "grpo.entropy": NOT_NEGATIVE,
        "grpo.overlong": NOT_NEGATIVE,
        "grpo.tries": NOT_NEGATIVE,
        "grpo.truncated_share": ABOVE_ZERO_TO_ONE,
        "optim.lr": ABOVE_ZERO,
        "optim.clip": ABOVE_ZERO,
        "optim.schedule.warmup": NOT_NEGATIVE,
        "optim.schedule.final": SHARE,
        "optim.schedule.decay_steps": NOT_NEGATIVE,
        "optim.schedule.power": ABOVE_ZERO,
        "optim.adamw.beta1": BELOW_ONE,
        "optim.adamw.beta2": BELOW_ONE,
        "optim.adamw.eps": ABOVE_ZERO,
        "optim.adamw.weight_decay": NOT_NEGATIVE,
        "optim.muon.momentum": BELOW_ONE,
        "optim.muon.steps": _at_least(1),
        "optim.muon.weight_decay": NOT_NEGATIVE,
        "optim.muon.lr_factor": ABOVE_ZERO,
        "mesh.dp": _at_least(1),
        "mesh.tp": _at_least(1),
        "mesh.ep": _at_least(1),
        "mesh.bucket_mb": _at_least(1),
        "mesh.timeout": _between(1, 1_000_000),
        "train.steps": _at_least(1),
        "train.batch": _between(1, 1 << 24),
        "train.micro_batch": _at_least(1),
        "train.seed": NOT_NEGATIVE,
        "train.threads": _between(1, 4096),
        "train.loss_chunk": _at_least(1),
        "train.noise_scale_every": _at_least(1),
        "checkpoint.every": _at_least(1),
        "checkpoint.keep": _at_least(1),
        "checkpoint.keep_every": _at_least(1),
        "report.log_every": _at_least(1),
        "report.eval_every": _at_least(1),
        "report.eval_rows": _at_least(1),
        "report.sample_tokens": _at_least(1),
        "report.peak_flops": ABOVE_ZERO,
    }
)
"""What each number and name has to satisfy; None, where a field allows it, always does."""

SET_RANGES: MappingProxyType[str, Rule] = MappingProxyType(
    {"text": WRITTEN, "weight": NOT_NEGATIVE, "fim.rate": SHARE, "fim.spm_rate": SHARE}
)
"""The same for each set of ``data.sets``."""


def check(spec: RunSpec, ranks: int | None) -> list[Found]:
    """List the values of ``spec`` that cannot be meant. ranks: the processes there are, or None where that is open."""
    alone = list(_ranges(spec))
    bad = {paths[0] for paths, _ in alone}
    together: list[Found] = []
    for rule in (_model, experts, _data, teaching, preference, policy, _optim, _mesh, _train):
        try:
            together += rule(spec)
        except ArithmeticError:  # a zero that the ranges already refuse
            assert bad
    if ranks is not None:
        together += _world(spec, ranks)
    return alone + [found for found in together if bad.isdisjoint(found[0])]


def _at(value: Any, path: Path) -> Any:
    for name in path:
        value = value[name] if isinstance(value, dict) else getattr(value, str(name))
    return value


def _path(dotted: str) -> Path:
    return tuple(dotted.split("."))


def _ranges(spec: RunSpec) -> Iterator[Found]:
    places = [(_path(name), rule) for name, rule in RANGES.items()]
    places += [
        (("data", "sets", each, *_path(name)), rule) for each in spec.data.sets for name, rule in SET_RANGES.items()
    ]
    for path, (holds, what) in places:
        value = _at(spec, path)
        if value is not None and not holds(value):
            yield (path,), f"{show(value)} {what}"


def _regexes(section: Path, regexes: Iterable[tuple[str | int, str]]) -> Iterator[Found]:
    for place, regex in regexes:
        try:
            re.compile(regex)
        except re.error as error:
            yield ((*section, place),), f"{show(regex)} is not a regular expression: {error}"


def _model(spec: RunSpec) -> Iterator[Found]:
    model = spec.model
    yield from model_faults(model)
    trains = spec.data.tokenizer.file is None and spec.data.form == "documents"
    trained = spec.data.tokenizer.vocab_size if trains else 0
    if model.vocab_size is not None and model.vocab_size < trained:
        what = f"{model.vocab_size} ids are too few for the tokenizer's {trained} (data.tokenizer.vocab_size)"
        what += "" if model.init_from is None else f"; name the tokenizer of {model.init_from} in data.tokenizer.file"
        yield (("model", "vocab_size"), ("data", "tokenizer", "vocab_size")), what
    if spec.data.length > model.context:
        what = f"rows of {spec.data.length} tokens are longer than the model's context of {model.context}"
        yield (("data", "length"), ("model", "context")), what


def _data(spec: RunSpec) -> Iterator[Found]:
    data, sets = spec.data, ("data", "sets")
    if not data.sets:
        yield (sets,), "names no set; give at least one, such as `stdlib: {sources: ['stdlib:']}`"
    for name, each in data.sets.items():
        if not ONE_NAME[0](name):
            yield ((*sets, name),), f"{show(name)} {ONE_NAME[1]}"
        if not each.sources:
            yield ((*sets, name, "sources"),), "names no source; give files, directories, globs or 'stdlib:'"
        for place, source in enumerate(each.sources):
            if not WRITTEN[0](source):
                yield ((*sets, name, "sources", place),), f"{show(source)} {WRITTEN[1]}"
    if data.sets and data.temperature is None and not any(each.weight > 0 for each in data.sets.values()):
        yield tuple((*sets, name, "weight") for name in data.sets), "every set has weight 0"
    if data.split.validation + data.split.test >= 1:
        what = f"validation {data.split.validation:g} and test {data.split.test:g} leave nothing to train on"
        yield (("data", "split", "validation"), ("data", "split", "test")), what
    if data.tokenizer.kind == "bpe" and data.tokenizer.file is None and data.tokenizer.vocab_size < 260:
        what = f"{data.tokenizer.vocab_size} ids are too few for a byte-level BPE: 256 bytes and the special tokens"
        yield (("data", "tokenizer", "vocab_size"), ("data", "tokenizer", "kind")), what


def _optim(spec: RunSpec) -> Iterator[Found]:
    schedule, steps, at = spec.optim.schedule, spec.train.steps, ("optim", "schedule")
    warmup, decay, total = (*at, "warmup"), (*at, "decay_steps"), ("train", "steps")
    if schedule.warmup > steps:
        yield (warmup, total), f"{schedule.warmup} steps of warm-up are more than the {steps} of train.steps"
    elif schedule.kind == "wsd" and schedule.warmup + schedule.decay_steps > steps:
        what = (
            f"{schedule.decay_steps} steps of decay after {schedule.warmup} of warm-up pass the {steps} of train.steps"
        )
        yield (decay, warmup, total), what
    if schedule.kind != "wsd" and schedule.decay_steps:
        what = f"only wsd has a last phase; {schedule.kind} takes the whole run"
        yield (decay, (*at, "kind")), what
    yield from _regexes(("optim", "groups"), ((regex, regex) for regex in spec.optim.groups))


def _mesh(spec: RunSpec) -> Iterator[Found]:
    mesh, model = spec.mesh, spec.model
    for name in ("heads", "kv_heads", "ffn"):
        size: int | None = getattr(model, name)
        if size is not None and size % mesh.tp:
            yield (("mesh", "tp"), ("model", name)), f"{mesh.tp} ranks cannot share {size} {name} evenly (model.{name})"
    rows = -(-(model.vocab_size or 0) // model.pad_vocab_to) * model.pad_vocab_to  # without vocab_size, the data tell
    if rows % mesh.tp:
        what = f"{mesh.tp} ranks cannot share {rows} rows of the vocabulary evenly; set model.pad_vocab_to to {mesh.tp}"
        yield (("mesh", "tp"), ("model", "vocab_size"), ("model", "pad_vocab_to")), what
    if mesh.sequence_parallel and mesh.tp == 1:
        what = "the positions are shared out over tp, and mesh.tp is 1; raise it, or leave this out"
        yield (("mesh", "sequence_parallel"), ("mesh", "tp")), what
    if mesh.fsdp and mesh.zero1:
        what = "fsdp shares the optimizer's state out already; leave zero1 out"
        yield (("mesh", "zero1"), ("mesh", "fsdp")), what
    if mesh.sequence_parallel and spec.data.length % mesh.tp:
        what = f"{mesh.tp} ranks cannot share the positions of rows of {spec.data.length} tokens evenly"
        yield (("mesh", "sequence_parallel"), ("data", "length"), ("mesh", "tp")), what
    yield from _whole_only(spec)
    if spec.data.form != "prompts" and spec.train.batch % (mesh.dp * mesh.ep):
        what = f"{mesh.dp * mesh.ep} ranks (dp x ep) cannot share {spec.train.batch} rows evenly"
        yield (("train", "batch"), ("mesh", "dp"), ("mesh", "ep")), what


def _whole_only(spec: RunSpec) -> Iterator[Found]:
    """Refuse what needs every parameter whole on each rank, and no exchange inside the model, on other meshes."""
    mesh, train = spec.mesh, spec.train
    split = next((name for name in ("tp", "ep") if getattr(mesh, name) > 1), "fsdp" if mesh.fsdp else None)
    if train.compile and split is not None:
        what = f"a compiled model cannot exchange anything between ranks; take mesh.{split} out, or this"
        yield (("train", "compile"), ("mesh", split)), what
    if train.noise_scale_every is not None and split is not None:
        what = f"the gradient of single rows cannot be had with mesh.{split}; leave one of them out"
        yield (("train", "noise_scale_every"), ("mesh", split)), what


def _train(spec: RunSpec) -> Iterator[Found]:
    train, mesh = spec.train, spec.mesh
    rows, split = divmod(train.batch, mesh.dp * mesh.ep)
    if spec.data.form != "prompts" and train.micro_batch is not None and not split and rows % train.micro_batch:
        divisors = [n for n in range(1, min(rows, 4096) + 1) if rows % n == 0]
        near = min(divisors, key=lambda n: abs(n - (train.micro_batch or 1)))
        what = f"{train.micro_batch} rows at a time do not divide the batch's {rows} rows a rank; write {near}"
        yield (("train", "micro_batch"), ("train", "batch"), ("mesh", "dp"), ("mesh", "ep")), what
    for place, prompt in enumerate(spec.report.prompts):
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            yield (("report", "prompts", place),), "holds half of a surrogate pair, which is no Unicode text"
    keep_float32 = ("train", "precision", "keep_float32")
    yield from _regexes(keep_float32, enumerate(train.precision.keep_float32))
    every, keep_every = spec.checkpoint.every, spec.checkpoint.keep_every
    if keep_every is not None and keep_every % every:
        what = f"{keep_every} is no multiple of checkpoint.every, {every}: no checkpoint would fall on it"
        yield (("checkpoint", "keep_every"), ("checkpoint", "every")), what


def _world(spec: RunSpec, ranks: int) -> Iterator[Found]:
    sizes = attrs.asdict(spec.mesh)
    axes = {name: sizes[name] for name in ("dp", "tp", "ep")}
    if math.prod(axes.values()) != ranks:
        shape = " x ".join(f"{name} {size}" for name, size in axes.items())
        remedy = f"start them with `torchrun --nproc-per-node {math.prod(axes.values())} -m ironfn …`"
        rest = math.prod(axes.values()) // axes["dp"]
        remedy += f", or set mesh.dp to {ranks // rest}" if ranks % rest == 0 else ""
        yield (("mesh",),), f"{shape} needs {math.prod(axes.values())} processes and {ranks} run here; {remedy}"
