"""``ironfn optim groups``: what a user reads about the groups."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from drivers.main import main

SPEC = """
data: {length: 32, tokenizer: {vocab_size: 300}}
model: {preset: llama, vocab_size: 300, width: 16, layers: 3, heads: 2, kv_heads: 1, ffn: 24, context: 32}
optim: {name: muon, lr: 1e-3}
"""


@pytest.fixture
def spec(tmp_path: Path) -> str:
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC, encoding="utf-8")
    return str(path)


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["optim", "groups", *words])


def table(result: Result) -> dict[tuple[str, str], list[str]]:
    assert result.exit_code == 0, result.output
    return {(line.split()[0], line.split()[1]): line.split()[2:] for line in result.stdout.splitlines()[1:]}


def test_the_table_names_every_leaf_once_folded_over_the_layers(spec: str) -> None:
    rows = table(run(spec))
    assert rows["muon", "blocks/*/attn/wk"] == ["3", "16x8", "384", "1,536"]
    assert rows["muon", "blocks/*/mlp/w_down"] == ["3", "24x16", "1,152", "4,608"]
    assert rows["adamw", "embed/tokens"] == ["1", "300x16", "4,800", "38,400"]
    assert rows["adamw_no_decay", "blocks/*/norm1/scale"] == ["3", "16", "48", "384"]
    matrices = 3 * (16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 24)
    norms = 7 * 16
    assert rows["muon", "(all)"] == ["21", f"{matrices:,}", f"{4 * matrices:,}"]
    assert rows["total", "(all)"] == ["29", f"{matrices + 4800 + norms:,}", f"{4 * matrices + 8 * (4800 + norms):,}"]


def test_an_override_moves_leaves_and_a_bfloat16_run_counts_its_masters(spec: str) -> None:
    rows = table(run(spec, "-s", "optim.groups={attn/w.: adamw}", "-s", "train.precision.params=bfloat16"))
    assert rows["adamw", "blocks/*/attn/wk"] == ["3", "16x8", "384", "4,608"]
    assert rows["muon", "blocks/*/mlp/w_down"] == ["3", "24x16", "1,152", "9,216"]


def test_an_override_that_matches_nothing_is_refused_without_a_traceback(spec: str) -> None:
    result = run(spec, "-s", "optim.groups={atn/wq: adamw}")
    assert result.exit_code == 1
    assert "no parameter's path has ['atn/wq'] in it" in result.output
    assert isinstance(result.exception, SystemExit)
