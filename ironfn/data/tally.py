"""Count what became of everything that was read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import asdict, define, field

SPLITS = ("train", "validation", "test")


@define
class SplitTally:
    """Count what one split of one set holds. bytes: of the UTF-8 text; tokens: with end and FIM tokens.

    trained: of the tokens of examples, those that are targets. An example may be several documents.
    """

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    trained: int = 0


@define
class Tally:
    """Count what became of a set's documents and lines.

    documents: those read. blank: lines without any. bad: those that could not be read, the first of them in
    ``examples``. Of the documents, ``empty`` hold only white space and ``duplicate`` repeat an earlier one; the rest
    are in ``splits``. cleaned: documents that ftfy changed. fim: those rearranged. unknown: unknown-token ids written.
    untaught: examples of which nothing would be trained. forms: how many examples of each form there are.
    """

    files: int = 0
    documents: int = 0
    blank: int = 0
    bad: int = 0
    empty: int = 0
    duplicate: int = 0
    cleaned: int = 0
    fim: int = 0
    unknown: int = 0
    untaught: int = 0
    forms: dict[str, int] = field(factory=dict)
    examples: list[str] = field(factory=list)
    splits: dict[str, SplitTally] = field(factory=lambda: {split: SplitTally() for split in SPLITS})

    @property
    def kept(self) -> int:
        """Count the documents that are in some split."""
        return sum(split.documents for split in self.splits.values())


def to_json(tally: Tally) -> dict[str, Any]:
    """Return the counts as plain values."""
    return asdict(tally)


def from_json(values: Mapping[str, Any]) -> Tally:
    """Read what ``to_json`` gave. TypeError or KeyError where it did not."""
    splits = {name: SplitTally(**counts) for name, counts in values["splits"].items()}
    counts: dict[str, Any] = {**values, "splits": splits}
    return Tally(**counts)


def describe(name: str, tally: Tally) -> list[str]:
    """Say the counts in lines for people, zeros left out where they say nothing."""
    names = ("blank", "bad", "empty", "duplicate", "cleaned", "fim", "unknown", "untaught")
    rest = {name: getattr(tally, name) for name in names}
    parts = [f"{tally.files:,} files", f"{tally.documents:,} documents in"]
    parts += [f"{count:,} of the form {form}" for form, count in sorted(tally.forms.items())]
    parts += [f"{count:,} {what}" for what, count in rest.items() if count]
    lines = [f"{name}: " + ", ".join(parts)]
    for split, counts in tally.splits.items():
        if counts.documents:
            ratio = counts.bytes / max(counts.tokens, 1)
            size = f"{counts.tokens:,} tokens" + (f" ({counts.trained:,} trained)" if counts.trained else "")
            lines.append(
                f"{name}/{split}: {counts.documents:,} documents, {size}, {counts.bytes:,} bytes "
                f"({ratio:.2f} bytes a token)"
            )
    return lines + [f"{name}: passed over {example}" for example in tally.examples]
