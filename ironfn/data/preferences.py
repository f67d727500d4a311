"""Read what people prefer, in the forms in which they keep it: pairs of texts, or texts each liked or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import numpy as np
from attrs import frozen

from ironfn.data.conversation import (
    Example,
    Fault,
    completion_of,
    filled,
    listed,
    parse_values,
    renamed,
)
from ironfn.data.readers import Row, listed_names
from ironfn.data.supervise import Supervised

Form: TypeAlias = Literal["pair", "openai pair", "implicit pair", "judged"]

FORMS: tuple[tuple[Form, tuple[str, ...]], ...] = (
    ("pair", ("prompt", "chosen", "rejected")),
    ("openai pair", ("input", "preferred_output", "non_preferred_output")),
    ("implicit pair", ("chosen", "rejected")),
    ("judged", ("prompt", "completion", "label")),
)
"""Each form, and the fields by which a row is known to be of it; the first that fits is taken.

Texts are strings or lists of messages. In an ``implicit pair`` both hold the prompt: it is what they begin with alike.
``judged`` says of one completion whether it is liked.
"""


@frozen
class Preference:
    """Hold what one row prefers.

    chosen, rejected: examples whose prompt is the same; of a single judged completion ``rejected`` is None and
    ``liked`` says what is thought of it. place: ``file:line``.
    """

    kind: Form
    place: str
    chosen: Example
    rejected: Example | None = None
    liked: bool = True

    @property
    def examples(self) -> tuple[Example, ...]:
        """Return the examples that are encoded."""
        return (self.chosen,) if self.rejected is None else (self.chosen, self.rejected)


def parse_preference(row: Row, fields: Mapping[str, str]) -> Preference:
    """Return what a row prefers. fields: by our name of a field, what the row calls it.

    `Fault` where it cannot be told.
    """
    values, place = renamed(row, fields), row.place
    if (form := _form(values)) is None:
        known = "; ".join(f"{form}: {' + '.join(names)}" for form, names in FORMS)
        what = f"the fields that hold something ({listed_names(values)}) are of no form of preferences ({known})"
        raise Fault(place, "unknown form", f"{what}; rename them")
    return _parse(values, place, form)


def parse_any(row: Row, fields: Mapping[str, str]) -> Example | Preference:
    """Return what a row prefers if it is of such a form, else what it teaches; see `conversation.parse`."""
    values = renamed(row, fields)
    form = _form(values)
    return parse_values(values, row.place) if form is None else _parse(values, row.place, form)


def form_of(row: Row, fields: Mapping[str, str]) -> Form | None:
    """Return the form in which a row prefers something; None where it does not."""
    return _form(renamed(row, fields))


def _form(values: Mapping[str, Any]) -> Form | None:
    return next((form for form, names in FORMS if all(map(values.__contains__, names))), None)


def _parse(values: Mapping[str, Any], place: str, form: Form) -> Preference:
    if form == "judged":
        label: Any = values["label"]
        if label not in (True, False) or isinstance(label, float):
            what = f"label is {str(label)[:40]!r}: give true for a completion that is liked, false for one that is not"
            raise Fault(place, "label", what)
        return Preference(form, place, completion_of(values["prompt"], values, "completion", place), liked=bool(label))
    if form == "openai pair":
        values = _of_openai(values, place)
    elif form == "implicit pair":
        values = _with_prompt(values, place)
    values = _as_messages(values)
    sides = [completion_of(values["prompt"], values, name, place) for name in ("chosen", "rejected")]
    if values["chosen"] == values["rejected"]:
        raise Fault(place, "equal texts", "the chosen text is the rejected one: nothing is preferred; leave it out")
    return Preference(form, place, sides[0], sides[1])


def _of_openai(values: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return OpenAI's row, whose ``input`` holds the messages and tools, as a prompt and its completions."""
    told: Any = values["input"]
    if not isinstance(told, dict) or "messages" not in told:
        raise Fault(place, "input", "input is an object with messages, which both outputs answer")
    given = cast("dict[str, Any]", told)
    sides = {"chosen": values["preferred_output"], "rejected": values["non_preferred_output"]}
    return {**given, "prompt": listed(given["messages"], "input.messages", place), **sides}


def _with_prompt(values: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Take the prompt out of two texts that begin with it: whole messages, or whole words."""
    sides: list[Any] = [values["chosen"], values["rejected"]]
    if all(isinstance(side, list) for side in sides):
        cut = _alike(sides[0], sides[1])
    else:
        texts = [filled(values, name, place) for name in ("chosen", "rejected")]
        cut = _alike(texts[0], texts[1])
        inside = any(not text[cut].isspace() for text in texts)
        while cut and inside and not texts[0][cut - 1].isspace():
            cut -= 1
        while cut and texts[0][cut - 1].isspace():
            cut -= 1  # as a tokenizer has it, a space belongs to the word after it
    if not cut:
        raise Fault(place, "no prompt", "chosen and rejected begin with nothing in common; give the prompt they answer")
    return {**values, "prompt": sides[0][:cut], "chosen": sides[0][cut:], "rejected": sides[1][cut:]}


def _alike(one: Sequence[Any], two: Sequence[Any]) -> int:
    """Count what both begin with alike, and each has more than."""
    least = max(0, min(len(one), len(two)) - 1)
    return next((at for at, (a, b) in enumerate(zip(one[:least], two, strict=False)) if a != b), least)


def _as_messages(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Make a prompt that is a string the user's message, where completions are messages; they may repeat it."""
    prompt, chosen, rejected = (values[name] for name in ("prompt", "chosen", "rejected"))
    if not (isinstance(prompt, str) and isinstance(chosen, list) and isinstance(rejected, list)):
        return values
    asked = [{"role": "user", "content": prompt}]
    cut = _alike(cast("list[Any]", chosen), cast("list[Any]", rejected))
    if cut and cast("list[Any]", chosen)[cut - 1] == asked[0]:
        return {**values, "prompt": chosen[:cut], "chosen": chosen[cut:], "rejected": rejected[cut:]}
    return {**values, "prompt": asked}


def agreed(preference: Preference, texts: Sequence[Supervised]) -> list[Supervised]:
    """Return the texts of a preference as they are stored: one for each example, of equal prompts.

    The first id of a text, which is never a target, is marked where a judged completion is liked. `Fault` where the
    template writes the prompt of both in different ways, or nothing of a completion would be asked for.
    """
    place = preference.place
    if len(texts) > len(preference.examples):
        what = "the template writes earlier answers of a completion in another way once others follow"
        raise Fault(place, "rewritten history", f"{what}; prefer single answers")
    if any(not len(text.ids) for text in texts):
        raise Fault(place, "nothing asked", "nothing of a completion would be asked for; give it an answer")
    firsts = [int(text.trained.argmax()) for text in texts]
    prompts = [text.ids[:first] for text, first in zip(texts, firsts, strict=True)]
    if not np.array_equal(prompts[0], prompts[-1]):
        what = "chosen and rejected answer different ids as the template or the tokenizer writes their prompt"
        raise Fault(place, "different prompts", f"{what}; give a prompt that is not empty, or take another template")
    if preference.rejected is None:
        texts[0].trained[0] = preference.liked
    return list(texts)
