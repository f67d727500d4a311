"""Call ``ironfn ckpt`` as a user would."""

from __future__ import annotations

from pathlib import Path

import torch
from click.testing import CliRunner

from drivers.ckpt import command
from drivers.main import main
from ironfn.checkpoint import save
from ironfn.layout.table import Placement, cut, shard
from ironfn.mesh import fake
from ironfn.mesh.axis import Mesh


def call(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(command, [str(a) for a in arguments])
    return result.exit_code, result.output


def make_run(run: Path) -> list[Path]:
    trees = [{"params": {"w": torch.full((3, 4), float(s))}, "opt": {"count": torch.tensor(s)}} for s in (1, 2)]
    meta = {"seed": 5, "spec": "model:\n  width: 4\n"}
    return [save(run / "checkpoints", s, t, meta, file_bytes=16) for s, t in enumerate(trees, 1)]


def test_ls_lists_whole_and_damaged(tmp_path: Path) -> None:
    first, second = make_run(tmp_path)
    (first / "manifest.msgpack").write_bytes(b"x")
    code, out = call("ls", tmp_path)
    lines = [line.split("\t") for line in out.splitlines()]
    assert code == 0
    assert lines[0] == ["step", "bytes", "leaves", "saved", "path"]
    assert lines[1][0] == "1"
    assert lines[1][3].startswith("damaged: manifest.msgpack")
    assert (lines[2][0], lines[2][2], lines[2][4]) == ("2", "2", str(second))
    assert call("ls", tmp_path / "checkpoints")[1] == out


def test_verify_names_file_and_leaf_and_fails(tmp_path: Path) -> None:
    first, second = make_run(tmp_path)
    assert call("verify", tmp_path) == (0, f"{first}: whole\n{second}: whole\n")
    file = second / "shard-00000-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    code, out = call("verify", tmp_path)
    assert code == 1
    assert f"{first}: whole" in out
    assert "shard-00000-of-00002.safetensors: leaf 'params/w': its bytes do not match its checksum" in out
    assert call("verify", first)[0] == 0
    assert call("verify", second)[0] == 1


def test_show_tells_step_leaves_and_spec(tmp_path: Path) -> None:
    first, second = make_run(tmp_path)
    code, out = call("show", tmp_path)
    assert code == 0
    assert out.startswith(f"{second}: step 2, 2 leaves")
    assert "params/w\tF32\t3x4\t48\tshard-00000-of-00002.safetensors" in out
    assert "opt/count\tI64\t-\t8\tshard-00001-of-00002.safetensors" in out
    assert "seed: 5" in out
    assert "spec:\nmodel:\n  width: 4" in out
    assert "step 1," in call("show", first)[1]


def test_what_a_mesh_saved_is_shown_whole(tmp_path: Path) -> None:
    layout = {"w": cut("dp", 1), "own": Placement(owner=1)}
    whole = {"w": torch.ones(3, 4), "own": torch.ones(5)}

    def write(mesh: Mesh) -> Path:
        return save(tmp_path / "checkpoints", 1, shard(whole, layout, mesh), {}, layout=layout, mesh=mesh)

    path = fake.run(write, dp=2, timeout=20)[0]
    out = call("show", tmp_path)[1]
    assert "w\tF32\t3x4\t48\tshard-00000-of-00002.safetensors, shard-00001-of-00002.safetensors" in out
    assert "own\tF32\t5\t20\tshard-00001-of-00002.safetensors" in out
    assert call("ls", tmp_path)[1].splitlines()[1].split("\t")[2] == "2"
    assert call("verify", tmp_path) == (0, f"{path}: whole\n")
    (path / "shard-00001-of-00002.safetensors").unlink()
    assert "shard-00001-of-00002.safetensors: missing" in call("verify", tmp_path)[1]


def test_a_run_without_checkpoints_is_told_so(tmp_path: Path) -> None:
    for name in ("ls", "verify", "show"):
        code, out = call(name, tmp_path)
        assert code == 1
        assert "there are no checkpoints" in out


def test_a_damaged_checkpoint_is_an_error_of_one_line_in_the_whole_command_line(tmp_path: Path) -> None:
    first, _ = make_run(tmp_path)
    (first / "manifest.msgpack").write_bytes(b"x")
    result = CliRunner().invoke(main, ["ckpt", "show", str(first)])
    assert result.exit_code == 1
    assert result.output.startswith(
        f"Error: {first}: manifest.msgpack: the manifest's bytes do not match its own check"
    )
    assert result.output.count("\n") == 1
