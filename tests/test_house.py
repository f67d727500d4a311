"""Hold the house to its plan (DESIGN, section 4): which room may import which, and what no module may do.

The rule on state: a module binds no list, dict, set or other container that can change, and has no ``global``. A
constant table is a tuple, a frozenset, a ``MappingProxyType``, or is annotated as a ``Mapping`` or ``Sequence``, to
which the type checker lets nobody write.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ORDER = (
    ("types", "tree", "rng", "pages"),
    ("spec",),
    ("mesh",),
    ("layout",),
    ("data",),
    ("model",),
    ("hf",),
    ("loss",),
    ("grad",),
    ("optim",),
    ("algo",),
    ("generate",),
    ("rewards",),
    ("checkpoint",),
    ("report",),
    ("evals",),
)
FLOOR = {room: floor for floor, rooms in enumerate(ORDER) for room in rooms}
MODULES = sorted((ROOT / "ironfn").rglob("*.py"))
DRIVERS = sorted((ROOT / "drivers").rglob("*.py"))
BENCH = sorted((ROOT / "bench").rglob("*.py"))

MUTABLE_CALLS = frozenset(
    {"dict", "list", "set", "bytearray", "deque", "defaultdict", "OrderedDict", "Counter", "ChainMap", "count", "cycle"}
)
READ_ONLY = ("Mapping[", "Sequence[", "__all__")
MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room_of(path: Path) -> str:
    return path.relative_to(ROOT / "ironfn").parts[0].removesuffix(".py")


def imports(tree: ast.AST, package: str = "") -> Iterator[str]:
    """Yield the full name of every module, and of every name taken from one, that the code imports anywhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
            module = ".".join(filter(None, [base if node.level else "", node.module or ""]))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def package_of(path: Path) -> str:
    return ".".join(path.parent.relative_to(ROOT).parts)


def wrong_way(source: str, room: str, package: str) -> list[str]:
    """List the rooms that a module of ``room`` imports and that stand below its own."""
    tree = ast.parse(source)
    if room == "types":  # its aliases name the Mesh, for the type checker only
        tree.body = [node for node in tree.body if not isinstance(node, ast.If)]
    rooms = [name.split(".")[1] for name in imports(tree, package) if name.startswith("ironfn.")]
    return [other for other in rooms if other in FLOOR and FLOOR[other] > FLOOR[room]]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_one_way(path: Path) -> None:
    room = room_of(path)
    if room in ("__init__", "__main__"):
        assert not [name for name in imports(parse(path)) if name.startswith("ironfn.")]
        return
    assert room in FLOOR, f"{room} has no place in the house; add it to ORDER"
    assert wrong_way(path.read_text(encoding="utf-8"), room, package_of(path)) == []


def test_a_wrong_import_would_be_seen() -> None:
    assert wrong_way("from ironfn.report import rows", "data", "ironfn.data") == ["report"]
    assert wrong_way("def f():\n    import ironfn.algo.step", "optim", "ironfn.optim") == ["algo"]
    assert wrong_way("from ironfn import checkpoint", "spec", "ironfn.spec") == ["checkpoint"]
    assert wrong_way("from ..algo import step", "optim", "ironfn.optim") == ["algo"]
    assert wrong_way("from ironfn.spec.records import RunSpec", "report", "ironfn.report") == []


def forbidden(tree: ast.Module, mesh: bool = False) -> list[str]:
    """List what no module of ironfn/ may do, with its line."""
    found: list[str] = []
    for name in imports(tree):
        root = name.split(".")[0]
        if root in ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"):
            found.append(f"imports {root}")
        if name.startswith("torch.distributed") and not mesh:
            found.append("imports torch.distributed")
        if name in ("os.environ", "os.getenv", "os.putenv", "torch.load", "torch.save"):
            found.append(f"imports {name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            if name in ("os.environ", "os.getenv", "os.putenv", "torch.load", "torch.save"):
                found.append(f"{node.lineno}: {name}")
            if name == "torch.distributed" and not mesh:
                found.append(f"{node.lineno}: {name}")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
            found.append(f"{node.lineno}: {node.func.id}()")
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and getattr(node.value, "value", True):
            found.append(f"{node.value.lineno}: allow_pickle")
    return found


def mutable_state(tree: ast.Module) -> list[str]:
    """List the containers that can change which a module or a class of it binds, and every ``global``."""
    found = [f"{node.lineno}: global" for node in ast.walk(tree) if isinstance(node, ast.Global)]
    bodies = [tree.body, *(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    for statement in (each for body in bodies for each in body):
        if not isinstance(statement, ast.Assign | ast.AnnAssign):
            continue
        shown = ast.unparse(statement.annotation if isinstance(statement, ast.AnnAssign) else statement.targets[0])
        if shown.startswith(READ_ONLY):
            continue
        value = statement.value
        called = getattr(value, "func", None)
        if isinstance(value, MUTABLE) or getattr(called, "id", getattr(called, "attr", "")) in MUTABLE_CALLS:
            found.append(f"{statement.lineno}: a container that can change")
    return found


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_module_reads_the_environment_unpickles_or_evaluates(path: Path) -> None:
    assert forbidden(parse(path), mesh=path.is_relative_to(ROOT / "ironfn/mesh")) == []


@pytest.mark.parametrize("path", DRIVERS, ids=name_of)
def test_no_driver_unpickles_evaluates_or_reaches_past_the_mesh(path: Path) -> None:
    # A driver may read the environment: that is where torchrun says which rank a process is.
    assert [what for what in forbidden(parse(path)) if "environ" not in what and "getenv" not in what] == []


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_module_keeps_state(path: Path) -> None:
    assert mutable_state(parse(path)) == []


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.environ['X']",
        "from os import environ",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.distributed.barrier()",
        "from torch import distributed as dist",
        "import torch.distributed as dist",
        "def f():\n    import pickle",
        "eval('1')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
    ],
)
def test_what_is_forbidden_would_be_seen(code: str) -> None:
    assert forbidden(ast.parse(code))


@pytest.mark.parametrize(
    "code",
    [
        "X = {}",
        "X: dict[str, int] = {}",
        "X = [1]",
        "X = {1}",
        "X = dict(a=1)",
        "X = collections.deque()",
        "X = [a for a in b]",
        "class A:\n    seen = []",
        "def f():\n    global X\n    X = 1",
    ],
)
def test_state_would_be_seen(code: str) -> None:
    assert mutable_state(ast.parse(code))


def test_what_cannot_change_is_no_state() -> None:
    tables = (
        "X = MappingProxyType({1: 2})\nY = (1, 2)\nZ = frozenset({1})\nM: Mapping[str, int] = {}\nT = dict[str, int]"
    )
    assert mutable_state(ast.parse(tables)) == []


@pytest.mark.parametrize("path", MODULES + DRIVERS + BENCH, ids=name_of)
def test_a_module_can_be_read_at_one_sitting(path: Path) -> None:
    assert path.read_text(encoding="utf-8").count("\n") <= 350, "when a module outgrows this, it holds two ideas"


@pytest.mark.parametrize("path", MODULES + DRIVERS + BENCH, ids=name_of)
def test_a_function_is_one_idea(path: Path) -> None:
    functions = [node for node in ast.walk(parse(path)) if isinstance(node, ast.FunctionDef)]
    longest = max(functions, key=lambda node: (node.end_lineno or 0) - node.lineno, default=None)
    assert longest is None or (longest.end_lineno or 0) - longest.lineno < 55, longest.name
