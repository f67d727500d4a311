"""Turn plain data into records without ever guessing: cattrs, strict, with errors that say what to write instead."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import attrs
from attrs import frozen
from cattrs import Converter
from cattrs.cols import list_structure_factory, mapping_structure_factory
from cattrs.errors import AttributeValidationNote, ForbiddenExtraKeysError, IterableValidationNote
from cattrs.gen import make_dict_structure_fn

Path = tuple[str | int, ...]
T = TypeVar("T")


@frozen
class Wrong:
    """A field that does not fit: its path, and what is wrong with its value, or that it is unknown or missing."""

    path: Path
    what: str
    kind: Literal["value", "unknown", "missing"] = "value"


def structure(data: Any, record: type[T], strict: Converter | None = None) -> T | list[Wrong]:
    """Build the record that ``data`` describes, or list everything that does not fit it.

    strict: a `converter` to use again; making one takes longer than using it.
    """
    try:
        return (strict or converter()).structure(data, record)
    except Exception as error:  # cattrs wraps whatever the hooks raise
        return list(_wrongs(error, ()))


def converter() -> Converter:
    """Make the converter whose hooks refuse what does not fit: no 3.7 for an integer, no text for a number."""
    made = Converter(forbid_extra_keys=True, detailed_validation=True)
    for kind, hook in ((int, _integer), (float, _number), (bool, _flag), (str, _text)):
        made.register_structure_hook(kind, hook)
    made.register_structure_hook_factory(
        lambda t: get_origin(t) is Literal, lambda t: lambda value, _: _choice(value, t)
    )
    made.register_structure_hook_factory(_is_optional, lambda t: _optional(t, made))
    made.register_structure_hook_factory(attrs.has, lambda t: _section(make_dict_structure_fn(t, made)))
    made.register_structure_hook_factory(
        lambda t: get_origin(t) is list, lambda t: _guard(list, _list_remedy, list_structure_factory(t, made))
    )
    made.register_structure_hook_factory(
        lambda t: get_origin(t) is dict, lambda t: _guard(dict, _dict_remedy, mapping_structure_factory(t, made))
    )
    return made


def show(value: Any) -> str:
    """Write a value as YAML would, cut to a line."""
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _integer(value: Any, _: Any) -> int:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        raise ValueError(f"{show(value)} is not an integer; write {int(value)}")
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{show(value)} is not an integer")
    if abs(value) >= 2**63:
        raise ValueError(f"{show(value)} does not fit 64 bits")
    return value


def _number(value: Any, _: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        quoted = isinstance(value, str) and re.fullmatch(r"[-+]?[0-9.]+(e[-+]?[0-9]+)?", value, re.I)
        raise ValueError(f"{show(value)} is not a number" + (f"; write {value} without quotes" if quoted else ""))
    if not math.isfinite(value):
        raise ValueError(f"{show(value)} is not a finite number")
    if abs(value) > 1e300:
        raise ValueError(f"{show(value)} is too large a number")
    return float(value)


def _flag(value: Any, _: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}
    instead = word.get(value.lower()) if isinstance(value, str) else {"1": "true", "0": "false"}.get(str(value))
    raise ValueError(f"{show(value)} is neither true nor false" + (f"; write {instead}" if instead else ""))


def _text(value: Any, _: Any) -> str:
    if isinstance(value, str):
        return value
    scalar = isinstance(value, bool | int | float)
    raise ValueError(f"{show(value)} is not text" + (f"; quote it: '{show(value)}'" if scalar else ""))


def _choice(value: Any, kind: Any) -> Any:
    choices = get_args(kind)
    if any(value == choice and type(value) is type(choice) for choice in choices):
        return value
    near = difflib.get_close_matches(str(value), map(str, choices), 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{show(value)} is not one of {', '.join(map(show, choices))}{hint}")


def _is_optional(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType) and NoneType in get_args(kind)


def _optional(kind: Any, made: Converter) -> Callable[[Any, Any], Any]:
    (inner,) = (arg for arg in get_args(kind) if arg is not NoneType)
    return lambda value, _: None if value is None else made.structure(value, inner)


def _section(build: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Take a key with nothing after it for an empty section."""
    guarded = _guard(dict, lambda value: "; write its fields below it", build)
    return lambda value, kind: guarded({} if value is None else value, kind)


def _guard(wanted: type, remedy: Callable[[Any], str], build: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    name = {list: "a list", dict: "a section"}[wanted]

    def hook(value: Any, kind: Any) -> Any:
        if not isinstance(value, wanted):
            raise ValueError(f"{show(value)} is not {name}{remedy(value)}")
        return build(value, kind)

    return hook


def _list_remedy(value: Any) -> str:
    return f"; write [{value}]" if isinstance(value, str | int | float) and len(str(value)) < 60 else ""


def _dict_remedy(value: Any) -> str:
    return "; write `name: value` lines below it"


def _wrongs(error: BaseException, path: Path) -> Iterator[Wrong]:
    """Walk a tree of cattrs errors, whose notes say in which field or item each arose."""
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _wrongs(part, path + _step(part))
    elif isinstance(error, ForbiddenExtraKeysError):
        for key in sorted(error.extra_fields):
            yield Wrong((*path, key), "unknown key", "unknown")
    elif isinstance(error, KeyError):
        yield Wrong(path, "is missing", "missing")
    else:
        yield Wrong(path, str(error))


def _step(error: BaseException) -> Path:
    for note in getattr(error, "__notes__", ()):
        if isinstance(note, AttributeValidationNote):
            return (note.name,)
        if isinstance(note, IterableValidationNote):
            return (note.index,)
    return ()


def fields_of(record: type, prefix: Path = ()) -> dict[Path, Any]:
    """Return the types of a record's fields and of those of the records inside it, by path; ``*`` is any name."""
    found: dict[Path, Any] = {}
    for name, kind in get_type_hints(record).items():
        found[(*prefix, name)] = kind
        if get_origin(kind) is dict:
            found[(*prefix, name, "*")] = kind = get_args(kind)[1]
            name = f"{name}.*"
        if attrs.has(kind):
            found |= fields_of(kind, (*prefix, *name.split(".")))
    return found
