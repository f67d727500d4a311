"""What the environment says of a process, and one voice for what goes wrong on several."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

from drivers.failures import Failure, alike, together
from drivers.launch import Ranks, bound_kernels, command, quieten, threads
from drivers.main import EX_CONFIG, main
from drivers.rundir import RunDir
from ironfn.mesh import fake
from ironfn.mesh.axis import SINGLE, Mesh

CPU = torch.device("cpu")
TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "n0", "MASTER_PORT": "29"
}  # fmt: skip


def test_a_process_alone_is_rank_0_of_1() -> None:
    assert Ranks.here({}) == Ranks.here({"RANK": "0", "WORLD_SIZE": "1"}) == Ranks(0, 1, 0, 1)
    assert Ranks.here({}).speaks


def test_torchruns_variables_tell_the_place() -> None:
    assert Ranks.here(TORCHRUN) == Ranks(5, 8, 1, 4, "n0", 29)
    elastic = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert Ranks.here(TORCHRUN | elastic) == Ranks(5, 8, 1, 4, "n0", 29, hosted=True, attempt=2)
    bare = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    assert Ranks.here(bare) == Ranks(5, 8, 5, 8, "n0", 29), "one machine, where nothing else is said"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"RANK": "8"}, "RANK is '8', not a number from 0 to 7"),
        ({"RANK": "-1"}, "RANK is '-1'"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE is 'many'"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK is '4', not a number from 0 to 3"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        ({"MASTER_ADDR": None, "RANK": None}, "RANK, MASTER_ADDR is not set; start the ranks with torchrun"),
    ],
    ids=str,
)
def test_a_wrong_environment_is_told(change: dict[str, str | None], what: str) -> None:
    environment = {name: value for name, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(ValueError, match=what):
        Ranks.here(environment)


def test_torch_is_asked_for_its_errors_alone_unless_somebody_wants_more() -> None:
    def level(**environment: str) -> str | None:
        quieten(environment)
        return environment.get("TORCH_CPP_LOG_LEVEL")

    assert (level(), level(**TORCHRUN)) == (None, "ERROR")
    assert level(TORCH_CPP_LOG_LEVEL="INFO", **TORCHRUN) == "INFO"


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(12))
    assert [threads(None, n) for n in (1, 2, 4, 5, 12, 100)] == [None, 6, 3, 2, 1, 1]
    assert threads(3, 4) == threads(3, 1) == 3


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    path = tmp_path / "two.yaml"
    path.write_text("name: two\nmesh: {dp: 2}\n")
    return path


def test_more_ranks_than_processes_are_refused_with_the_command_to_give(spec_file: Path) -> None:
    result = CliRunner().invoke(main, ["pretrain", str(spec_file)])
    assert result.exit_code == EX_CONFIG
    assert "two.yaml:2:7 mesh: dp 2 x tp 1 x ep 1 needs 2 processes and 1 run here" in result.output
    assert "torchrun --nproc-per-node 2 -m ironfn" in result.output
    assert "or set mesh.dp to 1" in result.output
    assert CliRunner().invoke(main, ["pretrain", str(spec_file), "--dry-run"]).exit_code == 0


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_one_rank_of_a_machine_speaks_of_a_spec_that_does_not_fit(
    spec_file: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    for name, value in {**TORCHRUN, "WORLD_SIZE": "4", "RANK": str(rank), "LOCAL_RANK": str(rank % 2)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    result = CliRunner().invoke(main, ["pretrain", str(spec_file)])
    assert result.exit_code == EX_CONFIG
    assert ("needs 2 processes and 4 run here" in result.output) == (rank % 2 == 0)


def test_the_command_names_a_path_that_a_shell_reads() -> None:
    assert command(Path("my runs/a.yaml"), 2) == "torchrun --nproc-per-node 2 -m ironfn pretrain 'my runs/a.yaml'"


def test_a_rank_that_finds_nobody_says_where_it_looked(spec_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(main, ["pretrain", str(spec_file), "-s", "mesh.timeout=1"])
    assert result.exit_code == 1
    assert "Error: rank 1 cannot reach the store at 127.0.0.1:1 (" in result.output
    assert "within mesh.timeout seconds" in result.output


# One voice.


def voices(work: Callable[[Mesh], object], **sizes: int) -> list[tuple[str, bool] | object]:
    """Do a work together on a fake mesh; return what each rank got, or its failure and whether it speaks."""

    def rank(mesh: Mesh) -> object:
        try:
            return together(mesh, CPU, lambda: work(mesh))
        except Failure as failure:
            return failure.format_message(), failure.speaks

    return fake.run(rank, **sizes)


def test_what_succeeds_everywhere_is_returned_to_each() -> None:
    assert voices(lambda mesh: mesh.world.index, dp=2, tp=2) == [0, 1, 2, 3]


def test_what_fails_on_one_rank_ends_all_and_rank_0_names_it() -> None:
    def work(mesh: Mesh) -> None:
        if mesh.world.index == 2:
            raise FileNotFoundError(2, "No such file or directory", "data/tokens")

    line = "rank 2: data/tokens: No such file or directory"
    assert voices(work, dp=4) == [(line, True), (line, False), (line, False), (line, False)]


def test_what_fails_alike_is_told_once_and_what_fails_differently_by_rank() -> None:
    def alike_everywhere(mesh: Mesh) -> None:
        raise ValueError("no data; prepare them")

    assert voices(alike_everywhere, dp=2, ep=2)[0] == ("no data; prepare them", True)

    def differently(mesh: Mesh) -> None:
        raise ValueError("short" if mesh.world.index < 4 else "ünlong" * 2000)

    found = voices(differently, dp=8)[0][0]  # type: ignore[index]
    first, second = found.split("; ")
    assert first == "ranks 0, 1, 2 and 1 more: short"
    assert second.startswith("ranks 4, 5, 6 and 1 more: ünlongünlong")


def test_a_fault_of_ours_shows_its_place_in_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    def work(mesh: Mesh) -> None:
        if mesh.world.index == 1:
            raise KeyError("lost")

    assert voices(work, dp=2)[0] == ("rank 1: KeyError: 'lost'", True)
    said = capsys.readouterr().err
    assert said.startswith("rank 1:\nTraceback")
    assert "test_launch.py" in said


def test_alone_an_error_stays_as_it_is() -> None:
    with pytest.raises(KeyError):
        together(SINGLE, CPU, lambda: {}["x"])


def test_ranks_that_see_other_files_are_told() -> None:
    def rank(mesh: Mesh) -> str:
        try:
            alike(mesh, CPU, "the spec", 171 if mesh.world.index < 3 else (1 << 64) - 1)
        except click.ClickException as failure:
            return failure.format_message()
        return "went on"

    told = "the spec of rank 3 (ffffffffffffffff) is not that of rank 0 (00000000000000ab)"
    told += ": all ranks have to see the same files"
    assert fake.run(rank, dp=4) == [told] * 4
    assert fake.run(rank, dp=3) == ["went on"] * 3


def test_the_directory_is_held_by_one_rank_for_all(tmp_path: Path) -> None:
    """Two meshes in one directory: the second is refused as a whole."""
    with RunDir(tmp_path).held():
        refused = voices(lambda mesh: RunDir(tmp_path).held().__enter__() if mesh.world.index == 0 else None, dp=2)
    assert all("is in use by pid" in line for line, _ in refused)  # type: ignore[misc]


ENDLESS = """
import os, sys
from drivers.launch import bound_kernels
if sys.argv[1] == "bounded":
    bound_kernels()
