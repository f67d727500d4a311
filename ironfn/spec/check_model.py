"""Check what the numbers of a model need of each other, whoever asks: a run's spec, or a program."""

from __future__ import annotations

from collections.abc import Iterator

from ironfn.spec.records import ModelSpec
from ironfn.spec.structure import Path

Faults = Iterator[tuple[tuple[Path, ...], str]]
"""The fields that a fault concerns, the one to name first, and what is wrong."""


def _at(*names: str) -> tuple[Path, ...]:
    return tuple(("model", *name.split(".")) for name in names)


def model_faults(model: ModelSpec) -> Faults:
    """Yield what of a model cannot be meant, as `spec.check` lists it. The ranges of single values hold already."""
    if model.kv_heads is not None and model.heads % model.kv_heads:
        what = f"{model.heads} heads cannot share {model.kv_heads} key/value heads evenly"
        yield _at("kv_heads", "heads"), what
    if model.head_dim is None and model.width % model.heads:
        what = f"{model.heads} heads do not divide the width {model.width}; or give model.head_dim"
        yield _at("heads", "width"), what
    if model.norm_offset and model.norm == "layer":
        what = "1 + scale is a form of the rms norm; leave it out, or set model.norm to rms"
        yield _at("norm_offset", "norm"), what
    if model.post_norms and model.parallel:
        what = "the halves of a parallel block are added at once, with no norm between; leave one of them out"
        yield _at("post_norms", "parallel"), what
    if not model.pre_norms and not model.post_norms:
        what = "a block needs norms before its halves, or after them (model.post_norms)"
        yield _at("pre_norms", "post_norms"), what
    if model.parallel_norms and not model.parallel:
        what = "each half has a norm of its own anyway, but in a parallel block (model.parallel); leave it out"
        yield _at("parallel_norms", "parallel"), what
    if model.attention_softcap is not None and model.positions == "alibi":
        what = "no model caps scores that alibi has changed; leave one of them out"
        yield _at("attention_softcap", "positions"), what
    yield from _rotary(model)
    if model.moe.experts:
        yield from _experts(model)
        yield from _groups(model)


def _rotary(model: ModelSpec) -> Faults:
    rope = model.rope
    if model.positions != "rotary":
        if rope.kind != "none":
            what = f"there are no angles to stretch with positions {model.positions}; leave it out"
            yield _at("rope.kind", "positions"), what
        return
    head_dim = model.head_dim or model.width // model.heads
    turned = int(head_dim * model.rope_fraction)
    if turned % 2 or not turned:
        what = f"rotary positions turn pairs, and {turned} is {'odd' if turned else 'none'}"
        yield _at(*(["rope_fraction"] if model.rope_fraction < 1 else []), "head_dim", "heads", "width"), what
    if rope.kind == "dynamic" and turned == 2:
        yield _at("rope.kind", "head_dim"), "dynamic scaling needs more than one pair of numbers to turn"
    if rope.kind == "longrope":
        for name, factors in (("short_factor", rope.short_factor), ("long_factor", rope.long_factor)):
            if len(factors) != turned // 2:
                what = f"longrope wants one number for each of {turned // 2} pairs, and here are {len(factors)}"
                yield _at(f"rope.{name}", "head_dim"), what
            elif min(factors) <= 0:
                yield _at(f"rope.{name}"), f"{min(factors)} has to be above 0"


def _experts(model: ModelSpec) -> Faults:
    moe = model.moe
    if moe.top_k > moe.experts:
        what = f"{moe.top_k} choices are more than the {moe.experts} experts (model.moe.experts)"
        yield _at("moe.top_k", "moe.experts"), what
    if odd := [n for n in moe.dense_at if not 0 <= n < model.layers]:
        yield _at("moe.dense_at", "layers"), f"there is no block {odd[0]} among {model.layers} (model.layers), from 0"
    if not any((n + 1) % moe.every == 0 and n not in moe.dense_at for n in range(moe.dense_layers, model.layers)):
        what = f"{moe.dense_layers} dense layers of {model.layers} (model.layers) leave none with experts"
        if moe.dense_at:
            what += ", as those of model.moe.dense_at are dense, too"
        if moe.every > 1:
            what += f", as only every {moe.every}th can be (model.moe.every)"
        yield _at("moe.dense_layers", "moe.every", "moe.dense_at", "layers"), what
    if model.mlp_bias:
        what = "experts have no biases; write `mlp_bias: false`, also where the preset sets it"
        yield _at("mlp_bias", "moe.experts"), what
    for name, given in (("shared_ffn", moe.shared_ffn is not None), ("shared_gate", moe.shared_gate)):
        if given and moe.shared == 0:
            yield _at(f"moe.{name}", "moe.shared"), "there is no shared expert (model.moe.shared); leave it out"


def _groups(model: ModelSpec) -> Faults:
    moe = model.moe
    if moe.experts % moe.groups:
        what = f"{moe.groups} groups cannot share {moe.experts} experts evenly (model.moe.experts)"
        yield _at("moe.groups", "moe.experts"), what
    elif moe.group_top_k > moe.groups:
        what = f"{moe.group_top_k} groups to choose are more than there are (model.moe.groups {moe.groups})"
        yield _at("moe.group_top_k", "moe.groups"), what
    elif (room := moe.experts // moe.groups * moe.group_top_k) < moe.top_k <= moe.experts:
        what = f"the chosen groups hold {room} experts, and a token wants {moe.top_k} (model.moe.top_k)"
        yield _at("moe.group_top_k", "moe.top_k", "moe.groups", "moe.experts"), what
