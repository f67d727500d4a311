"""Read what a run's directory holds."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from attrs import frozen

from ironfn.report.rows import Row, read_lines, read_rows
from ironfn.report.series import Points, columns


@frozen
class Subject:
    """What a run is about: a number of its training rows, one of its evaluations, and what both are called.

    outliers: the share of them that a picture may leave on its edge.
    """

    train: str
    held: str
    title: str
    unit: str
    outliers: float = 0.005


LOSS = Subject("loss", "loss", "Loss", "nats per token")
REWARD = Subject("reward", "accuracy", "Reward", "mean of the texts", outliers=0.0)


@frozen
class Run:
    """What the report of a run is made of.

    columns: the numbers of the rows, by kind and name. spec: the resolved spec's values, empty if it cannot be read.
    written: when the last row was.
    """

    name: str
    rows: list[Row]
    columns: dict[tuple[str, str], Points]
    samples: list[Row]
    spec_text: str
    spec: Mapping[str, Any]
    written: datetime | None

    @classmethod
    def read(cls, run_dir: Path) -> Run:
        """Read a directory; every file may be absent."""
        metrics, spec = run_dir / "metrics.jsonl", run_dir / "spec.yaml"
        text = spec.read_text("utf-8", errors="replace") if spec.exists() else ""
        rows = read_rows(metrics)
        return cls(
            name=run_dir.resolve().name,
            rows=rows,
            columns=columns(rows),
            samples=read_lines(run_dir / "samples.jsonl"),
            spec_text=text,
            spec=_parse(text),
            written=datetime.fromtimestamp(metrics.stat().st_mtime, UTC) if metrics.exists() else None,
        )

    def column(self, kind: str, name: str) -> Points:
        """Return a column; one that no row has is empty."""
        return self.columns.get((kind, name), [])

    def last(self, kind: str) -> Row:
        """Return the last row of a kind, an empty one where there is none."""
        return next((row for row in reversed(self.rows) if row.get("kind") == kind), {})

    def section(self, name: str) -> Mapping[str, Any]:
        """Return a section of the spec, an empty one where it is absent."""
        return _mapping(self.spec.get(name))

    @property
    def subject(self) -> Subject:
        """Return what is to be seen first: a loss says nothing where a model learns by rewards for what it writes.

        Those of a group differ, and the run says by how much; what KTO calls a reward is a part of its loss.
        """
        return REWARD if self.column("train", "reward_std") else LOSS

    @property
    def kinds(self) -> list[str]:
        """Return the names of the evaluated splits."""
        known = {kind for kind, _ in self.columns} - {"run", "train"}
        return sorted(known, key=lambda kind: (kind != "validation", kind))

    @property
    def steps(self) -> tuple[int, int]:
        """Return the first and the last step that has a row."""
        seen = [row["step"] for row in self.rows if row.get("kind") != "run"]
        return (min(seen), max(seen)) if seen else (0, 0)


def _parse(text: str) -> Mapping[str, Any]:
    """Return the spec's values for the headline; a file that is no mapping is shown as text all the same."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        return _mapping(YAML(typ="safe", pure=True).load(text))
    except (YAMLError, ValueError, RecursionError):
        return {}


def _mapping(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}
