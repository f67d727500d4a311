"""Decide of every document whether it is kept, and to which split it belongs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import xxhash
from attrs import evolve, frozen

from ironfn.data.readers import Bad, Blank, Document, read
from ironfn.data.sources import Source
from ironfn.data.tally import Tally
from ironfn.spec.records import SetSpec, SplitSpec

_EXAMPLES = 10


@frozen
class Admitted:
    """Hold a document that is kept. digest: the hexadecimal xxh3 of its text, by which it is known everywhere."""

    text: str
    text_bytes: int
    digest: str
    split: str


def admit(
    sources: Sequence[Source],
    spec: SetSpec,
    split: SplitSpec,
    bad_lines: Literal["stop", "count"],
    tally: Tally,
) -> Iterator[Admitted]:
    """Yield a set's documents, cleaned and without repeats, and count everything in ``tally``.

    ValueError at the first bad line where ``bad_lines`` is stop. Only the digests of the kept documents stay in memory.
    """
    clean = _cleaner(sources) if spec.clean else None
    seen: set[bytes] = set()
    for source in sources:
        tally.files += 1
        for item in read(source, spec.text, spec.split_on):
            if isinstance(item, Document):
                kept = _admit(item, clean, split, seen if spec.deduplicate else None, tally)
                if kept is not None:
                    yield kept
            elif isinstance(item, Blank):
                tally.blank += 1
            else:
                count_bad(item, bad_lines, tally)


def _admit(
    item: Document, clean: Callable[[str], str] | None, split: SplitSpec, seen: set[bytes] | None, tally: Tally
) -> Admitted | None:
    tally.documents += 1
    if clean is not None:
        text = clean(item.text)
        if text != item.text:
            tally.cleaned += 1
            item = evolve(item, text=text, utf8=text.encode())
    if not item.text or item.text.isspace():
        tally.empty += 1
        return None
    digest = xxhash.xxh3_128_digest(item.utf8)
    if seen is not None:
        if digest in seen:
            tally.duplicate += 1
            return None
        seen.add(digest)
    name = split_of(digest, split)
    counts = tally.splits[name]
    counts.documents += 1
    counts.bytes += len(item.utf8)
    return Admitted(item.text, len(item.utf8), digest.hex(), name)


def split_of(digest: bytes, split: SplitSpec) -> str:
    """Return the split of a document by its digest, a fixed point of [0, 1): test is the low end, validation the high.

    So neither other documents nor a change of one share moves a document between the other two splits.
    """
    point = (int.from_bytes(digest[:8], "big") >> 11) / 2**53
    if point < split.test:
        return "test"
    return "validation" if point >= 1 - split.validation else "train"


def count_bad(item: Bad, bad_lines: Literal["stop", "count"], tally: Tally) -> None:
    """Count what cannot be used, or raise a ValueError that says how to have it counted."""
    if bad_lines == "stop":
        raise ValueError(
            f"{item.place}: {item.what}; correct it, leave the file out, or set data.bad_lines: count to pass over "
            "and count what is like it"
        )
    tally.bad += 1
    if len(tally.examples) < _EXAMPLES:
        tally.examples.append(f"{item.place}: {item.what}")


def _cleaner(sources: Sequence[Source]) -> Callable[[str], str]:
    code = next((source for source in sources if source.code), None)
    if code is not None:
        raise ValueError(
            f"{code.path}: cleaning is for prose and would change what program text means; "
            "put such files into a set of their own with clean: false"
        )
    try:
        ftfy: Any = importlib.import_module("ftfy")
    except ImportError as error:
        raise ValueError("clean: true needs ftfy: pip install 'ironfn[clean]'") from error
    # HTML entities and escape codes are content; what is repaired is wrong decoding, ligatures, line ends and controls.
    config = ftfy.TextFixerConfig(unescape_html=False, remove_terminal_escapes=False, explain=False)
    return lambda text: ftfy.fix_text(text, config)
