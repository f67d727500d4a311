"""Read examples for fine-tuning in the forms in which people keep them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NoReturn, TypeAlias, cast

import numpy as np
from attrs import frozen

from ironfn.data.chat import Message, messages_of
from ironfn.data.readers import Row, listed_names, parsed

Kind: TypeAlias = Literal["messages", "conversations", "alpaca", "completion", "ids", "text"]

FORMS: tuple[tuple[Kind, tuple[tuple[str, ...], ...]], ...] = (
    ("messages", (("messages",),)),
    ("conversations", (("conversations",),)),
    ("alpaca", (("instruction", "output"),)),
    ("completion", (("prompt", "completion"), ("prompt", "response"))),
    ("ids", (("input_ids",),)),
    ("text", (("text",),)),
)
"""Each form, and the fields by which a row is known to be of it; the first that fits is taken.

``messages`` OpenAI's chat, with ``tools``; ``conversations`` ShareGPT's, with ``system`` and ``tools``; ``alpaca`` also
has ``input``, ``system`` and ``history``; of a ``completion`` only that is trained, and both may be lists of messages;
``ids`` are tokens, with ``labels`` of -100 where nothing is trained; of a ``text`` all is trained.
"""
_WAYS: tuple[tuple[Kind, frozenset[str]], ...] = tuple(
    (kind, frozenset(names)) for kind, ways in FORMS for names in ways
)

_SPEAKERS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("human", "user"), "user"),
        **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bard", "bing", "function_call"), "assistant"),
        **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
        "system": "system",
    }
)
IGNORED = -100
"""The label of a token that is not trained, as `torch.nn.functional.cross_entropy` has it."""


class Fault(ValueError):
    """Say what is wrong with a row, and where. kind: the same few words for every row with such a fault."""

    def __init__(self, place: str, kind: str, what: str) -> None:
        super().__init__(f"{place}: {what}")
        self.place, self.kind, self.what = place, kind, what


@frozen
class Example:
    """Hold what one row teaches.

    messages: of a conversation, as templates read them. weights: of each of them, 1 to train it, 0 not to, None where
    the row does not say. prompt, completion: of plain text, what is read and what is trained. ids, trained: of tokens.
    tools: what the conversation may call. place: ``file:line``.
    """

    kind: Kind
    place: str
    messages: tuple[Message, ...] = ()
    weights: tuple[int | None, ...] = ()
    prompt: str = ""
    completion: str = ""
    ids: tuple[int, ...] = ()
    trained: tuple[bool, ...] = ()
    tools: tuple[Mapping[str, Any], ...] | None = None


def detect(row: Row, fields: Mapping[str, str]) -> Kind:
    """Return the form of a row. fields: by our name of a field, what it is called in the row. `Fault` for no form."""
    return _form(renamed(row, fields), row.place)


def parse(row: Row, fields: Mapping[str, str]) -> Example:
    """Return what a row teaches; see `detect`. `Fault`, with place and remedy, where it cannot be told."""
    return parse_values(renamed(row, fields), row.place)


def parse_values(values: Mapping[str, Any], place: str) -> Example:
    """Return what the fields of a row teach; see `parse`."""
    kind = _form(values, place)
    if kind == "ids":
        return _tokens(values, place)
    if kind == "text":
        example = Example("text", place, completion=filled(values, "text", place))
    elif kind == "completion":
        name = "completion" if "completion" in values else "response"
        return completion_of(values["prompt"], values, name, place)
    else:
        told = {"messages": _chat, "conversations": _shared, "alpaca": _alpaca}[kind](values, place)
        example = _conversation(kind, told, place, tools_of(values, place))
    return _encodable(example)


def completion_of(prompt: object, values: Mapping[str, Any], name: str, place: str) -> Example:
    """Return a prompt with the completion that is the field ``name``: both strings, or lists of messages."""
    completion = values[name]
    if isinstance(prompt, list) and isinstance(completion, list):
        asked = cast("list[object]", prompt)
        told = [*asked, *cast("list[object]", completion)]
        return _encodable(_conversation("completion", told, place, tools_of(values, place), asked=len(asked)))
    text = filled(values, name, place)
    return _encodable(Example("completion", place, prompt=_text(prompt, "prompt", place), completion=text))


def _encodable(example: Example) -> Example:
    """Return an example of which all is text."""
    place = example.place
    try:
        said = example.prompt + example.completion
        if example.messages:
            said = json.dumps([example.messages, example.tools], ensure_ascii=False)
        said.encode()
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise Fault(place, "lone surrogate", f"holds the lone surrogate U+{code:04X}, which is no text") from error
    except TypeError as error:
        raise Fault(place, "no JSON value", f"{error}; write numbers, strings, lists and objects only") from error
    return example


def renamed(row: Row, fields: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a row that hold something, by our names."""
    if not isinstance(row.value, dict):
        what = f"a JSON object belongs here, not {type(row.value).__name__}"
        raise Fault(row.place, "no object", f"{what}; write one object a row")
    values = {str(k): v for k, v in cast("dict[Any, Any]", row.value).items() if v is not None}
    if not fields:
        return values
    taken = {ours: values[theirs] for ours, theirs in fields.items() if theirs in values}
    return {k: v for k, v in values.items() if k not in fields.values()} | taken


