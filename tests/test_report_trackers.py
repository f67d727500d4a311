"""Trackers: real event files read back, stand-ins for the optional ones, and failures that stop nothing."""

from __future__ import annotations

import json
import math
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from drivers.trackers import open_trackers

SPEC = {"name": "tiny", "optim": {"lr": 3e-4}}
ROW = {"kind": "train", "step": 3, "loss": 2.5, "lr": 3e-4, "mfu": None, "note": "text"}


def read_events(run_dir: Path) -> Any:
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(run_dir / "tensorboard"), purge_orphaned_data=True)
    events.Reload()
    return events


def test_tensorboard_event_files_hold_every_row(tmp_path: Path) -> None:
    warnings: list[str] = []
    trackers = open_trackers(["tensorboard"], tmp_path, SPEC, warnings.append)
    for step in (1, 2, 3):
        trackers.log(step, {**ROW, "step": step, "loss": 1.0 / step})
    trackers.log(3, {"kind": "validation", "step": 3, "loss": math.nan})
    trackers.text(3, "samples/0", "Once\n```\nupon <script>")
    trackers.close()
    events = read_events(tmp_path)
    loss = events.Scalars("train/loss")
    assert [(event.step, event.value) for event in loss] == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert math.isnan(events.Scalars("validation/loss")[0].value)
    assert set(events.Tags()["scalars"]) == {"train/loss", "train/lr", "validation/loss"}
    (sample,) = events.Tensors("samples/0/text_summary")
    assert sample.tensor_proto.string_val[0] == b"    Once\n    ```\n    upon <script>"
    (spec,) = events.Tensors("spec/text_summary")
    assert json.loads(spec.tensor_proto.string_val[0]) == SPEC
    assert warnings == []


def test_a_resumed_run_has_each_step_once_in_tensorboard(tmp_path: Path) -> None:
    for start, stop, loss in ((0, 8, 1.0), (5, 10, 2.0)):
        trackers = open_trackers(["tensorboard"], tmp_path, SPEC, pytest.fail, step=start)
        for step in range(start + 1, stop + 1):
            trackers.log(step, {"kind": "train", "step": step, "loss": loss})
        trackers.close()
    found = [(event.step, event.value) for event in read_events(tmp_path).Scalars("train/loss")]
    assert found == [(step, 1.0) for step in range(1, 6)] + [(step, 2.0) for step in range(6, 11)]


