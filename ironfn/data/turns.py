"""Find in a conversation, as its template writes it, the text that a model has to learn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from attrs import field, frozen

from ironfn.data.chat import Chat, Message
from ironfn.data.conversation import Example, Fault
from ironfn.data.template import EndlessError, Rendered, unused

TrainOn: TypeAlias = Literal["all", "last"]
Rewritten: TypeAlias = Literal["split", "refuse"]
ENDLESS = "endless template"
"""The kind of fault of a conversation at which the template oversteps its limits."""
_SPACE = re.compile(r"\s*")


@frozen
class Stretch:
    """Hold a stretch of a text. closes: what comes after the last control token in it, white space, is not trained."""

    text: str
    trained: bool
    closes: bool = False


@frozen
class Script:
    """Hold a text as its stretches. marks: what stands around names of control tokens in what people wrote.

    open: the text ends in an answer that no control token closes.
    """

    stretches: tuple[Stretch, ...]
    marks: Sequence[str]
    open: bool


def scripts(example: Example, chat: Chat, train_on: TrainOn, rewritten: Rewritten) -> list[Script]:
    """Return a conversation as the texts that teach all its answers, or the last one; a message's own weight goes
    before.

    Where the template marks what it generates (``{% generation %}``), that is trained. Else an answer is what the
    conversation up to its end has more than the one that asks for it, and one text teaches all answers that stand in
    it as they were given. A template that rewrites what came before, such as one that leaves out the reasoning of old
    answers, needs a text for each such answer: rewritten says whether that is done or a `Fault`. What ends an answer
    is trained with it: its control token, or the next message's first one where there is no other.
    """
    try:
        marks = unused(2, [example.messages, example.tools])
    except ValueError as error:
        raise Fault(example.place, "no text", str(error)) from error
    more = {} if example.tools is None else {"tools": chat.marked(example.tools, marks)}
    play = _Play(chat, [chat.marked(message, marks) for message in example.messages], more, example.place)
    last = max(number for number, message in enumerate(example.messages) if message["role"] == "assistant")
    answers = [number for number, message in enumerate(example.messages) if message["role"] == "assistant"]
    wanted = [
        number
        for number in answers
        if (weight := example.weights[number]) == 1 or (weight is None and (train_on == "all" or number == last))
    ]
    for number in wanted:
        _require_calls(play, number)
    whole = play.until(len(example.messages))
    if whole.generated:
        spans = whole.generated if wanted == answers else _within(whole, wanted, play)
        return [_cut(whole.text, spans, chat, marks, exact=True)] if spans else []
    texts = _texts(whole.text, wanted, play)
    if len(texts) > 1 and rewritten == "refuse":
        what = "the template writes earlier answers in another way once others follow"
        remedy = "train on the last one only, or on each in a text of its own"
        raise Fault(example.place, "rewritten history", f"{what}; {remedy}")
    return [_cut(text, spans, chat, marks, exact=False) for text, spans in texts]


@frozen
class _Play:
    """Render a conversation's beginnings, each once."""

    chat: Chat
    messages: Sequence[Message]
    more: dict[str, Any]
    place: str
    _known: dict[tuple[int, bool], Rendered] = field(factory=dict)

    def until(self, count: int) -> Rendered:
        """Return the first messages."""
        return self._render(count, False)

    def asking(self, count: int) -> str:
        """Return the first messages, and what asks for an answer."""
        return self._render(count, True).text

    def _render(self, count: int, asks: bool) -> Rendered:
        if (count, asks) not in self._known:
            try:
                said = self.chat.render(self.messages[:count], add_generation_prompt=asks, **self.more)
            except EndlessError as error:
                raise Fault(self.place, ENDLESS, str(error)) from error
            except ValueError as error:
                silent = any("tool_calls" in turn and "content" not in turn for turn in self.messages[:count])
                remedy = "; it holds tool calls: take a template that writes them" if silent else ""
                raise Fault(self.place, "template", f"{error}{remedy}") from error
            self._known[count, asks] = said
        return self._known[count, asks]


def _require_calls(play: _Play, number: int) -> None:
    """Raise a `Fault` where a message calls a tool and the template does not write so: silence would be learned."""
    for call in play.messages[number].get("tool_calls", ()):
        name: str = call["function"]["name"]
        if name not in play.until(number + 1).text:
            what = f"the template leaves out the call of {name[:40]!r} in messages[{number}]"
            raise Fault(play.place, "template", f"{what}; take another template")


