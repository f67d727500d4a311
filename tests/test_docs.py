"""What the pages say exists: every field and default, every file, every test, every command."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from drivers import rundir
from drivers.main import COMMANDS, main
from ironfn.model.families import PRESETS
from ironfn.report.rows import EvaluationRow, RunRow, TrainRow
from ironfn.spec import records
from ironfn.spec.load import load_spec

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def plain(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(text)


def fields(record: type, path: str = "") -> dict[str, Any]:
    """Return every field of a record by dotted path, with its default; sections are walked, not listed."""
    found: dict[str, Any] = {}
    for each in attrs.fields(record):
        default = each.default.factory() if isinstance(each.default, attrs.Factory) else each.default  # type: ignore[arg-type]
        if attrs.has(type(default)):
            found |= fields(type(default), f"{path}{each.name}.")
        else:
            found[path + each.name] = default
    return found


def told() -> dict[str, tuple[str, str]]:
    """Return what docs/pretrain.md says of each field, by dotted path: the default in YAML, and the meaning."""
    found: dict[str, tuple[str, str]] = {}
    for heading, body in re.findall(r"^### ([\w.]+)\n(.*?)(?=^### |\Z)", read("pretrain.md"), re.M | re.S):
        for name, default, meaning in re.findall(r"^\| `(\w+)` \|(.*?)\|(.*)\|$", body, re.M):
            found[name if heading == "top" else f"{heading}.{name}"] = default.strip().strip("`"), meaning
    return found


def test_the_page_lists_every_field_of_a_spec_with_its_default() -> None:
    expected = fields(records.RunSpec) | fields(records.SetSpec, "data.sets.")
    page = told()
    assert set(page) == set(expected)
    for path, default in expected.items():
        if path not in ("data.sets", "data.sets.sources"):
            assert plain(page[path][0]) == default, path


def choices(record: type, path: str = "") -> dict[str, list[str]]:
    """Return the values of every field that has a fixed few."""
    found: dict[str, list[str]] = {}
    for each in attrs.fields(record):
        default = each.default.factory() if isinstance(each.default, attrs.Factory) else each.default  # type: ignore[arg-type]
        if attrs.has(type(default)):
            found |= choices(type(default), f"{path}{each.name}.")
        elif "Literal" in str(each.type):
            found[path + each.name] = re.findall(r"['\"](\w+)['\"]", str(each.type))
    return found


def test_the_page_names_every_choice() -> None:
    expected = choices(records.RunSpec) | choices(records.SetSpec, "data.sets.")
    assert len(expected) > 15
    page = told()
    for path, values in expected.items():
        row = " ".join(page[path])
        assert [value for value in values if not re.search(rf"\b{value}\b", row, re.I)] == [], path


def test_the_spec_of_the_page_is_a_spec(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(re.findall(r"^```yaml\n(.*?)^```", read("pretrain.md"), re.M | re.S)[0])
    assert load_spec([path], [], PRESETS).name == "mine"


def test_the_page_lists_every_metric() -> None:
    page = read("pretrain.md")
    for record in (TrainRow, EvaluationRow, RunRow):
        for each in attrs.fields(record):
            assert each.name in ("kind", "step", "extra") or f"`{each.name}`" in page, each.name


def test_the_page_lists_what_binds_a_run() -> None:
    words = {"model", "data", "sft", "dpo", "reward", "grpo", "adapter", "optimizer", "batch", "seed", "precision"}
    assert {name.removeprefix("train.").replace("optim", "optimizer") for name in rundir.BOUND} == words
    (said,) = re.findall(r"What binds a run is (.*?)\.", read("pretrain.md"), re.S)
    assert words <= set(re.findall(r"\w+", said))


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_commands_are_commands(page: Path) -> None:
    """Each `ironfn word`, and each `ironfn word word` of a command with commands of its own, answers --help."""
    said = re.findall(r"\bironfn ([\w-]+)(?: (\w+))?", page.read_text(encoding="utf-8"))
    for name, inner in sorted({pair for pair in said if pair[0] in COMMANDS}):
        words = [name, inner] if name in ("data", "optim", "ckpt", "specs") and inner else [name]
        result = CliRunner().invoke(main, [*words, "--help"])
        assert result.exit_code == 0, words
    spelled = re.findall(r"(?:`|^\$ )ironfn ([a-z][a-z-]*)", page.read_text(encoding="utf-8"), re.M)
    assert set(spelled) <= set(COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), link
    for path in re.findall(r"`((?:ironfn|drivers|tests|property_tests|specs|docs)/[\w/.]+\.\w+)", text):
        assert (ROOT / path).exists(), path


def test_the_laws_name_tests_that_exist() -> None:
    text = read("laws.md")
    named = re.findall(r"`((?:tests|property_tests)/\w+\.py)::(\w+)`", text)
    assert len(named) > 40
    for path, name in named:
        defined = {
            node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.FunctionDef)
        }
        assert name in defined, f"{path}::{name}"
    assert [int(number) for number in re.findall(r"^## (\d+)\.", text, re.M)] == list(range(1, 12))


def test_every_property_test_of_the_mesh_is_named() -> None:
    text = read("laws.md")
    for name in re.findall(r"^def (test_\w+)", (ROOT / "property_tests/test_mesh_law.py").read_text(), re.M):
        assert name in text, name


def test_the_learning_path_leads_past_every_module_once() -> None:
    text = read("learning_path.md")
    named = re.findall(r"`((?:ironfn|drivers)/[\w/]+\.py)`", text)
    modules = {
        str(path.relative_to(ROOT))
        for folder in ("ironfn", "drivers")
        for path in (ROOT / folder).rglob("*.py")
        if not path.name.startswith("__")
    }
    assert modules - set(named) == set(), "modules that the path leaves out"
    assert sorted(named) == sorted(set(named)), "modules that come twice"


def test_the_index_names_every_page() -> None:
    assert {page.name for page in PAGES} - {"README.md"} == set(re.findall(r"\]\((\w+\.md)\)", read("README.md")))
