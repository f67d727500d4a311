"""Programs in the sandbox: good ones pass, hostile ones neither pass, nor escape, nor live on."""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from ironfn.rewards import sandbox as place
from ironfn.rewards import seccomp
from ironfn.rewards.code import code_reward, program_of, same, written_tests
from ironfn.rewards.each import each
from ironfn.rewards.sandbox import Bounds, Ran, Sandbox
from ironfn.rewards.values import Completion, Failure, Result, Score
from tests.hostile import PROGRAMS

SECRET = "SECRET-0123456789abcdef0123456789abcdef"
MIB = 1 << 20
SMALL = Bounds(seconds=1.0, wall=2.0, memory=256 * MIB, processes=4, files=8 * MIB, output=256 << 10)


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox(SMALL)


@pytest.fixture(scope="module")
def patient() -> Sandbox:
    """A sandbox that a busy machine does not make late."""
    return Sandbox(evolve(SMALL, seconds=30.0, wall=60.0, output=8 * MIB))


def graded(sandbox: Sandbox, text: str, tests: Any, **options: Any) -> Result:
    return code_reward(sandbox, **options)(Completion("", text, {"tests": tests}))


def let_in(folder: Path) -> None:
    """Let everybody into a folder of the tests."""
    for path in (folder, *folder.parents):
        if path.stat().st_uid == os.getuid() and path.is_relative_to(tempfile.gettempdir()):
            path.chmod(path.stat().st_mode | 0o055)


