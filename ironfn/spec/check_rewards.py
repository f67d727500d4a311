"""Check the rewards of a spec, each one's fields and what they need of each other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from ironfn.spec.records import GraderSpec, JudgeSpec
from ironfn.spec.structure import Path, show

Fault = tuple[tuple[Path, ...], str]

_OWNERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "answer": ("math", "exact", "code"),
        "words": ("keyword", "soft_keyword", "sections"),
        "pattern": ("pattern",),
        "path": ("function", "model"),
        "judge": ("judge",),
        "squash": ("model",),
    }
)
"""Which kinds look at a field."""

_TAKEN = ("text", "reward", "ended")
"""What completions.jsonl has beside the rewards' names."""


def rewards(at: Path, found: Mapping[str, GraderSpec]) -> Iterator[Fault]:
    """Yield the faults of ``grpo.rewards``, as `spec.check` lists them. at: where that stands."""
    if not found:
        yield (at,), "names no reward; write for example `rewards: {right: {kind: math}}`"
    for name, one in found.items():
        if re.fullmatch(r"[\w.-]{1,60}", name) is None or name in _TAKEN:
            what = f"is no name of a reward; give up to 60 letters, digits, . _ -, and none of {', '.join(_TAKEN)}"
            yield ((*at, name),), f"{show(name)} {what}"
        yield from _reward((*at, name), one)
    if found and all(one.weight == 0 for one in found.values()):
        yield tuple((*at, name, "weight") for name in found), "every reward has weight 0: nothing would be learned"


def _reward(at: Path, one: GraderSpec) -> Iterator[Fault]:
    usual = GraderSpec()
    for name, kinds in _OWNERS.items():
        if getattr(one, name) != getattr(usual, name) and one.kind not in kinds:
            what = f"is for {' and '.join(kinds)}, and kind is {one.kind}; leave it out"
            yield ((*at, name), (*at, "kind")), what
    yield from _of_its_kind(at, one)
    if abs(one.weight) > 1e6:
        yield ((*at, "weight"),), f"{one.weight:g} is too large; write -1e6 to 1e6"
    for name in ("low", "high"):
        if abs(getattr(one, name)) > 1e12:
            yield ((*at, name),), f"{getattr(one, name):g} is too large; write -1e12 to 1e12"
    if not one.low < one.high:
        yield ((*at, "low"), (*at, "high")), f"{one.low:g} is not below {one.high:g} (high)"
    if one.seconds is not None and not 0 < one.seconds <= 86_400:
        yield ((*at, "seconds"),), f"{one.seconds:g} has to be above 0 and no more than a day"


def _of_its_kind(at: Path, one: GraderSpec) -> Iterator[Fault]:
    kind = (*at, "kind")
    if one.kind in ("keyword", "soft_keyword", "sections") and not one.words:
        yield ((*at, "words"), kind), f"{one.kind} looks for words; give some"
    if one.kind == "function" and re.fullmatch(r"[\w.]+:\w+", one.path) is None:
        yield ((*at, "path"), kind), f"{show(one.path)} is no function; write package.module:function"
    if one.kind == "pattern":
        try:
            re.compile(one.pattern)
        except re.error as error:
            yield ((*at, "pattern"),), f"{show(one.pattern)} is not a regular expression: {error}"
        if not one.pattern:
            yield ((*at, "pattern"), kind), "a pattern of nothing matches everything; write one"
    if one.kind == "judge":
        yield from _judge((*at, "judge"), one.judge)
    if one.kind == "model":
        if not one.path.strip():
            yield ((*at, "path"), kind), "names no directory; write that of a reward model"
        if not one.squash and (one.low, one.high) == (0.0, 1.0):
            what = "the numbers of a reward model may be any; set low and high, or leave this out"
            yield ((*at, "squash"), (*at, "low"), (*at, "high")), what


def _judge(at: Path, judge: JudgeSpec) -> Iterator[Fault]:
    if re.fullmatch(r"https?://[^\s/@?#]+(/[^\s?#]*)?", judge.url) is None:
        what = "is no address of an API; write one such as https://host/v1, without name, key or query"
        yield ((*at, "url"),), f"{show(_open(judge.url))} {what}"
    if not judge.model.strip():
        yield ((*at, "model"),), "names no model; write the one to ask for"
    if judge.key is not None and re.fullmatch(r"[A-Z_][A-Z0-9_]{0,99}", judge.key) is None:
        what = "has to be the name of an environment variable, in capitals, such as JUDGE_KEY; never a key itself"
        yield ((*at, "key"),), what  # which is why it is not shown
    if not judge.low < judge.high:
        yield ((*at, "low"), (*at, "high")), f"{judge.low:g} is not below {judge.high:g} (high)"
    for name in ("tokens", "tries", "failures", "together"):
        if getattr(judge, name) < 1:
            yield ((*at, name),), f"{getattr(judge, name)} has to be at least 1"
    if judge.together > 256:
        yield ((*at, "together"),), f"{judge.together} questions at one time are too many; write 256 at the most"
    for name in ("rest", "remembered"):
        if getattr(judge, name) < 0:
            yield ((*at, name),), f"{getattr(judge, name):g} cannot be negative"


def _open(url: str) -> str:
    """Return an address without what may be a password in it."""
    return re.sub(r"//[^/]*@", "//…@", url)
