"""Send a run's rows to trackers. A tracker that fails is left out with a warning; it never stops the run."""

from __future__ import annotations

import html
import importlib
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import xxhash
from attrs import define

from ironfn.report.rows import Row

PROJECT = "ironfn"


class Tracker(Protocol):
    """Take a run's rows and texts. Every method may raise; ``open_trackers`` wraps what does."""

    def log(self, step: int, row: Row) -> None:
        """Record the numbers of a row, under ``kind/name``."""
        ...

    def text(self, step: int, name: str, text: str) -> None:
        """Record a text, such as a sample."""
        ...

    def close(self) -> None:
        """Send what is left and end the run."""
        ...


@define
class Start:
    """Hold what a tracker needs to begin, or to go on with, a run.

    step: the steps done before this start. ids: the trackers' own names for the run, by tracker.
    """

    directory: Path
    spec: Mapping[str, Any]
    step: int
    ids: dict[str, str]


def open_trackers(
    names: Sequence[str], run_dir: str | Path, spec: Mapping[str, Any], warn: Callable[[str], object], step: int = 0
) -> Trackers:
    """Open the trackers of these names; what cannot be opened is warned of and left out.

    spec: the resolved run, as plain values. step: the checkpoint's, when the run goes on: the same run is continued.
    """
    start = Start(Path(run_dir), spec, step, _read_ids(Path(run_dir)))
    opened: dict[str, Tracker] = {}
    for name in names:
        try:
            opened[name] = _OPENERS[name](start)
        except KeyError:
            warn(f"there is no tracker {name!r}: choose from {', '.join(sorted(_OPENERS))}")
        except ImportError as error:
            warn(f"tracker {name} is off, {error}: pip install 'ironfn[{name}]'")
        except (Exception, SystemExit) as error:
            warn(f"tracker {name} is off: it could not be opened ({_describe(error)})")
    _write_ids(start, warn)
    return Trackers(opened, warn)


class Trackers:
    """Be all of a run's trackers at once. The first failure of one disables it, with one warning."""

    def __init__(self, trackers: dict[str, Tracker], warn: Callable[[str], object]) -> None:
        self._trackers = trackers
        self._warn = warn

    @property
    def names(self) -> list[str]:
        """Return the names of those that still work."""
        return list(self._trackers)

    def log(self, step: int, row: Row) -> None:
        """Record a row with each."""
        self._each(lambda tracker: tracker.log(step, row))

    def text(self, step: int, name: str, text: str) -> None:
        """Record a text with each."""
        self._each(lambda tracker: tracker.text(step, name, text))

    def close(self) -> None:
        """End each; there is none afterwards."""
        self._each(lambda tracker: tracker.close())
        self._trackers = {}

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except (Exception, SystemExit) as error:
                del self._trackers[name]
                self._warn(f"tracker {name} is off from here on: {_describe(error)}")


def numbers(row: Row) -> dict[str, float]:
    """Return the numbers of a row under ``kind/name``.

    >>> numbers({"kind": "train", "step": 3, "loss": 2.5, "mfu": None})
    {'train/loss': 2.5}
    """
    return {
        f"{row['kind']}/{name}": value
        for name, value in row.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }


@define
class TensorBoard:
    """Write event files under ``tensorboard/`` of the run; rows past the checkpoint are hidden when a run goes on."""

    writer: Any

    @classmethod
    def open(cls, start: Start) -> TensorBoard:
        module = importlib.import_module("torch.utils.tensorboard")
        purge = start.step + 1 if start.step else None
        writer = module.SummaryWriter(str(start.directory / "tensorboard"), purge_step=purge, flush_secs=10)
        writer.add_text("spec", _code_block(json.dumps(start.spec, indent=2, default=str)), start.step)
        return cls(writer)

    def log(self, step: int, row: Row) -> None:
        for name, value in numbers(row).items():
            self.writer.add_scalar(name, value, step)

    def text(self, step: int, name: str, text: str) -> None:
        self.writer.add_text(name, _code_block(text), step)

    def close(self) -> None:
        self.writer.close()


