"""Kill real runs and real saves: what comes after a resume is what would have come without the death.

The campaign of hundreds of kills is ``python -m bench kills``; here are enough of them to notice a fault.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.kills import compare
from ironfn.checkpoint import DISK, load, newest, save, steps, tidy
from tests.faults import recording, watched

ROWS = [{"step": step, "loss": 1.0 / step, "batch": f"{step:x}"} for step in range(1, 6)]


def in_a_fresh_parent(code: str) -> dict:
    """Run code that forks runs in a process that has done nothing but import."""
    code = f"import json, attrs\nfrom bench import kills\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_runs_killed_at_random_moments_go_on_as_if_nothing_had_been() -> None:
    found = in_a_fresh_parent("print(json.dumps(attrs.asdict(kills.random_kills(20, steps=12, every=3, seed=1))))")
    assert found["kills"] == 20
    assert (found["losses"], found["samples"]) == (0, 0)


DEATHS = """
def last_save(names):  # all that is no write, and of the many alike writes a few
    begin = len(names) - 2 - names[::-1].index("free")
    return [place for place in range(begin, len(names)) if names[place] != "write" or place % 12 == 0]
print(json.dumps(attrs.asdict(kills.deaths(steps=2, every=1, choose=last_save))))
"""


def test_runs_that_die_before_an_operation_of_a_save_and_of_a_deletion_go_on_too() -> None:
    found = in_a_fresh_parent(DEATHS)
    assert found["deaths"] > 20
    assert (found["losses"], found["samples"]) == (0, 0)


FORGETFUL = """
from ironfn import tree
right = kills.drivers.run.load_newest
def forgetful(*arguments, into, **named):
    found = right(*arguments, into=into, **named)
    if found is not None:
        tree.map(lambda leaf: leaf.zero_(), into["opt"])
    return found
kills.drivers.run.load_newest = forgetful
in_the_second_save = lambda names: [len(names) - 2 - names[::-1].index("free")]
print(json.dumps(attrs.asdict(kills.deaths(steps=4, every=2, choose=in_the_second_save))))
"""


def test_a_resume_that_forgets_the_moments_is_found_out() -> None:
    found = in_a_fresh_parent(FORGETFUL)
    assert (found["deaths"], found["losses"], found["samples"]) == (1, 1, 0)  # step 4: step 3 has yet to use them


SIGNALLED = """
import os, pathlib, signal, tempfile, time
with tempfile.TemporaryDirectory() as room:
    spec = kills.prepare(pathlib.Path(room), steps=80, every=1000)
    wanted = kills.run_whole(spec("whole"))
    codes, done = {}, []
    for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
        run = spec(name)
        metrics = pathlib.Path(run.out) / run.name / "metrics.jsonl"
        pid = kills.fork(lambda: kills.train(run), pathlib.Path(run.out) / "signalled.log")
        while not metrics.exists() or len(metrics.read_bytes().splitlines()) < 15:
            time.sleep(0.001)
        for _ in range(3):
            os.kill(pid, getattr(signal, name))
        codes[name] = kills.wait(pid)
        done.append(len(kills.rows(metrics.parent)))
        codes[name + " wrong"] = kills.compare(kills.run_whole(run), wanted)
    print(json.dumps({"codes": codes, "done": done}))
"""


def test_a_run_told_to_stop_saves_exits_with_75_and_goes_on_bit_for_bit() -> None:
    found = in_a_fresh_parent(SIGNALLED)
    for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
        assert found["codes"][name] == 75
        assert found["codes"][name + " wrong"] == [0, 0]
    assert all(10 < done < 80 for done in found["done"])


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lambda rows: None, (0, 0)),
        (lambda rows: rows[2].update(loss=rows[2]["loss"] * (1 + 2**-52)), (1, 0)),
        (lambda rows: rows[2].update(batch="x"), (0, 1)),
        (lambda rows: rows.pop(), (1, 1)),
        (lambda rows: rows.append(rows[0]), (1, 1)),
        (lambda rows: rows.append({"step": 9, "loss": 1.0, "batch": "9"}), (1, 1)),
    ],
)
def test_the_comparison_sees_every_kind_of_difference(change: object, wrong: tuple[int, int]) -> None:
    rows = copy.deepcopy(ROWS)
    change(rows)  # type: ignore[operator]
    assert compare(rows, ROWS) == wrong


def test_a_process_killed_before_any_operation_of_a_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    def tree(step: int) -> dict:
        return {"w": torch.full((100,), float(step)), "count": torch.tensor(step)}

    def replay(directory: Path, before: object) -> None:
        for step in (1, 2, 2):  # the last one replaces its predecessor
            save(directory, step, tree(step), {}, file_bytes=400, files=watched(before))  # type: ignore[arg-type]

    names: list[str] = []
    replay(tmp_path / "counted", lambda name, arguments: names.append(name))
    reached: set[int] = set()
    for place in range(len(names)):
        left = iter(range(place, -1, -1))
        child = os.fork()
        if child == 0:

            def before(name: str, arguments: tuple, left: object = left) -> None:
                if next(left) == 0:  # type: ignore[call-overload]
                    os.kill(os.getpid(), signal.SIGKILL)

            replay(tmp_path / str(place), before)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        directory = tmp_path / str(place)
        tidy(directory)
        best = newest(directory, pytest.fail)
        if best is not None:
            step = load(best)[1]["step"]
            assert torch.equal(load(best)[0]["w"], tree(step)["w"])
            reached.add(step)
        save(directory, 3, tree(3), {}, files=recording([], DISK))
        assert sorted(p.name for p in directory.iterdir()) == [p.name for p in steps(directory).values()]
    assert reached == {1, 2}
