"""Read questions with a fixed few answers: which texts are compared, and which of them is right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, cast

from attrs import frozen

from ironfn.data.readers import Bad, Blank, Row

SCHEMAS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "multiple choice": ("query", "choices", "gold"),
        "partial scoring": ("context_options", "continuation", "gold"),
        "perplexity": ("text",),
    }
)
"""What can be evaluated, and the fields by which a row of JSON Lines is known to be it."""


@frozen
class Question:
    """Compare texts by the log-likelihood of their continuations.

    pairs: (context, continuation) of each choice. gold: the number of the right one. place: ``file:line``.
    characters: of each choice, for `acc_norm`; None where all choices have the same continuation.
    """

    pairs: tuple[tuple[str, str], ...]
    gold: int
    characters: tuple[int, ...] | None
    place: str


def schema_of(row: Row) -> str:
    """Return the name of the schema in `SCHEMAS` that a row has. ValueError, with the list, for none."""
    fields = _fields(row)
    for name, needed in SCHEMAS.items():
        if all(field in fields for field in needed):
            return name
    known = "; ".join(f"{name}: {', '.join(needed)}" for name, needed in SCHEMAS.items())
    raise ValueError(f"{row.place}: the fields {', '.join(map(repr, fields))} are of no known schema ({known})")


def good(rows: Iterable[Row | Bad | Blank]) -> list[Row]:
    """Return the rows without the blank lines. ValueError, with the place, for a line that is no row."""
    kept: list[Row] = []
    for row in rows:
        if isinstance(row, Bad):
            raise ValueError(f"{row.place}: {row.what}")
        if isinstance(row, Row):
            kept.append(row)
    return kept


def question(row: Row, delimiter: str) -> Question:
    """Return the question of a row: ``query`` and the delimiter before each of ``choices``, or each of
    ``context_options`` and the delimiter before ``continuation`` (Trinh and Le 2018, arXiv 1806.02847).

    ValueError, with the place, for a field that is not as its schema has it.
    """
    fields = _fields(row)
    name = schema_of(row)
    if name == "multiple choice":
        query, choices = _text(fields["query"], "query", row.place), _texts(fields["choices"], "choices", row.place)
        pairs = tuple((query, delimiter + choice) for choice in choices)
        characters = tuple(map(len, choices))
    elif name == "partial scoring":
        contexts = _texts(fields["context_options"], "context_options", row.place)
        continuation = _text(fields["continuation"], "continuation", row.place, empty=False)
        pairs, characters = tuple((context, delimiter + continuation) for context in contexts), None
    else:
        raise ValueError(f"{row.place}: a row of the schema {name!r} among questions; keep them in files of their own")
    gold = fields["gold"]
    if not isinstance(gold, int) or isinstance(gold, bool) or not 0 <= gold < len(pairs):
        raise ValueError(f"{row.place}: gold is {gold!r}; it is the number of the right choice, 0 to {len(pairs) - 1}")
    return Question(pairs, gold, characters, row.place)


def document(row: Row) -> str:
    """Return the text of a row. ValueError, with the place, where it has none."""
    fields = _fields(row)
    if "text" not in fields:
        raise ValueError(f"{row.place}: no field 'text'; the fields are {', '.join(map(repr, fields))}")
    return _text(fields["text"], "text", row.place)


def _fields(row: Row) -> dict[str, Any]:
    if not isinstance(row.value, dict):
        raise ValueError(f"{row.place}: a JSON object belongs here, not {type(row.value).__name__}")
    return cast("dict[str, Any]", row.value)


def _texts(value: Any, name: str, place: str) -> list[str]:
    if not isinstance(value, list) or len(cast("list[Any]", value)) < 2:
        raise ValueError(f"{place}: {name} holds {repr(value)[:80]}; a list of two texts or more belongs there")
    return [_text(each, f"{name}[{i}]", place, empty=False) for i, each in enumerate(cast("list[Any]", value))]


def _text(value: Any, name: str, place: str, *, empty: bool = True) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{place}: {name} holds {type(value).__name__}, not a string")
    if not (value or empty):
        raise ValueError(f"{place}: {name} is empty: it has no likelihood to compare")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{place}: {name} has the lone surrogate U+{ord(value[error.start]):04X}, which is no text"
        ) from error
    return value
