"""Sort parameters into the groups {Muon, AdamW} x {decay, no decay}, and build a run's optimizer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from attrs import frozen

from ironfn import tree
from ironfn.layout.buckets import BUCKET_BYTES
from ironfn.layout.table import WHOLE_TABLE, Placement, Table
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.optim.adamw import adamw
from ironfn.optim.combine import master_weights, partition
from ironfn.optim.muon import jordan, moonshot, muon
from ironfn.optim.newton_schulz import operations
from ironfn.optim.optimizer import Optimizer, scale_lr
from ironfn.optim.zero1 import zero1
from ironfn.spec.records import OptimSpec
from ironfn.types import Params

LABELS = ("muon", "muon_no_decay", "adamw", "adamw_no_decay")

Shapes = Mapping[str, Sequence[int]]
"""From a leaf's path to its shape."""

_NEVER_MUON = re.compile(r"(^|[/._])(embed\w*|wte|wpe|head|score|\w*_head|shared_gate|lora\w*|\w*_lora)([/._]|$)")
"""Matrices that are no map between hidden states: tables of embeddings, output heads, one column, low-rank factors."""

_STACK = re.compile(r"(^|/)experts/[^/]+$")
"""Leaves [experts, in, out]: matrices side by side. Any other leaf of three dimensions is something else."""

_NUMBER = re.compile(r"(?<![^/.])\d+(?![^/.])")
"""A component of a path that is a number: a layer's, an expert's."""


def shapes_of(params: Params) -> dict[str, tuple[int, ...]]:
    """Return the shape of every leaf by path."""
    return {path: tuple(p.shape) for path, p in tree.flatten(params).items()}


def labels_of(spec: OptimSpec, shapes: Shapes) -> dict[str, str]:
    """Return the label of every leaf: one of ``LABELS``.

    The first pattern of ``spec.groups`` that is found in a path decides (`re.search`). Otherwise norms and biases,
    which have fewer than two dimensions, go to AdamW without decay, and the rest decays: by Muon, if ``spec.name`` is
    muon, where it is a matrix from hidden states to hidden states, by AdamW elsewhere. So embeddings and heads are left
    to AdamW and do decay, as in nanoGPT's GPT-2; a tied table is one leaf and is updated once.

    A stack of experts' matrices [experts, in, out] counts as matrices.

    ValueError for a pattern that is no regex or is found nowhere, and for Muon on a leaf that is neither.
    """
    patterns = {text: _compile(text) for text in spec.groups}
    unused, labels = set(patterns), dict[str, str]()
    for path, shape in shapes.items():
        found = [text for text, pattern in patterns.items() if pattern.search(path)]
        unused.difference_update(found)
        labels[path] = label = spec.groups[found[0]] if found else _default(spec.name, path, shape)
        if label.startswith("muon") and not _are_matrices(path, shape):
            raise ValueError(
                f"optim.groups: {found[0]!r} gives {path!r} of shape {tuple(shape)} to {label}, which takes matrices"
            )
    if unused:
        raise ValueError(f"optim.groups: no parameter's path has {sorted(unused)} in it; see `ironfn optim groups`")
    return labels


def _compile(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"optim.groups: {text!r} is not a regular expression: {error}") from error


def _default(name: str, path: str, shape: Sequence[int]) -> str:
    if len(shape) < 2:
        return "adamw_no_decay"
    return "muon" if name == "muon" and _are_matrices(path, shape) and not _NEVER_MUON.search(path) else "adamw"


def _are_matrices(path: str, shape: Sequence[int]) -> bool:
    return len(shape) == 2 or (len(shape) == 3 and _STACK.search(path) is not None)


def whole_work(spec: OptimSpec, shapes: Shapes) -> dict[str, float]:
    """Return the leaves that Muon moves, each with the operations that it takes: see `layout.zero.share_updates`."""
    work: dict[str, float] = {}
    for path, label in labels_of(spec, shapes).items():
        if label.startswith("muon"):
            *stack, rows, columns = shapes[path]
            work[path] = float(operations(rows, columns, spec.muon.steps) * torch.Size(stack).numel())
    return work


def make_optimizer(
    spec: OptimSpec,
    params: Params,
    *,
    table: Table = WHOLE_TABLE,
    mesh: Mesh = SINGLE,
    updates: Mapping[str, Placement] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Optimizer:
    """Return the optimizer that ``spec`` describes for these parameters, of which it looks at shapes and dtypes only.

    Its state is {label: state} of the groups in use; where some parameters are in half precision, that is the ``inner``
    of `master_weights`. On a mesh: table says how the parameters are cut; with ``updates``, from
    ``share_updates(table, shapes, mesh, whole_work(spec, shapes))``, each rank moves its share of them alone (`zero1`).
    ValueError as `labels_of`.
    """
    labels = labels_of(spec, shapes_of(params))
    optimizer = partition(_optimizers(spec, table if updates is None else updates, mesh), labels.__getitem__)
    if any(p.dtype.itemsize < 4 for p in tree.leaves(params)):
        optimizer = master_weights(optimizer)
    return optimizer if updates is None else zero1(optimizer, table, updates, mesh, bucket_bytes)


def _optimizers(spec: OptimSpec, layout: Table, mesh: Mesh) -> dict[str, Optimizer]:
    a, m = spec.adamw, spec.muon
    scale, precision = {"jordan": jordan, "moonshot": moonshot}[m.scale], getattr(torch, m.precision)

    def one_adamw(weight_decay: float) -> Optimizer:
        return adamw(a.beta1, a.beta2, a.eps, weight_decay)

    def one_muon(weight_decay: float) -> Optimizer:
        one = muon(m.momentum, m.nesterov, m.steps, weight_decay, scale, precision, layout, mesh)
        return scale_lr(one, m.lr_factor)

    return {
        "muon": one_muon(m.weight_decay),
        "muon_no_decay": one_muon(0.0),
        "adamw": one_adamw(a.weight_decay),
        "adamw_no_decay": one_adamw(0.0),
    }


@frozen
class Group:
    """Describe the leaves of one label whose paths differ only in their layer's number.

    paths: in order. pattern: their common form, with ``*`` for the number. state_bytes: without the group's count.
    """

    label: str
    pattern: str
    paths: tuple[str, ...]
    shape: tuple[int, ...]
    numbers: int
    state_bytes: int


def groups_table(spec: OptimSpec, shapes: Shapes, dtype: torch.dtype = torch.float32) -> list[Group]:
    """Return what `make_optimizer` does with each leaf, in the order of ``LABELS`` and folded over the layers.

    dtype: of the parameters. The state holds one float32 number for each of Muon's and two for each of AdamW's, and one
    more where the parameter is in half precision and has a master copy.
    """
    folded: dict[tuple[str, str, tuple[int, ...]], list[str]] = {}
    for path, label in labels_of(spec, shapes).items():
        folded.setdefault((label, _NUMBER.sub("*", path), tuple(shapes[path])), []).append(path)
    rows: list[Group] = []
    for (label, pattern, shape), paths in sorted(folded.items(), key=lambda item: LABELS.index(item[0][0])):
        numbers = len(paths) * torch.Size(shape).numel()
        copies = (1 if label.startswith("muon") else 2) + (dtype.itemsize < 4)
        rows.append(Group(label, pattern, tuple(paths), shape, numbers, numbers * copies * max(4, dtype.itemsize)))
    return rows
