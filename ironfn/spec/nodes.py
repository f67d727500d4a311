"""Read YAML 1.2 into a tree that knows where each value stands. Bounded: no text takes more than a second to refuse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from attrs import define, field, frozen
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.resolver import VersionedResolver
from ruamel.yaml.scanner import Scanner, ScannerError

from ironfn.spec.errors import Fault, Place

MAX_BYTES = 64 * 1024
MAX_DEPTH = 32
MAX_VALUES = 2_000
"""A spec holds at most so many bytes, levels, and values once its aliases are written out."""

NESTED = f"is nested more than {MAX_DEPTH} levels deep"

Scalar: TypeAlias = "str | int | float | bool | None"


@frozen(eq=False)
class Node:
    """A value and its place. Mappings keep the place of each key; ``size`` counts the values, aliases written out."""

    value: Scalar | list[Node] | dict[str, tuple[Place, Node]]
    place: Place
    size: int = 1

    def plain(self) -> Any:
        """Return the value as dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, (_, node) in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value


class Refused(Exception):
    """Stop reading a source at a fault."""

    def __init__(self, place: Place, what: str) -> None:
        super().__init__(what)
        self.fault = Fault(place, "", what)


def read(path: Path, order: int) -> str:
    """Return a file's text. `Refused` where it is missing, not a file, too large or not UTF-8."""
    whole = Place(order, str(path))
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise Refused(whole, f"cannot be read: {(error.strerror or str(error)).lower()}") from None
    if len(raw) > MAX_BYTES:
        raise Refused(whole, f"is larger than {MAX_BYTES // 1024} KiB; a spec is a short text")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        line, col = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        place = Place(order, str(path), line, col)
        raise Refused(place, f"byte 0x{raw[error.start]:02x} is not UTF-8; save the file as UTF-8") from None


def parse(text: str, source: Place, faults: list[Fault]) -> Node:
    """Return the one document in ``text``, adding what is wrong but can be read past to ``faults``.

    source: the file, or an override, whose values all stand at its own place. `Refused` where reading cannot go on.
    """
    composer = _Composer(text, source, faults)
    try:
        return composer.document()
    except _TooDeep as error:
        raise Refused(composer.place(error.problem_mark), NESTED) from None
    except MarkedYAMLError as error:
        what, mark = _explain(error)
        raise Refused(composer.place(mark), f"is not YAML: {what}") from None
    except ReaderError as error:
        before = text[: error.position]
        place = Place(source.order, source.source, before.count("\n") + 1, error.position - before.rfind("\n"))
        raise Refused(place, f"character U+{ord(text[error.position]):04X} is not allowed in YAML") from None


class _TooDeep(ScannerError):
    """Stop the scanner at a bracket inside too many others."""


class _Shallow(Scanner):
    """Count the open brackets while scanning: it reads far ahead, in a time quadratic in their number."""

    def fetch_flow_collection_start(self, TokenClass: Any, to_push: str) -> None:
        if self.flow_level > MAX_DEPTH:
            raise _TooDeep(None, None, NESTED, self.reader.get_mark())
        super().fetch_flow_collection_start(TokenClass, to_push)


def _explain(error: MarkedYAMLError) -> tuple[str, Any]:
    """Say in our words what the parser's most common complaints mean, and return the mark to point at."""
    problem, context = str(error.problem or error.context), str(error.context)
    here, opened = error.problem_mark or error.context_mark, error.context_mark or error.problem_mark
    if "'\\t'" in problem or "tab" in problem.lower():
        return "a tab stands where YAML wants spaces; indent with spaces", here
    if "mapping values are not allowed" in problem:
        return "a second `:` in one value; quote the value, or check the indentation", here
    if "end of stream" in problem and "quoted" in context:
        return "the quote that opens here is never closed", opened
    if "<stream end>" in problem and "flow" in context:
        return "the bracket that opens here is never closed", opened
    if "<block end>" in problem:
        return "the indentation fits none of the lines above", here
    return problem, here