import torch
torch.set_num_threads(1)
def memory():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
def products(width):
    w = torch.randn(width, 128)
    for rows in range(100, 356):
        torch.ops.mkldnn._linear_pointwise(torch.randn(rows, 128), w, None, "none", [], "")
products(128)
products(256)
before = memory()
products(384)
products(512)
print(memory() - before)
"""


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here")
def test_products_of_ever_new_shapes_do_not_take_ever_more_memory() -> None:
    """After 512 shapes, 512 more: what torch does by itself shows that this can fail."""
    root = Path(__file__).parents[1]
    clean = {name: value for name, value in os.environ.items() if "CACHE_CAPACITY" not in name}
    environment = clean | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    grown: dict[str, float] = {}
    for way in ("bounded", "free"):
        call = [sys.executable, "-c", ENDLESS, way]
        done = subprocess.run(call, capture_output=True, text=True, env=environment, timeout=120)
        assert done.returncode == 0, done.stderr
        grown[way] = float(done.stdout)
    assert grown["bounded"] < 0.5 * grown["free"]


def test_a_command_bounds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        monkeypatch.setenv(name, "9")
        monkeypatch.delenv(name)
    assert CliRunner().invoke(main, ["specs", "ls"]).exit_code == 0
    assert os.environ["LRU_CACHE_CAPACITY"] == os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "256"


def test_what_the_environment_says_of_kernels_stays() -> None:
    environment = {"LRU_CACHE_CAPACITY": "7"}
    bound_kernels(environment)
    assert environment == {"LRU_CACHE_CAPACITY": "7", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256"}
