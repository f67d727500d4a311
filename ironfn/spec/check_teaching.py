"""Check what examples and adapters need of the rest of a spec."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ironfn.spec.records import RunSpec
from ironfn.spec.structure import Path, show

_KIND, _SOURCE = ("adapter", "kind"), ("model", "init_from")


def teaching(spec: RunSpec) -> Iterator[tuple[tuple[Path, ...], str]]:
    """Yield the faults of ``adapter`` and of ``data.form``, as `spec.check` lists them."""
    data = spec.data
    if data.form != "documents" and data.tokenizer.file is None and spec.model.init_from is None:
        what = "examples are written with a model's own tokenizer; set model.init_from, or data.tokenizer.file"
        yield (("data", "form"), ("data", "tokenizer", "file"), _SOURCE), what
    if spec.adapter.kind == "none":
        if spec.adapter.base != "none":
            what = f"{spec.adapter.base} freezes the model and nothing would be trained; set adapter.kind, such as lora"
            yield (("adapter", "base"), _KIND), what
        return
    yield from _adapter(spec)
    yield from _beside(spec)


def _adapter(spec: RunSpec) -> Iterator[tuple[tuple[Path, ...], str]]:
    adapter = spec.adapter
    if spec.model.init_from is None:
        what = f"a {adapter.kind} is trained beside a model that is there already; name it in model.init_from"
        yield (_KIND, _SOURCE), what
    if not adapter.targets:
        yield (("adapter", "targets"),), "names no matrix; write [all-linear], or regexes of their paths"
    for place, pattern in enumerate(adapter.targets):
        try:
            re.compile(pattern)
        except re.error as error:
            yield (("adapter", "targets", place),), f"{show(pattern)} is not a regular expression: {error}"
    if adapter.kind != "lora":
        for name in ("dropout", "rslora", "dora", "base"):
            if getattr(adapter, name) not in (0.0, "none"):
                yield (("adapter", name), _KIND), f"is for lora alone, and adapter.kind is {adapter.kind}; leave it out"
        length = spec.data.length + adapter.tokens
        if spec.model.positions == "learned" and length > spec.model.context:
            what = f"rows of {spec.data.length} tokens and {adapter.tokens} before them are longer than the model's"
            yield (("data", "length"), ("adapter", "tokens")), f"{what} context of {spec.model.context}"


def _beside(spec: RunSpec) -> Iterator[tuple[tuple[Path, ...], str]]:
    """Refuse what looks at every parameter, or into every function."""
    if spec.train.compile:
        what = "the products of an adapter are not compiled; leave one of them out"
        yield (("train", "compile"), _KIND), what
    if spec.train.noise_scale_every is not None:
        what = "the gradient noise scale is that of a whole model; leave one of them out"
        yield (("train", "noise_scale_every"), _KIND), what