def _within(whole: Rendered, wanted: Sequence[int], play: _Play) -> list[tuple[int, int]]:
    """Return the marked stretches that belong to the wanted messages."""
    found: list[tuple[int, int]] = []
    for number in wanted:
        before, after = play.until(number).text, play.until(number + 1).text
        if not (after.startswith(before) and whole.text.startswith(after)):
            what = f"messages[{number}] cannot be told from others as the template writes them"
            raise Fault(play.place, "rewritten history", f"{what}; train on all of them")
        found += [(a, b) for a, b in whole.generated if len(before) <= a and b <= len(after)]
    return found


def _texts(whole: str, wanted: Sequence[int], play: _Play) -> list[tuple[str, list[tuple[int, int]]]]:
    """Return texts, the longest first, and which stretches (from, to) of each are answers that it teaches."""
    texts: list[tuple[str, list[tuple[int, int]]]] = [(whole, [])]
    for number in reversed(wanted):
        asked, told = play.asking(number), play.until(number + 1).text
        if not told.startswith(asked):
            at = _common(asked, told)
            what = f"the template asks for messages[{number}] with {asked[at:][:40]!r}, but writes {told[at:][:40]!r}"
            remedy = "give the message what it leaves out" if number else "begin with a question"
            raise Fault(play.place, "template", f"{what}; {remedy}, or take another template")
        ends = ((_stands(text, asked, told, play.chat), spans) for text, spans in texts)
        end, home = next(((end, spans) for end, spans in ends if end), (len(told), None))
        if home is None:
            texts.append((told, home := []))
        home.insert(0, (len(asked), end))
    return [(text, spans) for text, spans in texts if spans]


def _stands(text: str, asked: str, told: str, chat: Chat) -> int:
    """Return where an answer ends in a text, if it stands in it as it was given; else 0.

    What a template puts behind the last message alone, such as an end of the whole, need not stand there.
    """
    if text.startswith(told):
        return len(told)
    same = told[: _common(text, told)]
    closed = [found.end() for found in chat.names.finditer(same, len(asked))]
    rest = re.compile(rf"(?:\s|{chat.names.pattern})*")
    return closed[-1] if closed and rest.fullmatch(told, closed[-1]) else 0


def _common(one: str, two: str) -> int:
    """Return how many characters two texts have in common at the beginning."""
    return next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def _cut(text: str, spans: Sequence[tuple[int, int]], chat: Chat, marks: Sequence[str], *, exact: bool) -> Script:
    """Cut a text where answers begin and end. exact: what the spans hold is trained to their ends."""
    found: list[Stretch] = []
    at, opened = 0, False
    for first, last in _apart(spans):
        if last <= at:
            continue  # what ended the one before
        first = max(first, at)
        found.append(Stretch(text[at:first], False))
        at, closes, opened = _end(text, first, last, chat, exact=exact)
        found.append(Stretch(text[first:at], True, closes))
    found.append(Stretch(text[at:], False))
    return Script(tuple(each for each in found if each.text), marks, opened)


def _apart(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return stretches with those that touch as one."""
    apart: list[tuple[int, int]] = []
    for first, last in spans:
        if apart and first <= apart[-1][1]:
            before = apart.pop()
            first, last = before[0], max(before[1], last)
        apart.append((first, last))
    return apart


def _end(text: str, first: int, last: int, chat: Chat, *, exact: bool) -> tuple[int, bool, bool]:
    """Return where a stretch with an answer ends, whether its last control token closes it, and whether nothing does.

    White space after a control token is encoded with it, for some tokens swallow it.
    """

    def past_space(at: int) -> int:
        found = _SPACE.match(text, at)
        assert found is not None
        return found.end()

    if re.search(rf"(?:{chat.names.pattern})\s*\Z", text[first:last]):
        return (last, False, False) if exact else (past_space(last), True, False)
    follows = re.compile(rf"\s*({chat.names.pattern})").match(text, last)
    if follows is not None and follows[1] != chat.specials.get("bos_token"):
        return past_space(follows.end()), True, False
    nothing = past_space(last) == len(text)
    return (len(text) if nothing else last), False, nothing
