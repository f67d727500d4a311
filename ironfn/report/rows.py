"""Keep a run's metrics: one JSON object a line, whose rows after a resume are those of the run never stopped."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, cast

from attrs import asdict, field, frozen

if TYPE_CHECKING:
    from ironfn.report.evaluation import Evaluation

Value: TypeAlias = "int | float | str | None"
Row: TypeAlias = dict[str, Any]
"""A row as the file holds it: ``kind``, ``step`` and named values."""

_NAMES: Mapping[str, float] = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@frozen(kw_only=True)
class RunRow:
    """Say what the rows that follow rest on: at step 0, and again where a run goes on with another number of devices.

    parameters: numbers in the model. flops_per_token: forward and backward. peak_flops: of one device, in FLOP/s.
    tokens_per_step: target positions of one step, over all ranks, 0 where they vary. device: its name.
    """

    kind: ClassVar[str] = "run"
    step: int = 0
    parameters: int
    flops_per_token: float
    peak_flops: float
    devices: int = 1
    tokens_per_step: int
    device: str
    extra: dict[str, Value] = field(factory=dict[str, Value])


@frozen(kw_only=True)
class TrainRow:
    """Say how one step went. ``step`` counts the steps done: the first row's is 1.

    loss: nats a target. memory: peak bytes. seconds: spent in the run so far, over all its starts.
    left: seconds to the last step, by the present pace. skipped: steps passed over for non-finite gradients so far.
    mfu: the share of the peak, in [0, 1]; None where the peak is unknown. extra: any more metrics.
    """

    kind: ClassVar[str] = "train"
    step: int
    loss: float
    bits_per_byte: float
    lr: float
    grad_norm: float
    tokens_per_s: float
    mfu: float | None
    memory: int
    seconds: float
    left: float
    skipped: int = 0
    extra: dict[str, Value] = field(factory=dict[str, Value])


@frozen(kw_only=True)
class EvaluationRow:
    """Say what an evaluation after ``step`` steps gave. kind: the split, ``validation`` or ``test``.

    seconds: spent in the run so far, this evaluation included.
    """

    kind: str = "validation"
    step: int
    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int
    bytes: int
    seconds: float
    extra: dict[str, Value] = field(factory=dict[str, Value])

    @classmethod
    def of(cls, evaluation: Evaluation, *, step: int, seconds: float, kind: str = "validation") -> EvaluationRow:
        """Return the row of an evaluation."""
        values = asdict(evaluation)
        return cls(kind=kind, step=step, seconds=seconds, extra=values.pop("metrics"), **values)


AnyRow: TypeAlias = RunRow | TrainRow | EvaluationRow


def as_dict(row: AnyRow) -> Row:
    """Return the row as one flat dict, ``kind`` and ``step`` first. ValueError where an extra hides a field.

    >>> as_dict(EvaluationRow(step=2, loss=1.0, perplexity=2.7, bits_per_byte=0.5, tokens=8, bytes=23, seconds=3.0))
    {'kind': 'validation', 'step': 2, 'loss': 1.0, 'perplexity': 2.7, 'bits_per_byte': 0.5, 'tokens': 8, 'bytes': 23, \
'seconds': 3.0}
    """
    values = asdict(row)
    extra: dict[str, Value] = values.pop("extra")
    flat: Row = {"kind": row.kind, "step": row.step} | values
    hidden = sorted(flat.keys() & extra.keys())
    if hidden:
        raise ValueError(f"the extra metric {hidden[0]!r} has the name of a field of {type(row).__name__}; rename it")
    return flat | extra


class MetricsFile:
    """Append rows to a JSON Lines file; each is with the operating system when ``write`` returns.

    JSON has no numbers that are not finite: they are written as the strings "NaN", "Infinity" and "-Infinity", which
    ``float()`` and every language's parser of numbers take back. Finite floats are written so that they read back
    bit-equal. Serves samples.jsonl as well: every row that has a ``step`` is trimmed alike.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = self.path.open("ab", buffering=0)

    @classmethod
    def new(cls, path: str | Path) -> MetricsFile:
        """Begin an empty file, in place of any that is there."""
        Path(path).unlink(missing_ok=True)
        return cls(path)

    @classmethod
    def open(cls, path: str | Path, step: int) -> MetricsFile:
        """Go on after a checkpoint of ``step``: a torn last line and every row of a later step are dropped first.

        Rows of ``step`` itself stay, so write a step's rows before its checkpoint. The file is replaced atomically.
        ValueError where a line that is no row stands before rows that must be kept.
        """
        trim(Path(path), step)
        return cls(path)

    def write(self, row: AnyRow | Mapping[str, Value]) -> None:
        """Append one row, in one write where the disk takes it so. OSError, with the file, where it is full."""
        flat = dict(row) if isinstance(row, Mapping) else as_dict(row)
        line = json.dumps({name: _encode(value) for name, value in flat.items()}, allow_nan=False)
        data = line.encode() + b"\n"
        try:
            while data:  # a disk that is nearly full takes a part of it, and says no word
                data = data[self._file.write(data) :]
        except OSError as error:
            error.filename = str(self.path)
            raise

    def sync(self) -> None:
        """Wait until the rows are on the disk: what a checkpoint that is about to be saved relies on."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def trim(path: Path, step: int) -> None:
    """Drop the rows of ``path`` that are later than ``step``, and a torn end, by one atomic replacement.

    A file that holds nothing to drop is left as it is. ValueError as in ``MetricsFile.open``.
    """
    if not path.exists():
        return
    before = path.read_bytes()
    kept = b"".join(line + b"\n" for line in _kept(path, before, step))
    if kept == before:
        return
    aside = path.with_name(path.name + ".new")
    with aside.open("wb") as file:
        file.write(kept)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    _sync_directory(path.parent)


def _kept(path: Path, content: bytes, step: int) -> Iterator[bytes]:
    """Yield the lines to keep. Lines that are no rows may stand among those to drop: a power cut leaves such."""
    broken = 0
    for number, line in enumerate(content.split(b"\n"), start=1):
        row = _decode(line)
        if row is None:
            broken = broken or (number if line.strip() else 0)
        elif row["step"] <= step:
            if broken:
                raise ValueError(
                    f"{path}:{broken}: this line is no metric row, and rows up to the checkpoint's step {step} follow "
                    f"it; delete the line to go on without it"
                )
            yield line


def _sync_directory(path: Path) -> None:
    if os.name != "posix":  # elsewhere a directory cannot be opened
        return
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read_lines(path: str | Path) -> list[Row]:
    """Return the objects of a JSON Lines file as they stand; lines that are no row are passed over, as in a live run.

    An absent file has no rows.
    """
    path = Path(path)
    if not path.exists():
        return []
    rows = (_decode(line) for line in path.read_bytes().split(b"\n"))
    return [row for row in rows if row is not None]


def read_rows(path: str | Path) -> list[Row]:
    """Return the rows of a metrics file, with the strings that stand for non-finite numbers read as these."""
    rows = read_lines(path)
    for row in rows:
        for name, value in row.items():
            if isinstance(value, str) and value in _NAMES:
                row[name] = _NAMES[value]
    return rows


def _encode(value: Value) -> Value:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _decode(line: bytes) -> Row | None:
    """Return the row of a line, None where the line holds no object with an integer ``step``."""
    try:
        loaded: object = json.loads(line)
    except (ValueError, RecursionError):  # a UnicodeDecodeError is a ValueError
        return None
    if not isinstance(loaded, dict):
        return None
    row = cast("Row", loaded)
    return row if type(row.get("step")) is int else None
