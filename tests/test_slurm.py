"""The Slurm template, with stand-ins for Slurm: what each task is told, and what becomes of its exit code."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from drivers.launch import Ranks

TEMPLATE = Path(__file__).parents[1] / "docs/slurm.sbatch"

SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for SLURM_PROCID in 0 1 2 3; do
  SLURM_PROCID=$SLURM_PROCID SLURM_LOCALID=$((SLURM_PROCID % 2)) "$@" || code=$?
done
exit ${code:-0}
"""
SCONTROL = """#!/bin/bash
if [[ $1 == show ]]; then printf 'node7\\nnode8\\n'; else echo "$@" >> "$TOLD"; fi
"""
PYTHON = """#!/bin/bash
echo "$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT $*" >> "$TOLD"
[[ $RANK == 2 ]] && exit $CODE || exit 0
"""


@pytest.mark.parametrize("code", [0, 1, 75])
def test_every_task_knows_its_rank_and_75_goes_back_into_the_queue(tmp_path: Path, code: int) -> None:
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", PYTHON)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    told = tmp_path / "told"
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TOLD": str(told), "CODE": str(code)}
    environment |= {"SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NTASKS": "4"}
    environment |= {"SLURM_NTASKS_PER_NODE": "2"}
    done = subprocess.run(["bash", str(TEMPLATE), "my run.yaml", "-s", "mesh.dp=4"], env=environment, timeout=60)
    assert done.returncode == code
    lines = told.read_text().splitlines()
    assert lines[:4] == [
        f"{rank} 4 {rank % 2} 2 node7 23456 -m ironfn pretrain my run.yaml -s mesh.dp=4" for rank in range(4)
    ]
    assert lines[4:] == (["requeue 123456"] if code == 75 else [])
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert Ranks.here(dict(zip(names, lines[3].split(), strict=False))) == Ranks(3, 4, 1, 2, "node7", 23456)
