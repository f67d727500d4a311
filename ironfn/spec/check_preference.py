"""Check what pairs and judged completions need of the rest of a spec."""

from __future__ import annotations

from collections.abc import Iterator

from ironfn.spec.records import RunSpec
from ironfn.spec.structure import Path

_FORM, _OBJECTIVE, _SCORE = ("data", "form"), ("dpo", "objective"), ("model", "score")


def preference(spec: RunSpec) -> Iterator[tuple[tuple[Path, ...], str]]:
    """Yield the faults of ``dpo`` and ``model.score``, as `spec.check` lists them."""
    if spec.data.form not in ("pairs", "judged"):
        if spec.model.score:
            what = f"a reward is learned from pairs, and data.form is {spec.data.form}; set it to pairs"
            yield (_FORM, _SCORE), what
        return
    yield from _of_both(spec)
    yield from _of_a_reward(spec) if spec.model.score else _of_a_policy(spec)


def shared_rows(spec: RunSpec) -> Iterator[tuple[tuple[Path, ...], str]]:
    """Yield what does not go with rows in which texts share their beginning."""
    if spec.adapter.kind in ("prefix", "prompt"):
        what = f"texts that share a row have no {spec.adapter.kind} of their own; set adapter.kind to lora"
        yield (("adapter", "kind"), _FORM), what
    if spec.train.compile:
        yield (("train", "compile"), _FORM), "texts that share a row are not compiled; leave one of them out"
    rope, length = spec.model.rope, spec.data.length
    if rope.kind in ("dynamic", "longrope") and length > (rope.original_context or spec.model.context):
        what = f"angles of {rope.kind} depend on a text's length, which texts of one row do not have in common; "
        yield (("data", "length"), ("model", "rope", "kind")), what + "make rows as short as the original context"


def _of_both(spec: RunSpec) -> Iterator[tuple[tuple[Path, ...], str]]:
    yield from shared_rows(spec)
    if spec.train.noise_scale_every is not None:
        what = "the gradient noise scale is that of rows, not of pairs; leave one of them out"
        yield (("train", "noise_scale_every"), _FORM), what
    if spec.sft.overlong == "split":
        yield (("sft", "overlong"), _FORM), "split would part a pair; truncate or drop those that are too long"


def _of_a_reward(spec: RunSpec) -> Iterator[tuple[tuple[Path, ...], str]]:
    if spec.data.form == "judged":
        yield (_FORM, _SCORE), "a reward is learned from pairs, not from judged completions; set data.form to pairs"
    if spec.report.prompts:
        what = "a model that ends in a reward writes nothing; leave the prompts out"
        yield (("report", "prompts"), _SCORE), what


def _of_a_policy(spec: RunSpec) -> Iterator[tuple[tuple[Path, ...], str]]:
    dpo = spec.dpo
    if (dpo.objective == "kto") != (spec.data.form == "judged"):
        what = f"{dpo.objective} does not learn from {spec.data.form}; kto is for judged, the others are for pairs"
        yield (_OBJECTIVE, _FORM), what
    if dpo.smoothing and dpo.objective not in ("dpo", "robust"):
        yield (("dpo", "smoothing"), _OBJECTIVE), f"has no effect on {dpo.objective}; leave it out"
    if dpo.objective == "robust" and not 0 < dpo.smoothing < 0.5:
        yield (("dpo", "smoothing"), _OBJECTIVE), f"{dpo.smoothing:g}: robust wants a share above 0 and below 1/2"
    if dpo.supervised and dpo.objective == "kto":
        yield (("dpo", "supervised"), _OBJECTIVE), "is for pairs, and kto has none; leave it out"
    if dpo.refers and dpo.reference is None and spec.model.init_from is None:
        what = f"{dpo.objective} holds a policy to a reference; set model.init_from, or dpo.reference"
        yield (("dpo", "reference"), ("model", "init_from")), what
    for name, idle in (("reference", dpo.reference is not None), ("precompute", dpo.precompute)):
        if idle and not dpo.refers:
            yield (("dpo", name), _OBJECTIVE), f"{dpo.objective} knows no reference; leave it out"
    if dpo.objective == "kto" and spec.train.micro_batch is not None:
        what = "kto's baseline is one number of the whole batch, which micro-batches would part; leave one of them out"
        yield (("train", "micro_batch"), _OBJECTIVE), what