@define
class _Composer:
    """Build nodes from the parser's events, one after the other; used up by one text."""

    text: str
    source: Place
    faults: list[Fault]
    anchors: dict[str, Node | None] = field(factory=dict)  # None while the anchored value is still being read
    seen: int = 0  # how many values were read, aliases written out
    resolver: VersionedResolver = field(factory=VersionedResolver)

    def place(self, mark: Any) -> Place:
        """Return the place of a parser's mark; an override is one place."""
        if not self.source.line and self.source.source.startswith("-s "):
            return self.source
        return Place(self.source.order, self.source.source, mark.line + 1, mark.column + 1)

    def document(self) -> Node:
        yaml = YAML(typ="safe", pure=True)
        yaml.Scanner = _Shallow
        events: Iterator[Any] = iter(yaml.parse(self.text))
        next(events)  # the start of the stream
        if type(next(events)).__name__ == "StreamEndEvent":
            return Node(None, self.source)
        node = self.node(next(events), events, ())
        next(events)  # the end of the document
        after = next(events)
        if type(after).__name__ != "StreamEndEvent":
            raise Refused(self.place(after.start_mark), "a second document begins; a spec is one document")
        return node

    def node(self, event: Any, events: Iterator[Any], path: tuple[str, ...]) -> Node:
        place, kind = self.place(event.start_mark), type(event).__name__
        if len(path) > MAX_DEPTH:
            raise Refused(place, NESTED)
        if kind == "AliasEvent":
            return self.alias(event, place)
        self.count(1, place)
        if event.tag is not None and str(event.tag) != "!":
            self.faults.append(
                Fault(place, ".".join(path), f"the tag {event.tag} has no meaning in a spec; write the bare value")
            )
        if event.anchor is not None:
            self.anchors[event.anchor] = None
        if kind == "MappingStartEvent":
            node = self.mapping(place, events, path)
        elif kind == "SequenceStartEvent":
            node = self.sequence(place, events, path)
        else:
            node = Node(self.scalar(event, place), place)
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        return node

    def alias(self, event: Any, place: Place) -> Node:
        node = self.anchors.get(event.anchor)
        if node is None:
            inside = event.anchor in self.anchors
            raise Refused(
                place, f"*{event.anchor} " + ("stands inside what it names" if inside else "is named nowhere above")
            )
        self.count(node.size, place)
        return node

    def count(self, values: int, place: Place) -> None:
        self.seen += values
        if self.seen > MAX_VALUES:
            raise Refused(place, f"here the spec passes {MAX_VALUES} values, its aliases written out")

    def sequence(self, place: Place, events: Iterator[Any], path: tuple[str, ...]) -> Node:
        items: list[Node] = []
        while type(event := next(events)).__name__ != "SequenceEndEvent":
            items.append(self.node(event, events, (*path, str(len(items)))))
        return Node(items, place, 1 + sum(item.size for item in items))

    def mapping(self, place: Place, events: Iterator[Any], path: tuple[str, ...]) -> Node:
        items: dict[str, tuple[Place, Node]] = {}
        while type(event := next(events)).__name__ != "MappingEndEvent":
            at = self.place(event.start_mark)
            if type(event).__name__ != "ScalarEvent":
                raise Refused(at, "a key has to be a word")
            key = str(event.value)
            node = self.node(next(events), events, (*path, key))
            dotted = ".".join((*path, key))
            if key in items:
                first = items[key][0]
                self.faults.append(Fault(at, dotted, f"is there twice; the first stands at line {first.line}"))
            elif key == "<<":
                self.faults.append(
                    Fault(at, dotted, "YAML 1.2 has no merge key; put what is shared in a spec of its own")
                )
            else:
                items[key] = at, node
        return Node(items, place, 1 + sum(node.size for _, node in items.values()))

    def scalar(self, event: Any, place: Place) -> Scalar:
        text = str(event.value)
        tag = str(self.resolver.resolve(ScalarNode, text, event.implicit)).rpartition(":")[2]
        digits = text.replace("_", "").lower()
        try:
            if tag == "int":
                bare = digits.lstrip("+-")
                return int(digits, 0) if bare[:2] in ("0b", "0o", "0x") else int(digits)
            if tag == "float":
                return float(digits.replace(".inf", "inf").replace(".nan", "nan"))
        except ValueError:
            if len(text) > 100:
                raise Refused(place, f"a number of {len(text)} digits") from None
            return text
        return {"bool": digits == "true", "null": None}.get(tag, text)