def _form(values: Mapping[str, Any], place: str) -> Kind:
    here = values.keys()
    for kind, names in _WAYS:
        if names <= here:
            return kind
    known = "; ".join(f"{kind}: {' or '.join(' + '.join(names) for names in ways)}" for kind, ways in FORMS)
    told = listed_names(values)
    raise Fault(
        place, "unknown form", f"the fields that hold something ({told}) are of no known form ({known}); rename them"
    )


def _conversation(
    kind: Kind, told: Sequence[object], place: str, tools: tuple[Mapping[str, Any], ...] | None, asked: int = 0
) -> Example:
    """Check a conversation. asked: how many messages stand before what is to be trained."""
    try:
        turns = messages_of([_modern(each) for each in told])
    except ValueError as error:
        found = re.match(r"messages(?:\[\d+\])?(?:\.\w+)?", str(error))
        raise Fault(place, re.sub(r"\d+", "", found[0] if found else "messages"), str(error)) from error
    weights: list[int | None] = []
    for number, turn in enumerate(turns):
        at = f"messages[{number}]"
        weight = _weight(turn, f"{place}: {at}")
        weights.append(0 if number < asked else weight)
        if "tool_calls" in turn:
            if turn["role"] != "assistant":
                what = f"{at}.tool_calls: only the assistant calls tools, not the {turn['role']}; leave them out"
                raise Fault(place, "messages[].tool_calls", what)
            turn["tool_calls"] = _calls(turn["tool_calls"], place, at)
        elif turn["role"] == "assistant" and weights[-1] != 0 and not str(turn.get("content", "")).strip():
            raise Fault(place, "empty answer", f"{at}.content is empty: write an answer, or give it the weight 0")
    if not any(turn["role"] == "assistant" and weight != 0 for turn, weight in zip(turns, weights, strict=True)):
        raise Fault(place, "no answer", "no message of the assistant is there to be trained; add one, or leave it out")
    return Example(kind, place, tuple(turns), tuple(weights), tools=tools)


def _modern(turn: object) -> object:
    """Return a message with ``function_call``, which OpenAI had before, as ``tool_calls``."""
    if not isinstance(turn, dict) or turn.get("function_call") is None:
        return turn
    rest = {key: each for key, each in cast("dict[str, Any]", turn).items() if key != "function_call"}
    return rest | {"tool_calls": [{"type": "function", "function": turn["function_call"]}]}


def _weight(turn: dict[str, Any], at: str) -> int | None:
    """Take the weight out of a message."""
    weight = turn.pop("weight", None)
    if weight is None:
        return None
    if isinstance(weight, str | list | dict) or weight not in (0, 1):
        raise Fault(at, "messages[].weight", f"weight is {str(weight)[:40]!r}: give 1 to train a message, 0 not to")
    if weight and turn["role"] != "assistant":
        raise Fault(at, "messages[].weight", f"only the assistant's messages are trained, not the {turn['role']}'s")
    return int(weight)


def _calls(calls: Any, place: str, at: str) -> list[dict[str, Any]]:
    """Return tool calls with their arguments as objects: OpenAI sends JSON's text, templates read values."""

    def wrong(what: str) -> NoReturn:
        raise Fault(place, "messages[].tool_calls", f"{at}.tool_calls{what}")

    if not isinstance(calls, list) or not calls:
        wrong(" is a list of at least one call")
    found: list[dict[str, Any]] = []
    for number, call in enumerate(cast("list[Any]", calls)):
        function: Any = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            wrong(f"[{number}] needs a function with a name")
        arguments: Any = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = parsed(arguments or "{}")
            except ValueError as error:
                wrong(f"[{number}].function.arguments is not JSON: {error}")
        if not isinstance(arguments, dict):
            wrong(f"[{number}].function.arguments is an object, or its JSON, not {type(arguments).__name__}")
        found.append(dict(call) | {"function": dict(function) | {"arguments": arguments}})
    return found


def tools_of(values: Mapping[str, Any], place: str) -> tuple[Mapping[str, Any], ...] | None:
    """Return what a row's conversation may call."""
    tools: Any = values.get("tools")
    if isinstance(tools, str):
        try:
            tools = parsed(tools or "[]")
        except ValueError as error:
            raise Fault(place, "tools", f"tools is not JSON: {error}; write a list of objects") from error
    if tools is None and (functions := values.get("functions")) is not None:
        tools = [{"type": "function", "function": each} for each in functions] if isinstance(functions, list) else 0
    if tools is not None and not (isinstance(tools, list) and all(isinstance(each, dict) for each in tools)):
        raise Fault(place, "tools", "tools is a list of objects, or its JSON")
    return tuple(tools) if tools else None


