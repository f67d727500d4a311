"""Own a run's directory: one process at a time, and one spec from its first step to its last."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import frozen
from cattrs import Converter
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from ironfn.checkpoint import tidy
from ironfn.checkpoint.files import DISK, Files, make_directories, replace_whole
from ironfn.spec.load import dump_spec
from ironfn.spec.records import RunSpec
from ironfn.spec.structure import structure

BOUND = (
    "model",
    "data",
    "sft",
    "dpo",
    "reward",
    "grpo",
    "adapter",
    "optim",
    "train.batch",
    "train.seed",
    "train.precision",
)
"""What a run may not change between its steps: with another value the steps before and after are of two runs."""
FREE = ("data.workers", "data.bad_lines", "dpo.precompute")
"""What lies inside `BOUND` and yet changes no number."""


@frozen
class RunDir:
    """Name the files of a run: ``runs/<name>/…``."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def spec(self) -> Path:
        return self.path / "spec.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def rollouts(self) -> Path:
        """Where what a policy wrote is kept for the updates that learn from it."""
        return self.path / "rollouts"

    @property
    def completions(self) -> Path:
        """What a policy wrote, for people to read."""
        return self.path / "completions.jsonl"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def loss_plot(self) -> Path:
        return self.path / "loss.png"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @staticmethod
    def of(spec: RunSpec) -> RunDir:
        """Return the directory that a spec names."""
        return RunDir(Path(spec.out) / spec.name)

    @contextmanager
    def held(self) -> Generator[RunDir]:
        """Make the directory and keep every other process out of it until the block ends, or this process does.

        What the death of an earlier process left among the checkpoints is put in order.

        The lock is the kernel's (flock on ``lock``), which dies with its process: a file left behind locks nothing.
        ValueError, with the pid, while another process holds it.
        """
        make_directories(self.path.absolute(), DISK)
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(descriptor, self.path)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()}".encode(), 0)
            tidy(self.checkpoints)
            try:
                yield self
            finally:
                os.ftruncate(descriptor, 0)
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may still hold a copy of the descriptor
        finally:
            os.close(descriptor)

    def settle(
        self, spec: RunSpec, *, resuming: bool, override: bool, warn: Callable[[str], None], files: Files = DISK
    ) -> None:
        """Write ``spec.yaml``, once the spec agrees with the one that the run was begun with.

        resuming: whether there are steps to agree with. ValueError, with every difference, where `BOUND` values
        changed; ``override`` lets them pass and tells them to ``warn``.
        """
        changed = self._changed(spec) if resuming and self.spec.exists() else []
        if changed and not override:
            listed = "".join(f"\n  {line}" for line in changed)
            raise ValueError(
                f"{self.path} was begun with another spec:{listed}\n"
                "set these back, give the run another name, or give --override if you mean it"
            )
        for line in changed:
            warn(f"overriding the spec that {self.path} was begun with: {line}")
        text = dump_spec(spec).encode()
        if not self.spec.exists() or self.spec.read_bytes() != text:
            replace_whole(self.spec, text, files)

    def _changed(self, spec: RunSpec) -> list[str]:
        try:
            values = YAML(typ="safe", pure=True).load(self.spec.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, YAMLError) as error:
            values = str(error).split("\n", 1)[0]
        if not isinstance(values, dict):
            raise ValueError(
                f"{self.spec} is damaged ({values}); restore it, or delete it to go on with the spec given"
            )
        began = structure(values, RunSpec)
        if isinstance(began, list):
            problems = "; ".join(f"{'.'.join(map(str, wrong.path))}: {wrong.what}" for wrong in began)
            raise ValueError(f"{self.spec} cannot be compared with the spec of this run: {problems}")
        return differences(began, spec)


def differences(old: RunSpec, new: RunSpec) -> list[str]:
    """Return a line for each `BOUND` value that is not the same: ``model.width: 384 -> 512``."""
    unstructure = Converter().unstructure
    before, after = _flat(unstructure(old), ""), _flat(unstructure(new), "")
    paths = [path for path in before | after if _under(path, BOUND) and not _under(path, FREE)]
    absent = object()
    return [
        f"{path}: {_show(before, path)} -> {_show(after, path)}"
        for path in paths
        if before.get(path, absent) != after.get(path, absent)
    ]


def _under(path: str, prefixes: tuple[str, ...]) -> bool:
    return any(path == prefix or path.startswith(prefix + ".") for prefix in prefixes)


def _flat(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {path: value}
    flat: dict[str, Any] = {}
    for name, inner in value.items():
        flat |= _flat(inner, f"{path}.{name}" if path else str(name))
    return flat


def _show(flat: dict[str, Any], path: str) -> str:
    return repr(flat[path]) if path in flat else "(nothing)"


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise ValueError(f"{path} cannot be locked ({error.strerror}): put the run on a disk with locks") from error
        holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
        raise ValueError(f"{path} is in use by {holder}: wait for it, stop it, or give this run another name") from None
