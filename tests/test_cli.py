"""Call the command line as a user does: real processes, their output and their exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from drivers import main as driver
from drivers import specs
from ironfn import __version__
from ironfn.spec.load import load_spec

ROOT = Path(__file__).parents[1]


def ironfn(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run ``python -m ironfn`` with these words."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, "-m", "ironfn", *words], capture_output=True, text=True, cwd=cwd, env=environment, timeout=120
    )


def test_help_names_every_command_and_imports_none_of_them() -> None:
    code = "import sys; from drivers.main import main; main(['--help'], standalone_mode=False); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    text, _, modules = done.stdout.rstrip("\n").rpartition("\n")
    for name, entry in driver.COMMANDS.items():
        assert f"  {name} " in text
        assert f"drivers.{entry.target.partition(':')[0]}" not in modules.split()
    assert not {"torch", "numpy", "ruamel.yaml", "cattrs", "rich"} & set(modules.split())


def test_version() -> None:
    assert ironfn("--version").stdout == f"ironfn, version {__version__}\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("pretrian",), "Error: no command 'pretrian'; did you mean pretrain?"),
        (("xyzzy",), "Error: no command 'xyzzy'"),
        (("specs", "show", "pretrain/quikstart"), "; did you mean pretrain/quickstart?"),
        (("specs", "check"), "Error: Missing argument 'SPEC...'."),
    ],
)
def test_a_word_that_names_nothing_is_a_usage_error(words: tuple[str, ...], line: str) -> None:
    done = ironfn(*words)
    assert done.returncode == 2
    assert done.stderr.rstrip().endswith(line)
    assert done.stdout == ""


def test_a_faulty_spec_exits_78_with_one_line_a_fault_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("learning_rate: 1e-4\ntrain: {steps: 3.7, compile: no}\n")
    done = ironfn("specs", "check", "run.yaml", "-s", "optim.lrr=1", cwd=tmp_path)
    assert done.returncode == 78
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "run.yaml:1:1 learning_rate: unknown key; did you mean optim.lr?",
        "run.yaml:2:16 train.steps: 3.7 is not an integer",
        "run.yaml:2:30 train.compile: 'no' is neither true nor false; write false",
        "-s optim.lrr=1 optim.lrr: unknown key; did you mean lr?",
    ]


def test_a_missing_file_exits_78(tmp_path: Path) -> None:
    done = ironfn("specs", "check", "missing.yaml", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (78, "missing.yaml: cannot be read: no such file or directory\n")


def test_the_printed_spec_is_the_resolved_one_and_loads_again(tmp_path: Path) -> None:
    done = ironfn("specs", "check", "pretrain/gpt2", "-s", "train.steps=77", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "again.yaml").write_text(done.stdout)
    spec = load_spec([tmp_path / "again.yaml"], [], {})
    assert (spec.name, spec.train.steps, spec.model.norm) == ("gpt2", 77, "layer")


def test_every_shipped_spec_is_listed_with_a_line_and_shown_as_it_stands() -> None:
    lines = ironfn("specs", "ls").stdout.splitlines()
    files = sorted((ROOT / "specs").rglob("*.yaml"))
    assert [line.split()[0] for line in lines] == [f"{file.parent.name}/{file.stem}" for file in files]
    assert all(len(line.split()) > 3 for line in lines)
    shown = CliRunner().invoke(driver.main, ["specs", "show", "pretrain/quickstart"])
    assert shown.output == (ROOT / "specs/pretrain/quickstart.yaml").read_text()


def test_a_file_of_the_working_directory_goes_before_a_shipped_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert specs.find_spec("pretrain/quickstart").is_relative_to(ROOT)
    (tmp_path / "pretrain").mkdir()
    (tmp_path / "pretrain/quickstart").write_text("name: mine\n")
    assert specs.find_spec("pretrain/quickstart") == Path("pretrain/quickstart")


def _group(error: Exception) -> click.Group:
    """Return a group like the real one with a single command, which fails."""

    @click.command()
    def fail() -> None:
        raise error

    class One(driver.Modes):
        def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
            return fail

    return One(params=driver.main.params, callback=lambda traceback: None)


def test_what_a_user_caused_is_a_line_and_with_traceback_the_whole_story() -> None:
    plain = CliRunner().invoke(_group(ValueError("steps 3 is past the end; give fewer")), ["fail"])
    assert (plain.exit_code, plain.output) == (1, "Error: steps 3 is past the end; give fewer\n")
    whole = CliRunner().invoke(_group(ValueError("steps 3")), ["--traceback", "fail"])
    assert isinstance(whole.exception, ValueError)


def test_what_only_we_could_cause_is_never_hidden() -> None:
    result = CliRunner().invoke(_group(AssertionError("ours")), ["fail"])
    assert isinstance(result.exception, AssertionError)


def test_dry_run_prints_and_does_not_run() -> None:
    called: list[object] = []

    @click.command()
    @specs.takes_spec
    def mode(spec: object) -> None:
        called.append(spec)

    dry = CliRunner().invoke(mode, ["pretrain/quickstart", "--dry-run", "-s", "optim.lr=1e-4"])
    assert (dry.exit_code, called) == (0, [])
    assert "lr: 0.0001\n" in dry.output
    assert CliRunner().invoke(mode, ["pretrain/quickstart", "-s", "optim.lr=1e-4"]).exit_code == 0
    assert len(called) == 1


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """As in ``ironfn specs show pretrain/gpt2 | head -1``."""
    words = [sys.executable, "-m", "ironfn", "specs", "show", "pretrain/gpt2"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1