class Recorder:
    """Stand in for a tracker's module: note every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **named: Any) -> Any:
            self.calls.append((name, args, named))
            return self if name in ("init", "MlflowClient") else types.SimpleNamespace(
                experiment_id="7", info=types.SimpleNamespace(run_id="run-9"), shown=args
            )  # fmt: skip

        return call

    def named(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, named) for called, args, named in self.calls if called == name]


@pytest.mark.parametrize("name", ["wandb", "swanlab", "trackio"])
def test_modules_that_log_dicts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "tiny"
    run_dir.mkdir()
    started = []
    for step in (0, 5):
        module = Recorder()
        monkeypatch.setitem(sys.modules, name, module)
        trackers = open_trackers([name], run_dir, SPEC, pytest.fail, step=step)
        trackers.log(step + 3, ROW)
        trackers.text(step + 3, "samples/0", "<b>")
        trackers.close()
        ((_, given),) = module.named("init")
        started.append(given)
        assert given["project"] == "ironfn"
        assert given["config"] == SPEC
        assert given["resume"] == "allow"
        logged = module.named("log")
        assert logged[0] == (({"train/loss": 2.5, "train/lr": 3e-4},), {"step": step + 3})
        (text,) = logged[1][0][0].values()
        assert text.shown == (("<pre>&lt;b&gt;</pre>",) if name == "wandb" else ("<b>",))
        assert len(module.named("finish")) == 1
    identity = "name" if name == "trackio" else "id"
    assert started[0][identity] == started[1][identity]
    assert "tiny" in (started[0].get("name") or started[0].get("experiment_name"))


def test_mlflow_goes_on_with_the_run_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step, runs in ((0, 1), (5, 0)):
        module = Recorder()
        monkeypatch.setitem(sys.modules, "mlflow", module)
        trackers = open_trackers(["mlflow"], tmp_path, SPEC, pytest.fail, step=step)
        trackers.log(step + 3, ROW)
        trackers.text(step + 3, "../../def main(\n", "Once")
        trackers.text(step + 3, "def main:", "Once")
        trackers.close()
        assert len(module.named("create_run")) == runs
        assert module.named("log_metric") == [
            (("run-9", "train/loss", 2.5), {"step": step + 3}),
            (("run-9", "train/lr", 3e-4), {"step": step + 3}),
        ]
        ((text, _), (other, _)) = module.named("log_text")
        assert text[:2] == other[:2] == ("run-9", "Once")
        paths = [re.fullmatch(r"def-main-[0-9a-f]{8}/(\d{8})\.txt", given[2]) for given in (text, other)]
        assert [path and int(path[1]) for path in paths] == [step + 3, step + 3]
        assert text[2] != other[2]
        assert module.named("set_terminated") == [(("run-9",), {})]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "swanlab", "trackio"])
def test_a_tracker_that_is_not_installed_is_named_with_its_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
    warnings: list[str] = []
    trackers = open_trackers([name], tmp_path, SPEC, warnings.append)
    trackers.log(1, ROW)
    trackers.close()
    (warning,) = warnings
    assert f"pip install 'ironfn[{name}]'" in warning


class Failing:
    """Fail at the call of a name, in the way that is given."""

    def __init__(self, at: str, error: BaseException) -> None:
        self.at, self.error = at, error

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **named: Any) -> Any:
            if name == self.at:
                raise self.error
            return self

        return call


@pytest.mark.parametrize("at", ["init", "log", "finish"])
@pytest.mark.parametrize("error", [RuntimeError("the network is down"), OSError(28, "No space left"), SystemExit(1)])
def test_a_failing_tracker_is_left_out_with_one_warning_and_the_others_go_on(
    at: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", Failing(at, error))
    other = Recorder()
    monkeypatch.setitem(sys.modules, "trackio", other)
    warnings: list[str] = []
    trackers = open_trackers(["wandb", "trackio"], tmp_path, SPEC, warnings.append)
    for step in range(1, 4):
        trackers.log(step, {**ROW, "step": step})
    trackers.close()
    trackers.close()
    (warning,) = warnings
    assert warning.startswith("tracker wandb is off")
    assert str(error) in warning
    assert len(other.named("log")) == 3
    assert len(other.named("finish")) == 1


def test_ctrl_c_is_not_swallowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", Failing("log", KeyboardInterrupt()))
    trackers = open_trackers(["wandb"], tmp_path, SPEC, pytest.fail)
    with pytest.raises(KeyboardInterrupt):
        trackers.log(1, ROW)


def test_an_unknown_name_and_a_read_only_directory_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", Recorder())
    warnings: list[str] = []
    trackers = open_trackers(["wandboard", "wandb"], tmp_path / "absent", SPEC, warnings.append)
    assert trackers.names == ["wandb"]
    assert "no tracker 'wandboard': choose from mlflow, swanlab, tensorboard" in warnings[0]
    assert "a resumed run begins new ones" in warnings[1]


def test_damaged_names_of_runs_begin_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for damaged in ("{", "[1]", "\x00"):
        (tmp_path / "trackers.json").write_text(damaged)
        module = Recorder()
        monkeypatch.setitem(sys.modules, "wandb", module)
        open_trackers(["wandb"], tmp_path, SPEC, pytest.fail)
        ((_, given),) = module.named("init")
        assert len(given["id"]) == 16
        assert json.loads((tmp_path / "trackers.json").read_text()) == {"wandb": given["id"]}
