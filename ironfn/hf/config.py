"""Turn a config.json into a model spec and an architecture into a config.json, by a family's table of keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
from attrs import frozen

from ironfn.hf.names import Naming
from ironfn.model.arch import Arch
from ironfn.model.families import PRESETS
from ironfn.spec.check import check
from ironfn.spec.records import DataSpec, ModelSpec, RunSpec, TokenizerSpec
from ironfn.spec.structure import structure

Config = Mapping[str, Any]
Fields = dict[str, Any]
"""Fields of a `ModelSpec` by dotted name."""

REQUIRED = object()
"""Stands for no default: a config without this key says too little."""


@frozen
class Key:
    """Tie a key of a config to a field (dotted). Of several names the first that is there is read; all are written.

    default: what `transformers` takes where the key is absent.
    """

    ours: str
    theirs: tuple[str, ...]
    default: Any = REQUIRED


@frozen
class Aspect:
    """Read some fields out of a config's keys, and write those keys, where one key is not one field.

    read, write: raise ValueError for values that the other side cannot express.
    """

    read: Callable[[Config], Fields]
    write: Callable[[Arch], dict[str, Any]]


@frozen
class Family:
    """Describe an architecture of `transformers`.

    fixed: fields that it leaves no choice about. only: keys that have to be absent or have this value.
    bias: whether its routers have a bias on the choice. source: where its keys stand.
    """

    architecture: str
    model_type: str
    naming: Naming
    keys: tuple[Key, ...]
    aspects: tuple[Aspect, ...] = ()
    fixed: Mapping[str, Any] = MappingProxyType({})
    only: Mapping[str, Any] = MappingProxyType({})
    bias: bool = False
    source: str = "config.json"


def key(ours: str, theirs: str, default: Any = REQUIRED, *others: str) -> Key:
    """Return the row of one key, with the other names that it has had."""
    return Key(ours, (theirs, *others), default)


def read_spec(config: Config, family: Family) -> ModelSpec:
    """Return the model that a config describes. ValueError for what is missing, out of range, or not ours."""
    if config.get("quantization_config"):
        raise ValueError("config.json has a quantization_config: quantized weights are not read; dequantize them first")
    wrong = [
        f"{name} is {config[name]!r}, and only {value!r} is supported"
        for name, value in family.only.items()
        if name in config and config[name] != value
    ]
    fields: Fields = dict(family.fixed)
    for row in family.keys:
        name = next((name for name in row.theirs if name in config), None)
        if name is None and row.default is REQUIRED:
            wrong.append(f"{' or '.join(row.theirs)} is missing")
        else:
            fields[row.ours] = row.default if name is None else config[name]
    for aspect in family.aspects:
        try:
            fields |= aspect.read(config)
        except (ValueError, TypeError) as error:
            wrong.append(str(error))
    if wrong:
        raise ValueError(f"{family.source} of {family.architecture}: " + "; ".join(wrong))
    preset = family.model_type if family.model_type in PRESETS else "llama"
    return _checked({"preset": preset} | fields, family)


def _checked(fields: Fields, family: Family) -> ModelSpec:
    nested: dict[str, Any] = {}
    for dotted, value in fields.items():
        *sections, name = dotted.split(".")
        at = nested
        for section in sections:
            at = at.setdefault(section, {})
        at[name] = float(value) if type(value) is int and _is_float(dotted) else value
    built = structure(nested, ModelSpec)
    if isinstance(built, list):
        faults = [f"{_theirs(family, '.'.join(map(str, w.path)))}: {w.what}" for w in built]
    else:
        data = DataSpec(length=1, tokenizer=TokenizerSpec(file="tokenizer.json"))
        found = check(RunSpec(model=built, data=data), None)
        faults = [
            f"{_theirs(family, '.'.join(map(str, paths[0][1:])))}: {what}"
            for paths, what in found
            if paths[0][0] == "model"
        ]
    if faults:
        raise ValueError(f"{family.source} of {family.architecture}: " + "; ".join(faults))
    assert isinstance(built, ModelSpec)
    return built


def _theirs(family: Family, ours: str) -> str:
    return next((row.theirs[0] for row in family.keys if row.ours == ours), ours)


def _is_float(dotted: str) -> bool:
    """Tell whether a field is a number with a fraction, which JSON may write without one."""
    kind: Any = ModelSpec
    for name in dotted.split("."):
        found = attrs.fields_dict(attrs.resolve_types(kind)).get(name)
        if found is None:
            return False
        kind = found.type
    return kind in (float, float | None)


def section(config: Config, name: str) -> dict[str, Any]:
    """Return an object that a config holds under this name; {} where it is absent or empty. ValueError for a value."""
    found = config.get(name) or {}
    if not isinstance(found, dict):
        raise ValueError(f"{name} is {str(found)[:80]!r}, not an object")
    return found


def write_config(arch: Arch, family: Family) -> dict[str, Any]:
    """Return the keys of a config.json that this family's table has of an architecture.

    ValueError for a value that it has no word for. Whether the keys say all is for the caller to see, by reading them.
    """
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    config |= {name: value for row in family.keys for value in (field_of(arch, row.ours),) for name in row.theirs}
    config |= family.only
    for aspect in family.aspects:
        config |= aspect.write(arch)
    return config


def field_of(arch: Arch, dotted: str) -> Any:
    """Return a field of a model spec as a complete architecture has it."""
    value: Any = arch
    for name in ("vocab" if dotted == "vocab_size" else dotted).split("."):
        value = getattr(value, name, None)
    return value


def choice(ours: str, theirs: str, values: Mapping[Any, Any], default: Any = REQUIRED) -> Aspect:
    """Return the aspect of a key whose values have other names here; of two for one the first is written."""

    def read(config: Config) -> Fields:
        value = config.get(theirs, default)
        if value is REQUIRED:
            raise ValueError(f"{theirs} is missing")
        if not isinstance(value, str | bool | None) or value not in values:
            raise ValueError(f"{theirs} is {value!r}, and only {', '.join(map(repr, values))} are supported")
        return {ours: values[value]}

    def write(arch: Arch) -> dict[str, Any]:
        value = field_of(arch, ours)
        found = [name for name, each in values.items() if each == value]
        if not found:
            raise ValueError(f"{ours} {value!r}")
        return {theirs: found[0]}

    return Aspect(read, write)


def family_of(config: Config, families: Sequence[Family]) -> Family:
    """Return the family that a config names. ValueError, with those that are known, for any other."""
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and len(named) == 1 else None
    if name is None and named is None:  # some files say the type alone
        name = next((f.architecture for f in families if f.model_type == config.get("model_type")), None)
    found = next((family for family in families if family.architecture == name), None)
    if found is None:
        said = repr(named if named is not None else config.get("model_type"))[:100]
        raise ValueError(
            f"config.json is of the architecture {said}; known are {', '.join(f.architecture for f in families)}"
        )
    return found
