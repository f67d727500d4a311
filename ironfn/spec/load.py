"""Load the spec of a run from YAML files and overrides, or say everything that is wrong with it at once."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path as File
from typing import Any, cast, get_origin

from cattrs import Converter

from ironfn.spec.check import check
from ironfn.spec.dump import dump_spec
from ironfn.spec.errors import Fault, Place, SpecError
from ironfn.spec.hints import hint, matches
from ironfn.spec.nodes import Node, Refused, parse, read
from ironfn.spec.records import ModelSpec, RunSpec
from ironfn.spec.structure import Path, Wrong, converter, fields_of, show, structure

__all__ = ["dump_spec", "load_spec"]

Section = Mapping[str, object]
Presets = Mapping[str, Section]

MAX_HINTS = 40
"""Guessing what a key was meant to be takes time; a file with more faults than this is not a spec."""


def load_spec(
    files: Sequence[File],
    overrides: Sequence[str],
    presets: Presets,
    ranks: int | None = None,
    origin: Callable[[str], Section] = lambda source: {},
) -> RunSpec:
    """Return the spec that the files describe, each overriding those before it, and the overrides all of them.

    overrides: ``optim.lr=1e-4``, the value in YAML. presets: family name -> the fields of ``model`` that it sets where
    the files do not. ranks: how many processes the mesh has to fill; None leaves that open. origin:
    ``model.init_from`` -> the fields of the model there, which count where the files set none; ValueError is a fault.
    Raise `SpecError` with every fault of every file, each with its place and a remedy.
    """
    faults: list[Fault] = []
    sources = [Node({}, Place(0, str(files[0]) if files else "spec")), *_sources(files, overrides, faults)]
    whole = len(sources) == 1 + len(files) + len(overrides)
    fields, strict = fields_of(RunSpec), converter()
    for source in sources:
        faults += _misfits(source, fields, strict)
    merged = functools.reduce(overlay, sources)
    data = merged.plain()
    faults += _fill_origin(data, merged, origin)
    faults += _fill_preset(data, merged, presets)
    spec, wrongs = _settle(data, fields, strict)
    faults += [Fault(_place(merged, w.path), _dotted(w.path), w.what) for w in wrongs if w.kind == "missing"]
    for paths, what in check(spec, ranks):
        given = [path for path in paths if _given(merged, path)]
        sure = whole or len(given) == len(paths) == 1  # what stands in a file that cannot be read may change the rest
        if sure and not any(_overlap(path, wrong.path) for path in paths for wrong in wrongs):
            faults.append(Fault(_place(merged, (given or list(paths))[0]), _dotted(paths[0]), what))
    if faults:
        raise SpecError(faults)
    return spec


def overlay(base: Node, top: Node) -> Node:
    """Lay one tree over another: mappings join key by key, everything else is replaced."""
    if top.value is None and isinstance(base.value, dict):
        return base
    if not isinstance(base.value, dict) or not isinstance(top.value, dict):
        return top
    joined = dict(base.value)
    for key, (place, node) in top.value.items():
        joined[key] = (place, overlay(joined[key][1], node) if key in joined else node)
    return Node(joined, top.place)


def _sources(files: Sequence[File], overrides: Sequence[str], faults: list[Fault]) -> list[Node]:
    """Read what can be read, and note the rest as faults."""
    nodes: list[Node] = []
    for order, file in enumerate(files):
        try:
            node = parse(read(file, order), Place(order, str(file)), faults)
        except Refused as refused:
            faults.append(refused.fault)
            continue
        if node.value is None:
            faults.append(Fault(node.place, "", "is empty; a spec needs at least one section, such as `train:`"))
        elif not isinstance(node.value, dict):
            faults.append(Fault(node.place, "", f"{show(node.plain())} is not a spec; write `section:` lines"))
        else:
            nodes.append(node)
    for order, text in enumerate(overrides, len(files)):
        try:
            nodes.append(_override(text, Place(order, f"-s {text if len(text) <= 60 else text[:57] + '…'}"), faults))
        except Refused as refused:
            faults.append(refused.fault)
    return nodes


def _override(text: str, place: Place, faults: list[Fault]) -> Node:
    """Turn ``a.b=value`` into the tree ``{a: {b: value}}``. In ``optim.groups`` the rest of the path is one key."""
    path, equals, value = text.partition("=")
    names = path.strip().split(".")
    if not equals or not all(names):
        raise Refused(place, "is not KEY=VALUE; write for example optim.lr=1e-4")
    fields = fields_of(RunSpec)
    leaves = [path for path in fields if not any(other[:-1] == path for other in fields)]
    depth = next(
        (len(path) - 1 for path in leaves if path[-1] == "*" and tuple(names[: len(path) - 1]) == path[:-1]), 0
    )
    if 0 < depth < len(names):
        names[depth:] = [".".join(names[depth:])]
    node = parse(value, place, faults)
    for name in reversed(names):
        node = Node({name: (place, node)}, place)
    return node


def _misfits(source: Node, fields: Mapping[Path, Any], strict: Converter) -> list[Fault]:
    """List the unknown keys and the values of a wrong type in one source, even where a later one overrides them."""
    built = structure(source.plain(), RunSpec, strict)
    faults: list[Fault] = []
    for turn, wrong in enumerate(built if isinstance(built, list) else []):
        unknown = wrong.kind == "unknown"
        what = hint(wrong.path, fields) if unknown and turn < MAX_HINTS else wrong.what
        if wrong.kind != "missing":
            faults.append(Fault(_place(source, wrong.path, key=unknown), _dotted(wrong.path), what))
    return faults


def _fill_origin(data: Any, merged: Node, origin: Callable[[str], Section]) -> list[Fault]:
    """Put what the model that a run begins from is beneath what the files say of the model."""
    model = data.get("model")
    source = model.get("init_from") if isinstance(model, dict) else None
    if not isinstance(source, str):
        return []
    try:
        data["model"] = _beneath(origin(source), cast("dict[str, Any]", model))
    except ValueError as error:
        return [Fault(_place(merged, ("model", "init_from")), "model.init_from", str(error))]
    return []


def _beneath(values: Section, model: dict[str, Any]) -> dict[str, Any]:
    """Lay what is given over other values, and the sections in it over theirs."""
    done = {**values, **model}
    for section, inner in values.items():
        given = model.get(section)
        if isinstance(inner, Mapping) and (given is None or isinstance(given, Mapping)):
            done[section] = dict(cast(Section, inner)) | dict(cast(Section, given or {}))
    return done


def _fill_preset(data: Any, merged: Node, presets: Presets) -> list[Fault]:
    """Put the family's values beneath what the files say of the model."""
    model = data.get("model")
    if model is None:
        model = data["model"] = {}
    if not presets or not isinstance(model, dict):
        return []
    name: Any = model.get("preset", ModelSpec().preset)
    if not isinstance(name, str) or name in presets:
        data["model"] = _beneath(presets.get(name, {}), cast("dict[str, Any]", model))
        return []
    near = difflib.get_close_matches(name, presets, 3)
    what = (
        f"is no family or model; did you mean {' or '.join(near)}?" if near else f"is not one of {', '.join(presets)}"
    )
    return [Fault(_place(merged, ("model", "preset")), "model.preset", f"{show(name)} {what}")]