def inhabitants(namespace: str) -> list[int]:
    """Return the processes of this machine that live in a namespace of processes."""
    found: list[int] = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{name}/ns/pid") == namespace:
                found.append(int(name))
        except OSError:  # it ended while we looked
            continue
    return found


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the namespaces of all runs from now on, as their first processes were in them."""
    namespaces: list[str] = []
    open_it = os.pidfd_open

    def opened(pid: int, flags: int = 0) -> int:
        namespaces.append(os.readlink(f"/proc/{pid}/ns/pid"))
        return open_it(pid, flags)

    monkeypatch.setattr(place.os, "pidfd_open", opened)
    return namespaces


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_hostile_program_neither_passes_nor_escapes_nor_lives_on(
    name: str, sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: list[str]
) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    let_in(tmp_path)  # nothing but the sandbox keeps anybody from it
    monkeypatch.setenv("REWARD_SECRET", SECRET)
    before = sorted(os.listdir(tmp_path)), os.listdir("/dev")
    case = {"args": [str(secret), os.getpid()], "expected": SECRET}
    assert graded(sandbox, PROGRAMS[name], {"entry": "f", "cases": [case]}) == Score(0.0)
    assert secret.read_text() == SECRET
    assert (sorted(os.listdir(tmp_path)), os.listdir("/dev")) == before
    own = os.readlink("/proc/self/ns/pid")
    (inside,) = (namespace for namespace in seen if namespace != own)
    assert inhabitants(inside) == []


def test_there_are_many_hostile_programs() -> None:
    assert len(PROGRAMS) > 70
    assert all(body.strip() for body in PROGRAMS.values())


def test_what_lives_in_a_namespace_would_be_found() -> None:
    assert os.getpid() in inhabitants(os.readlink("/proc/self/ns/pid"))


ADD = {"entry": "add", "cases": [{"args": [1, 2], "expected": 3}, {"args": [[1], [2]], "expected": [1, 2]}]}


def test_a_good_program_passes(patient: Sandbox) -> None:
    fenced = "Here:\n```python\ndef add(a, b):\n    print('chatter')\n    return a + b\n```\nDone."
    assert graded(patient, fenced, ADD) == Score(1.0)
    assert graded(patient, "def add(a, b): return 3", ADD) == Score(0.0)
    assert graded(patient, "def add(a, b): return 3", ADD, partial=True) == Score(0.5)
    assert graded(patient, "def add(a, b): return int(a) + b", ADD, partial=True) == Score(0.5)
    assert graded(patient, "def add(a, b): return a + b\n\0", ADD) == Score(0.0)
    assert graded(patient, "    return a + b", ADD | {"before": "def add(a, b):\n"}) == Score(1.0)
    assert graded(patient, "import math, re, json, random, itertools, collections, dataclasses, typing, heapq\n"
                  "from decimal import Decimal\ndef add(a, b): return a + b", ADD) == Score(1.0)  # fmt: skip


def test_values_are_compared_by_type(patient: Sandbox) -> None:
    def worth(body: str, expected: Any) -> Result:
        return graded(patient, f"def f(): return {body}", {"entry": "f", "cases": [{"args": [], "expected": expected}]})

    right = [("1", 1), ("(1, 'a')", [1, "a"]), ("{'a': [None, True]}", {"a": [None, True]}), ("0.1 + 0.2", 0.3),
             ("'é'", "é")]  # fmt: skip
    assert [worth(*pair) for pair in right] == [Score(1.0)] * len(right)
    wrong = [("1", True), ("True", 1), ("1.0", 1), ("1", 1.0), ("'1'", 1), ("[1, 2]", [2, 1]), ("{1}", [1]),
             ("{1: 2}", {}), ("0.30001", 0.3), ("None", 0), ("1e400", 1e300), ("[]", None)]  # fmt: skip
    assert [worth(*pair) for pair in wrong] == [Score(0.0)] * len(wrong)
    assert not same([float("nan")], [float("nan")])


def test_a_program_that_reads_and_prints(patient: Sandbox) -> None:
    tests = {"cases": [{"stdin": "1 2\n", "expected": "3\n"}, {"stdin": "10 -4", "expected": "6"}]}
    assert graded(patient, "a, b = map(int, input().split())\nprint(a + b, ' ')", tests) == Score(1.0)
    assert graded(patient, "import sys\nprint(sum(map(int, sys.stdin.read().split())))\nexit()", tests) == Score(1.0)
    assert graded(patient, "print(3)", tests, partial=True) == Score(0.5)
    assert graded(patient, "print(3)\nraise SystemExit(1)", tests, partial=True) == Score(0.0)
    assert graded(patient, "print(' 3')", tests, partial=True) == Score(0.0)
    long = {"cases": [{"stdin": "x" * (4 * MIB), "expected": str(4 * MIB)}]}
    assert graded(patient, "print(len(input()))", long) == Score(1.0)


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("x = 1", "x = 1"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```py\nx = 1\n```\nor better\n```python\nx = 2\n```", "x = 2\n"),
        ("```python\nx = 1", "x = 1"),
        ("```bash\nls\n```", ""),
        ("", ""),
    ],
)
def test_the_program_of_a_text_is_its_last_block(text: str, program: str) -> None:
    assert program_of(text) == program


@pytest.mark.parametrize(
    "tests",
    [None, {}, [], {"cases": []}, {"entry": "f", "cases": [{"args": [1]}]}, {"entry": "f", "cases": [{"expected": 1}]},
     {"entry": "f", "cases": [{"stdin": "", "expected": 1}]}, {"cases": [{"args": [], "expected": 1}]}, {"cases": "x"}],
)  # fmt: skip
def test_tests_that_test_nothing_are_no_score(patient: Sandbox, tests: Any) -> None:
    [result] = each(code_reward(patient))([Completion("", "def f(): pass", {"tests": tests})])
    assert isinstance(result, Failure)
    assert "tests" in result.what


def test_tests_may_be_written_as_python(patient: Sandbox) -> None:
    tests = written_tests("f", ["((1, 2), 'a')", "([], None)"], ["[(1, 2), 'a']", "[[], None]"], "def f(a, b):\n")
    assert tests["cases"][0] == {"args": [[1, 2], "a"], "expected": [[1, 2], "a"]}
    assert graded(patient, "    return [a, b]", tests) == Score(1.0)
    assert graded(patient, "    return [b, a]", tests) == Score(0.0)
    for given, expected in (("(1,)", "x"), ("(1,)", "{1}"), ("(open('x'),)", "1"), ("(", "1"), ("(1e999,)", "1")):
        with pytest.raises(ValueError, match="no test of JSON values"):
            written_tests("f", [given], [expected])


def test_what_a_program_can_take_is_bounded(patient: Sandbox) -> None:
    def count(body: str) -> int:
        source = f"import os, time\ndef f():\n  n = 0\n  try:\n{body}\n  except (OSError, MemoryError): return n"
        ran = patient.call(source, "f", [[]])
        assert isinstance(ran, Ran)
        return int(ran.output.decode().removeprefix('{"value": ').removesuffix("}\n"))

    assert count("    while True:\n      if os.fork() == 0: time.sleep(99)\n      n += 1") == SMALL.processes - 1
    write = "with open(f'/tmp/{n}', 'wb') as file: file.write(bytes(1 << 16))"
    written = count(f"    while True:\n      {write}\n      n += 1")
    assert SMALL.files * 0.9 < written * (1 << 16) <= SMALL.files
    taken = count("    kept = []\n    while True:\n      kept.append(bytearray(1 << 20))\n      n += 1")
    assert 0.5 * SMALL.memory < taken * MIB < SMALL.memory
    assert 50 < count("    kept = []\n    while True:\n      kept.append(os.dup(0))\n      n += 1") < 64


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("import time\nwhile True: time.sleep(1)", "time"),
        ("import os, time\nwhile True:\n  os.write(1, b'x')\n  time.sleep(0.001)", "time"),
        ("while True: print('x' * 999)", "output"),
        ("for n in range(10**6): open(f'/tmp/{n}', 'w').close()\nwhile True: pass", "files"),
        ("import os\nfor n in range(10**6): os.mkdir(f'/tmp/{n}')\nwhile True: pass", "files"),
    ],
)
def test_what_a_program_has_used_up_is_told(program: str, why: str) -> None:
    wall = 2.0 if why == "time" else 60.0
    ran = Sandbox(Bounds(seconds=60.0, wall=wall, names=500)).feed(program, "")
    assert isinstance(ran, Ran)
    assert (ran.code, ran.why) == (None, why)
    assert 0 <= len(ran.output) < Bounds().output + (1 << 16)


def test_a_program_starts_no_other_unless_it_may() -> None:
    source = "import os\ndef f():\n  try: return os.fork()\n  except OSError: return -1"
    ran = Sandbox(Bounds(seconds=30.0, wall=60.0)).call(source, "f", [[]])
    assert ran == Ran(b'{"value": -1}\n', 0, "done")


def test_a_program_sees_nothing_of_the_machine(patient: Sandbox) -> None:
    looks = "[os.listdir('/'), dict(os.environ), os.getpid(), os.getuid(), os.uname().nodename]"
    ran = patient.call(f"import os\ndef f(): return {looks}", "f", [[]])
    assert isinstance(ran, Ran)
    root, environment, pid, user, name = json.loads(ran.output)["value"]
    assert not {"root", "home", "etc", "proc", "sys", "work", "var", "run", "bin"} & set(root)
    assert set(environment) <= {"PYTHONHASHSEED", "PWD", "LC_CTYPE"}
    assert (pid, user, name) == (1, place.NOBODY, "sandbox")


def test_runs_beside_each_other_do_not_meet(patient: Sandbox) -> None:
    looks = "[open('/tmp/mine').read(), os.listdir('/tmp')]"
    source = f"import os\ndef f(n):\n  open('/tmp/mine', 'w').write(str(n))\n  return {looks}"
    with ThreadPoolExecutor(4) as pool:
        runs = list(pool.map(lambda n: patient.call(source, "f", [[n]]), range(12)))
    assert [run.output for run in runs if isinstance(run, Ran)] == [
        f'{{"value": ["{n}", ["mine"]]}}\n'.encode() for n in range(12)
    ]


def test_runs_leave_no_file_and_no_thread_open(patient: Sandbox) -> None:
    patient.feed("print(1)", "")
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for source in ("print(1)", "raise SystemExit(3)", "import os\nos.fork()"):
        patient.feed(source, "")
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_a_sandbox_that_breaks_is_no_score(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_command", [sandbox._command[0], "--no-such-option"])
    result = graded(sandbox, "def add(a, b): return a + b", ADD)
    assert isinstance(result, Failure)
    assert result.kind == "refused"
    assert "no-such-option" in result.what


def no_bwrap(path: Path) -> str:
    return str(path)


def denied(path: Path) -> str:
    script = path / "bwrap"
    script.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    script.chmod(0o755)
    path.chmod(0o755)
    return str(path)


def broken(path: Path) -> str:
    script = path / "bwrap"
    script.write_text("#!/no/such/shell\n")
    script.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("made", "said"),
    [(no_bwrap, "no bubblewrap here"), (denied, "No permissions to create"), (broken, "did not start")],
)
def test_without_a_sandbox_nothing_starts(
    made: Callable[[Path], str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    which = shutil.which
    let_in(tmp_path)
    path = made(tmp_path)
    monkeypatch.setattr(place.shutil, "which", lambda name: which(name, path=path))
    with pytest.raises(ValueError, match=f"(?s){said}.*apt-get install -y bubblewrap"):
        Sandbox()


def test_limits_are_above_nothing() -> None:
    with pytest.raises(ValueError, match="above 0"):
        Bounds(memory=0)


def interpreted(program: bytes, machine: int, number: int) -> int:
    """Run a filter as the kernel's manual says its instructions work."""
    steps = [struct.unpack("=HBBI", program[at : at + 8]) for at in range(0, len(program), 8)]
    at = held = 0
    while True:
        code, true, false, k = steps[at]
        if code == 0x06:
            return k
        if code == 0x20:
            held = {0: number, 4: machine}[k]
            at += 1
        else:
            at += 1 + (true if (held == k if code == 0x15 else held >= k) else false)


@pytest.mark.parametrize("machine", seccomp.MACHINES)
def test_the_filter_denies_what_it_names_and_nothing_else(machine: str) -> None:
    program, own = seccomp.program(machine), seccomp.MACHINES[machine]
    which = list(seccomp.MACHINES).index(machine)
    denied = {pair[which] for pair in seccomp.DENIED.values()}
    for number in range(500):
        assert interpreted(program, own, number) == (0x50001 if number in denied else 0x7FFF0000), number
    assert interpreted(program, own, 0x40000000 + 29) == interpreted(program, 0x40000003, 29) == 0x80000000
    with pytest.raises(ValueError, match="riscv64"):
        seccomp.program("riscv64")
