"""Check what a mixture of experts needs of the rest of a spec."""

from __future__ import annotations

from collections.abc import Iterator

from ironfn.spec.records import RunSpec
from ironfn.spec.structure import Path

_AT = ("model", "moe")
_EXPERTS, _TOP_K, _BALANCE = (*_AT, "experts"), (*_AT, "top_k"), (*_AT, "balance")


def experts(spec: RunSpec) -> Iterator[tuple[tuple[Path, ...], str]]:
    """Yield the faults of ``model.moe`` and of what does not go with it, as `spec.check` lists them."""
    moe, mesh = spec.model.moe, spec.mesh
    if moe.experts == 0:
        if mesh.ep > 1:
            what = f"{mesh.ep} ranks have no experts to share; set model.moe.experts, or use mesh.dp for the rows"
            yield (("mesh", "ep"), _EXPERTS), what
        return
    yield from _shapes(spec)
    yield from _routing(spec)
    if spec.train.compile:
        what = "rows are sorted by expert, and how many each gets only the data know: no graph can be compiled"
        yield (("train", "compile"), _EXPERTS), f"{what}; leave one of them out"
    if moe.balance == "batch":
        if spec.train.micro_batch is not None:
            what = "the balance of the whole batch cannot be had from a part of it; use `sequence`, or all rows at once"
            yield (_BALANCE, ("train", "micro_batch")), what
        if spec.train.noise_scale_every is not None:
            what = "the balance of the whole batch has no gradient of single rows; use `sequence`, or do not measure it"
            yield (_BALANCE, ("train", "noise_scale_every")), what


def _shapes(spec: RunSpec) -> Iterator[tuple[tuple[Path, ...], str]]:
    moe, mesh = spec.model.moe, spec.mesh
    if moe.experts % mesh.ep:
        what = f"{mesh.ep} ranks cannot share {moe.experts} experts evenly (model.moe.experts)"
        yield (("mesh", "ep"), _EXPERTS), what
    for name, ffn in (("ffn", moe.ffn), ("shared_ffn", moe.shared_ffn)):
        if ffn is not None and ffn % mesh.tp:
            what = f"{mesh.tp} ranks cannot share an expert's ffn of {ffn} evenly (model.moe.{name})"
            yield (("mesh", "tp"), (*_AT, name)), what


def _routing(spec: RunSpec) -> Iterator[tuple[tuple[Path, ...], str]]:
    moe, renormalize = spec.model.moe, (*_AT, "renormalize")
    chosen = moe.score == "softmax_chosen"
    if chosen and not moe.renormalize:
        what = "the softmax over the chosen ones sums to 1 already; use score `softmax` for weights that do not"
        yield (renormalize, (*_AT, "score")), what
    elif moe.top_k == 1 and moe.renormalize and moe.experts > 1:
        what = "one choice whose weights sum to 1 weighs 1 always, and the router learns nothing from the text; "
        what += "use score `softmax` or `sigmoid` and write `renormalize: false`"
        yield (_TOP_K, renormalize, (*_AT, "score")), what