def _settle(data: Any, fields: Mapping[Path, Any], strict: Converter) -> tuple[RunSpec, list[Wrong]]:
    """Build the record, mending what does not fit, so that the values that do can still be checked."""
    built = structure(data, RunSpec, strict)
    wrongs: list[Wrong] = built if isinstance(built, list) else []
    while isinstance(built, list):
        for wrong in built:
            if wrong.kind == "missing":
                kind = next(kind for pattern, kind in fields.items() if matches(wrong.path, pattern))
                _set(data, wrong.path, (get_origin(kind) or kind)())
            else:
                _drop(data, wrong.path)
        built = structure(data, RunSpec, strict)
    return built, wrongs


def _set(data: Any, path: Path, value: object) -> None:
    for name in path[:-1]:
        data = data[name]
    data[path[-1]] = value


def _drop(data: Any, path: Path) -> None:
    """Take out the value at a path, with the whole list that it is an item of."""
    for name in path[:-1]:
        if isinstance(data.get(name), list):
            path = (name,)
            break
        data = data[name]
    data.pop(path[-1], None)


def _find(node: Node, path: Path) -> tuple[Place, Node, int]:
    """Follow a path as far as the tree goes: the key's place, the node, and how many steps were left."""
    at = node.place
    for step, name in enumerate(path):
        if isinstance(node.value, dict) and name in node.value:
            at, node = node.value[str(name)]
        elif isinstance(node.value, list) and isinstance(name, int) and name < len(node.value):
            node = node.value[name]
            at = node.place
        else:
            return at, node, len(path) - step
    return at, node, 0


def _place(merged: Node, path: Path, key: bool = False) -> Place:
    """Return where a field's value stands, or its key, or where the nearest section that was given begins."""
    at, node, left = _find(merged, path)
    return at if key or left else node.place


def _given(merged: Node, path: Path) -> bool:
    return _find(merged, path)[2] == 0


def _overlap(a: Path, b: Path) -> bool:
    """Tell whether one path runs through the other."""
    shared = min(len(a), len(b))
    return a[:shared] == b[:shared]


def _dotted(path: Path) -> str:
    return ".".join(str(name) or "''" for name in path)