def _chat(values: Mapping[str, Any], place: str) -> Sequence[object]:
    return listed(values["messages"], "messages", place)


def _shared(values: Mapping[str, Any], place: str) -> Sequence[object]:
    """Return ShareGPT's turns, ``from`` and ``value``, as messages. Messages under its name are taken as they are."""
    turns: list[object] = []
    for number, turn in enumerate(listed(values["conversations"], "conversations", place)):
        at = f"conversations[{number}]"
        if not isinstance(turn, dict) or "role" in turn:
            turns.append(turn)
            continue
        said = cast("dict[str, Any]", turn)
        speaker, text = said.get("from"), said.get("value")
        if not isinstance(speaker, str) or speaker not in _SPEAKERS:
            known = ", ".join(_SPEAKERS)
            raise Fault(place, "conversations[].from", f"{at}.from: {str(speaker)[:40]!r} is none of {known}")
        rest = {key: each for key, each in said.items() if key not in ("from", "value")}
        told = {"content": text} if speaker != "function_call" else {"function_call": _called(text, at, place)}
        turns.append({"role": _SPEAKERS[speaker], **told, **rest})
    return _under_system(values, turns)


def _called(text: object, at: str, place: str) -> Any:
    try:
        return parsed(text) if isinstance(text, str) else text
    except ValueError as error:
        raise Fault(place, "conversations[].value", f"{at}.value is not the JSON of a call: {error}") from error


def _alpaca(values: Mapping[str, Any], place: str) -> Sequence[object]:
    """Return Alpaca's row as messages: the input goes under the instruction, on a line of its own."""
    turns: list[object] = []
    for number, pair in enumerate(listed(values.get("history", []), "history", place)):
        if not isinstance(pair, list) or len(cast("list[Any]", pair)) != 2:
            raise Fault(place, "history", f"history[{number}] is a list of a question and its answer")
        question, answer = cast("list[Any]", pair)
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    asked = filled(values, "instruction", place)
    if more := values.get("input"):
        asked += "\n" + _text(more, "input", place)
    answer = filled(values, "output", place)
    return _under_system(values, [*turns, {"role": "user", "content": asked}, {"role": "assistant", "content": answer}])


def _under_system(values: Mapping[str, Any], turns: list[object]) -> list[object]:
    system = values.get("system")
    return [{"role": "system", "content": system}, *turns] if system else turns


def _tokens(values: Mapping[str, Any], place: str) -> Example:
    ids = _numbers(values, "input_ids", place)
    real = _numbers(values, "attention_mask", place, len(ids)) if "attention_mask" in values else np.ones_like(ids)
    trained = np.ones(len(ids), bool)
    if "labels" in values:
        labels = _numbers(values, "labels", place, len(ids))
        trained = labels != IGNORED
        if (wrong := np.flatnonzero(trained & (labels != ids))).size:
            i = int(wrong[0])
            what = f"labels[{i}] is {labels[i]}, but input_ids[{i}] is {ids[i]}"
            raise Fault(
                place, "labels", f"{what}: write the id itself, which nothing shifts, or {IGNORED} not to train"
            )
    kept = real != 0
    if ((ids < 0) & kept).any():
        raise Fault(place, "input_ids", f"input_ids holds {ids.min()}: no id is below 0")
    return Example("ids", place, ids=tuple(ids[kept].tolist()), trained=tuple(trained[kept].tolist()))


def _numbers(values: Mapping[str, Any], name: str, place: str, length: int | None = None) -> np.ndarray:
    told = values[name]
    if not isinstance(told, list) or not told or any(type(i) is not int for i in cast("list[object]", told)):
        raise Fault(place, name, f"{name} is a list of whole numbers, at least one")
    if length is not None and len(cast("list[object]", told)) != length:
        raise Fault(place, name, f"{name} has {len(cast('list[object]', told))} numbers for {length} input_ids")
    try:
        return np.array(told, np.int64)
    except OverflowError as error:
        raise Fault(place, name, f"{name} holds a number of more than 64 bits; no id is that large") from error


def listed(value: object, name: str, place: str) -> list[object]:
    """Return a value that has to be a list."""
    if not isinstance(value, list):
        raise Fault(place, name, f"{name} is a list, not {type(value).__name__}")
    return cast("list[object]", value)


def _text(value: object, name: str, place: str) -> str:
    if not isinstance(value, str):
        raise Fault(place, name, f"the field {name!r} holds {type(value).__name__}, not a string")
    return value


def filled(values: Mapping[str, Any], name: str, place: str) -> str:
    """Return a field that has to hold some text."""
    if not (text := _text(values[name], name, place)).strip():
        raise Fault(place, f"empty {name}", f"{name} is empty: fill it, or leave the row out")
    return text
