"""Turn a conversation into the ids that a model was trained to answer.

What people write never becomes a control token. A template joins its own control tokens and their texts into one
string, so names of control tokens in their texts are marked before, and encoded as the letters that they are after.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from attrs import field, frozen
from tokenizers import Tokenizer

from ironfn.data.encoding import Pieces, encoded
from ironfn.data.template import Limits, Rendered, Renderer, unused
from ironfn.data.tokenizer import Vocabulary

Message = Mapping[str, Any]
"""A turn: ``role``, ``content``, and what else a template may read, such as ``tool_calls``."""

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_NEWLINE = "\n"


def messages_of(value: object) -> list[dict[str, Any]]:
    """Return a conversation as templates want it. ValueError with the place of what is wrong.

    Parts of text are joined by line ends, fields that are null are left out, as `transformers` does.
    """
    if not isinstance(value, list) or not value:
        raise ValueError("messages: a conversation is a list of at least one message")
    turns: list[dict[str, Any]] = []
    for number, message in enumerate(cast("list[object]", value)):
        place = f"messages[{number}]"
        if not isinstance(message, dict):
            raise ValueError(f"{place}: a message is an object with a role and a content")
        turn = {str(key): each for key, each in cast("dict[str, Any]", message).items() if each is not None}
        if turn.get("role") not in ROLES:
            raise ValueError(f"{place}.role: {str(turn.get('role'))[:40]!r} is none of {', '.join(ROLES)}")
        if "content" in turn:
            turn["content"] = _text(turn["content"], f"{place}.content")
        elif "tool_calls" not in turn:
            raise ValueError(f"{place}.content is missing")
        turns.append(turn)
    return turns


def _text(content: object, place: str) -> str:
    if isinstance(content, str):
        return content
    parts = cast("list[object]", content) if isinstance(content, list) else [None]
    texts: list[str] = []
    for number, part in enumerate(parts):
        text = cast("dict[str, Any]", part).get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise ValueError(f"{place}[{number}]: only text can be read: a string, or parts with a text")
        texts.append(text)
    return _NEWLINE.join(texts)


@frozen(eq=False)
class Chat:
    """Write conversations as one model's template does.

    specials: the tokens that it calls bos_token, and so on. controls: the ids that only the template writes. names:
    finds the name of one in a text.
    """

    vocabulary: Vocabulary
    renderer: Renderer
    specials: Mapping[str, str]
    controls: frozenset[int] = field(repr=False)
    names: re.Pattern[str] = field(repr=False)
    _inside: Tokenizer = field(repr=False)
    _plain: Tokenizer = field(repr=False)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> Rendered:
        """Return a conversation as the template writes it. ValueError where it cannot.

        add_generation_prompt: end where an answer begins. variables: what else a template may read, such as ``tools``.
        """
        own = {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": None, "documents": None}
        return self.renderer(dict(self.specials) | own | variables)

    def encode(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> list[int]:
        """Return a conversation's ids. Names of control tokens in what it holds are encoded as plain text."""
        marks = unused(2, [messages, variables])
        told, more = self.marked(messages, marks), self.marked(variables, marks)
        written = self.render(told, add_generation_prompt=add_generation_prompt, **more)
        pieces = Pieces()
        self.cut(written.text, marks, pieces, begins=True)
        ids: list[int] = []
        for number, piece in enumerate(encoded(pieces, joins=self.vocabulary.joins)):
            if pieces.never.get(number) in piece:
                raise ValueError(pieces.unwritten(number))
            ids += piece
        return ids

    @property
    def end(self) -> int:
        """The id that ends a text: the template's ``eos_token``, or the one that ends a document."""
        named = self.vocabulary.tokenizer.token_to_id(self.specials.get("eos_token", ""))
        return self.vocabulary.eos if named is None else named

    def marked(self, value: Any, marks: Sequence[str]) -> Any:
        """Return a value with marks, of `template.unused`, around every name of a control token in its strings."""
        return _marked(value, self.names, marks)

    def cut(self, text: str, marks: Sequence[str], pieces: Pieces, *, begins: bool) -> int:
        """Cut what was rendered of marked messages, or a stretch of it, where names stand in what people wrote.

        The parts are added to ``pieces``; return how many. begins: whether it is the beginning of a text.
        """
        begin, end = marks
        named = re.compile(f"{begin}({self.names.pattern}){end}|[{begin}{end}]")
        before = len(pieces.texts)
        for number, part in enumerate(named.split(text)):  # the template's text, then a name or None, and so on
            if part and number % 2 == 0:
                pieces.add(part, self._inside, begins and number == 0)
            elif part:
                pieces.add(part, self._plain, False, self._inside.token_to_id(part))
        return len(pieces.texts) - before


def _marked(value: Any, names: re.Pattern[str], marks: Sequence[str]) -> Any:
    """Put marks around every name of a control token in the strings of a value."""
    if isinstance(value, str):
        return names.sub(lambda found: f"{marks[0]}{found[0]}{marks[1]}", value)
    if isinstance(value, Mapping):
        return {key: _marked(each, names, marks) for key, each in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_marked(each, names, marks) for each in cast("Sequence[Any]", value)]
    return value


def chat_of(vocabulary: Vocabulary, template: str, specials: Mapping[str, str], limits: Limits | None = None) -> Chat:
    """Return how a model's conversations are written. template: Jinja's text of it, which is not run before it is used.

    A control token is one that the tokenizer calls special, or adds to its model and the template writes out.
    """
    whole = vocabulary.tokenizer.to_str()
    layout = json.loads(whole)
    inside = Tokenizer.from_str(whole)  # finds every added token in a text
    layout["added_tokens"] = [token | {"special": True} for token in layout["added_tokens"]]
    plain = Tokenizer.from_str(json.dumps(layout))  # finds none
    plain.encode_special_tokens = True
    added = inside.get_added_tokens_decoder().values()
    special = set(vocabulary.controls.values()) | {token.content for token in added if token.special}
    names = special | {token.content for token in added if token.content in template}
    longest = sorted(names, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest)) or "(?!)")
    ids = frozenset(i for i in map(inside.token_to_id, names) if i is not None)
    return Chat(vocabulary, Renderer(template, limits), dict(specials), ids, pattern, inside, plain)
