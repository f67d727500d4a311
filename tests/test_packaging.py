"""Build the wheel and install it as a stranger would: nothing of the source tree may be needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHIPPED = sorted(str(path.relative_to(ROOT / "specs")) for path in (ROOT / "specs").rglob("*.yaml"))


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=280)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy what a release holds, so that building leaves nothing behind in the real tree."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("ironfn", "drivers", "specs", "tests", "bench"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    run(*pip, "--wheel-dir", out, tree, cwd=out)
    (built,) = out.glob("*.whl")
    return built


def clean_environment(where: Path) -> Path:
    """Make an environment that has this one's packages, but not its ironfn, and return its Python."""
    run(sys.executable, "-m", "venv", "--without-pip", where, cwd=where.parent)
    python = where / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=where).strip())
    # A directory that a .pth names is searched, but the .pth files inside it are not: an editable ironfn stays out.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def install(python: Path, *what: str | Path) -> None:
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
    run(*pip, "--no-deps", "--no-build-isolation", "--no-index", *what, cwd=python.parent)


def test_the_wheel_holds_ours_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        "ironfn",
        "ironfn_drivers",
        f"{wheel.name.split('-py3')[0]}.dist-info",
    }
    assert [name for name in names if name.startswith("ironfn_drivers/shipped/")] == [
        f"ironfn_drivers/shipped/{name}" for name in SHIPPED
    ]
    for package, beside in (("ironfn", "ironfn"), ("drivers", "ironfn_drivers")):
        modules = {f"{beside}/{path.relative_to(ROOT / package)}" for path in (ROOT / package).rglob("*.py")}
        assert modules == {name for name in names if name.startswith(f"{beside}/") and name.endswith(".py")}


def test_every_package_is_named_in_pyproject() -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    rooms = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "ironfn").rglob("__init__.py")}
    assert set(table) == rooms | {"ironfn_drivers", "ironfn_drivers.shipped"}


@pytest.mark.parametrize("how", ["wheel", "editable"])
def test_installed_ironfn_answers_from_any_directory(how: str, tree: Path, wheel: Path, tmp_path: Path) -> None:
    python = clean_environment(tmp_path / "venv")
    install(python, *((wheel,) if how == "wheel" else ("--editable", tree)))
    script, empty = python.with_name("ironfn"), tmp_path / "empty"
    empty.mkdir()
    where = run(python, "-c", "import ironfn; print(ironfn.__file__)", cwd=empty).strip()
    assert Path(where).is_relative_to(tmp_path / "venv" if how == "wheel" else tree)
    for cwd in (Path("/"), empty):
        assert "Commands:" in run(script, "--help", cwd=cwd)
        assert "Commands:" in run(python, "-m", "ironfn", "--help", cwd=cwd)
        assert run(script, "specs", "ls", cwd=cwd).count("\n") == len(SHIPPED)
        assert "name: quickstart\n" in run(script, "pretrain", "--dry-run", "pretrain/quickstart", cwd=cwd)
    assert list(empty.iterdir()) == [], "asking leaves nothing behind"
    for name in ("drivers", "specs", "tests", "bench"):
        found = f"from importlib.util import find_spec; assert find_spec({name!r}) is None"
        run(python, "-c", found, cwd=empty)
