"""A directory that somebody made to do harm is refused: at once, in little memory, and nothing outside it is opened."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from ironfn.hf.config import family_of, read_spec
from ironfn.hf.directory import describe
from ironfn.hf.families import FAMILIES
from ironfn.hf.untrusted import open_inside

from . import hf_hostile
from .hf_models import CONFIGS, model_of, quiet, taken_in

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good") / "hf"
    with quiet():
        model_of("llama").save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path


class Opened:
    """Note every file that is opened while it watches. An audit hook cannot be taken off again, so there is one."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.watching = False
        sys.addaudithook(self.hear)

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.watching and event == "open" and isinstance(arguments[0], str):
            self.paths.append(arguments[0])


@pytest.fixture(scope="module")
def hook() -> Opened:
    return Opened()


@pytest.fixture
def opened(hook: Opened) -> Iterator[Opened]:
    hook.paths, hook.watching = [], True
    yield hook
    hook.watching = False


@pytest.mark.timeout(20)
@pytest.mark.parametrize("case", list(hf_hostile.CASES))
def test_it_is_refused(case: str, good: Path, tmp_path: Path, opened: Opened) -> None:
    spoil, why = hf_hostile.CASES[case]
    shutil.copytree(good, tmp_path / "d")
    spoil(tmp_path / "d")
    opened.paths = []
    assert why in hf_hostile.refused(tmp_path / "d")
    outside = [p for p in opened.paths if Path(p).parent != tmp_path / "d" and not p.endswith((".py", ".pyc"))]
    assert outside == []
    assert not [p for p in opened.paths if p.endswith(".bin")]


def test_the_good_one_is_not(good: Path, opened: Opened) -> None:
    opened.paths = []
    describe(good)
    taken_in(good)
    assert {Path(p).name for p in opened.paths} >= {"config.json", "model.safetensors", "tokenizer.json"}


def test_a_link_inside_the_directory_is_followed(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "d")
    (tmp_path / "d/model.safetensors").rename(tmp_path / "d/real.safetensors")
    (tmp_path / "d/model.safetensors").symlink_to("real.safetensors")
    assert taken_in(tmp_path / "d")
    with pytest.raises(ValueError, match="is missing"):
        open_inside(tmp_path / "d", "nothing.safetensors")


def test_a_chat_template_is_carried_and_never_run(good: Path, tmp_path: Path) -> None:
    bomb = "{% for a in range(10**9) %}{% for b in range(10**9) %}{{ a * b }}{% endfor %}{% endfor %}"
    shutil.copytree(good, tmp_path / "d")
    (tmp_path / "d/chat_template.jinja").write_text(bomb)
    assert describe(tmp_path / "d").carried["chat_template.jinja"].decode() == bomb


def test_all_are_refused_in_little_memory(good: Path, tmp_path: Path) -> None:
    """By a process of its own, whose whole memory is counted; the limit is two seconds each."""
    arguments = [sys.executable, "-m", "tests.hf_hostile", str(good), str(tmp_path)]
    done = subprocess.run(
        arguments, cwd=ROOT, capture_output=True, text=True, timeout=2 * len(hf_hostile.CASES), check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 500e6


ODD: tuple[Any, ...] = (None, True, 0, -1, 1.5, 10**30, "yarn", [None], {"a": 1})


def changed(config: dict[str, Any], every: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a config with each of its values, at any depth, made odd: all ways for an object, two for the others."""
    for number, (key, value) in enumerate(config.items()):
        deep = isinstance(value, dict)
        for odd in ODD if deep else (ODD[number % len(ODD)], ODD[(number + 4) % len(ODD)]):
            yield config | {key: odd}
        if deep:
            own = {inner: x for inner, x in value.items() if inner not in every}
            yield from (config | {key: inner} for inner in changed(own, every))


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_config_of_odd_values_is_read_or_refused_and_nothing_else(name: str) -> None:
    every = transformers.PretrainedConfig().to_dict()  # what all have, such as id2label, is nothing to us
    own = {key: value for key, value in CONFIGS[name]().to_dict().items() if key not in every}
    config = json.loads(json.dumps(own)) | {"architectures": [model_of(name).__class__.__name__]}
    read_spec(config, family_of(config, FAMILIES))
    refused = 0
    for odd in changed(config, every):
        try:
            read_spec(odd, family_of(odd, FAMILIES))
        except ValueError:
            refused += 1
    assert refused >= 10