@define
class Wandb:
    """Log to Weights & Biases."""

    run: Any
    module: Any

    @classmethod
    def open(cls, start: Start) -> Wandb:
        wandb = importlib.import_module("wandb")
        run = wandb.init(
            project=PROJECT,
            name=start.directory.name,
            dir=str(start.directory),
            config=dict(start.spec),
            id=start.ids.setdefault("wandb", secrets.token_hex(8)),
            resume="allow",
        )
        return cls(run, wandb)

    def log(self, step: int, row: Row) -> None:
        self.run.log(numbers(row), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        self.run.log({name: self.module.Html(f"<pre>{html.escape(text)}</pre>")}, step=step)

    def close(self) -> None:
        self.run.finish()


@define
class Mlflow:
    """Log to MLflow."""

    client: Any
    run: str

    @classmethod
    def open(cls, start: Start) -> Mlflow:
        mlflow = importlib.import_module("mlflow")
        client = mlflow.MlflowClient()
        if "mlflow" not in start.ids:
            found = client.get_experiment_by_name(PROJECT)
            experiment = found.experiment_id if found else client.create_experiment(PROJECT)
            run = client.create_run(experiment, run_name=start.directory.name)
            start.ids["mlflow"] = run.info.run_id
            client.log_dict(start.ids["mlflow"], dict(start.spec), "spec.json")
        return cls(client, start.ids["mlflow"])

    def log(self, step: int, row: Row) -> None:
        for name, value in numbers(row).items():
            self.client.log_metric(self.run, name, value, step=step)

    def text(self, step: int, name: str, text: str) -> None:
        folder = re.sub(r"\W+", "-", name)[:60].strip("-")  # a prompt may hold what a path may not
        self.client.log_text(self.run, text, f"{folder}-{xxhash.xxh32_hexdigest(name.encode())}/{step:08d}.txt")

    def close(self) -> None:
        self.client.set_terminated(self.run)


@define
class Module:
    """Log to SwanLab or trackio, whose modules are alike: one run a process."""

    module: Any
    text_type: str

    @classmethod
    def swanlab(cls, start: Start) -> Module:
        module = importlib.import_module("swanlab")
        module.init(
            project=PROJECT,
            experiment_name=start.directory.name,
            config=dict(start.spec),
            logdir=str(start.directory / "swanlab"),
            id=start.ids.setdefault("swanlab", secrets.token_hex(10)),
            resume="allow",
        )
        return cls(module, "Text")

    @classmethod
    def trackio(cls, start: Start) -> Module:
        module = importlib.import_module("trackio")
        name = start.ids.setdefault("trackio", f"{start.directory.name}-{secrets.token_hex(3)}")
        module.init(project=PROJECT, name=name, config=dict(start.spec), resume="allow")
        return cls(module, "Markdown")

    def log(self, step: int, row: Row) -> None:
        self.module.log(numbers(row), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        self.module.log({name: getattr(self.module, self.text_type)(text)}, step=step)

    def close(self) -> None:
        self.module.finish()


_OPENERS: Mapping[str, Callable[[Start], Tracker]] = {
    "tensorboard": TensorBoard.open,
    "wandb": Wandb.open,
    "mlflow": Mlflow.open,
    "swanlab": Module.swanlab,
    "trackio": Module.trackio,
}


def _read_ids(run_dir: Path) -> dict[str, str]:
    """Return the names that the trackers gave the run when it began: a resumed run goes on under them."""
    try:
        found = json.loads((run_dir / "trackers.json").read_text())
    except (OSError, ValueError):
        return {}
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}


def _write_ids(start: Start, warn: Callable[[str], object]) -> None:
    if not start.ids:
        return
    try:
        (start.directory / "trackers.json").write_text(json.dumps(start.ids))
    except OSError as error:
        warn(f"the trackers' names for the run could not be written ({error}): a resumed run begins new ones")


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _code_block(text: str) -> str:
    """Return Markdown that shows the text as it is: indented, since a text may hold any fence."""
    return "\n".join("    " + line for line in text.splitlines())
