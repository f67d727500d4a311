"""Refuse settings of ``data`` that no preparation could meet, and say which of them make the stores what they are."""

from __future__ import annotations

import re
from typing import Any

import attrs

from ironfn.spec.records import DataSpec, SetSpec


def check(spec: DataSpec) -> None:
    """Raise a ValueError that names every setting at fault, its value, and what it may be."""
    faults = [
        *_fault(bool(spec.sets), "sets", "{}", "name at least one set"),
        *_fault(spec.length >= 1, "length", spec.length, "1 or more tokens"),
        *_fault(spec.temperature is None or spec.temperature > 0, "temperature", spec.temperature, "above 0, or null"),
        *_fault(_shares(spec), "split", spec.split, "shares of 0 or more that leave something to train on"),
        *_fault(any(s.weight > 0 for s in spec.sets.values()), "sets.*.weight", 0, "one of them above 0"),
    ]
    for name, one in spec.sets.items():
        faults += _check_set(name, one)
    if faults:
        raise ValueError("\n".join(faults))


def _shares(spec: DataSpec) -> bool:
    validation, test = spec.split.validation, spec.split.test
    return validation >= 0 and test >= 0 and validation + test < 1


def _check_set(name: str, one: SetSpec) -> list[str]:
    at = f"sets.{name}"
    return [
        *_fault(
            re.fullmatch(r"\w[\w.-]*", name, re.ASCII) is not None, "sets", name, "a name of letters, digits, . _ -"
        ),
        *_fault(bool(one.sources), f"{at}.sources", "[]", "name at least one"),
        *_fault(one.split_on != "", f"{at}.split_on", "''", "some text, or null"),
        *_fault(0 <= one.weight < float("inf"), f"{at}.weight", one.weight, "0 or more"),
        *_fault(0 <= one.fim.rate <= 1, f"{at}.fim.rate", one.fim.rate, "0 to 1"),
        *_fault(0 <= one.fim.spm_rate <= 1, f"{at}.fim.spm_rate", one.fim.spm_rate, "0 to 1"),
    ]


def _fault(fine: bool, place: str, value: object, remedy: str) -> list[str]:
    return [] if fine else [f"data.{place} is {value}: give {remedy}"]


def recipe(spec: DataSpec) -> dict[str, Any]:
    """Return the settings on which the stores' content depends, as plain values by dotted name.

    What is chosen when rows are cut (length, weights, temperature, attention, order) is left out: it may change
    without a new preparation.
    """
    settings: dict[str, Any] = {}
    for name, one in spec.sets.items():
        settings |= _flat(f"sets.{name}", attrs.asdict(attrs.evolve(one, weight=1.0)))
    return settings | _flat("tokenizer", attrs.asdict(spec.tokenizer)) | _flat("split", attrs.asdict(spec.split))


def _flat(prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(f"{prefix}.{name}", value) if isinstance(value, dict) else {f"{prefix}.{name}": value}
    return flat


def differences(old: dict[str, Any], new: dict[str, Any], section: str = "data") -> list[str]:
    """Say which settings differ, as ``section.name: old -> new``."""
    absent = "absent"
    return [
        f"{section}.{name}: {old.get(name, absent)} -> {new.get(name, absent)}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name, absent) != new.get(name, absent)
    ]
