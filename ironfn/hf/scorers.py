"""Describe the architectures of `transformers` that end in a number: ``...ForSequenceClassification`` of one label."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from ironfn.hf.config import Aspect, Config, Family, Fields
from ironfn.hf.families import FAMILIES
from ironfn.hf.names import matrix
from ironfn.model.arch import Arch

_NONE = ("OlmoeForCausalLM", "Glm4MoeForCausalLM")
"""Those of which `transformers` has no such form."""


def _read_labels(config: Config) -> Fields:
    labels: Any = config.get("id2label")
    count = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)
    if count != 1:
        raise ValueError(f"{str(count)[:20]} labels, and a reward is a single one: id2label has to hold one")
    return {}


def _write_labels(arch: Arch) -> dict[str, Any]:
    return {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def _scorer(family: Family) -> Family:
    """Return the form of a family that ends in a number, the product of the last hidden state and ``score.weight``."""
    name = family.architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    name = {"Gemma3": "Gemma3Text"}.get(name, name)  # the other one reads images too
    body = tuple(row for row in family.naming.top if not row.ours[0].startswith("head/"))
    return evolve(
        family,
        architecture=f"{name}ForSequenceClassification",
        naming=evolve(family.naming, top=(*body, matrix("score.weight", "score/w"))),
        fixed={**family.fixed, "score": True},
        aspects=(*family.aspects, Aspect(_read_labels, _write_labels)),
    )


SCORERS = tuple(_scorer(family) for family in FAMILIES if family.architecture not in _NONE)
