"""What a spec asks of experts is possible, or is refused with its place and a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ironfn.model.arch import complete
from ironfn.model.families import PRESETS
from ironfn.spec.load import load_spec
from ironfn.spec.records import ModelSpec, MoeSpec
from tests.test_spec_errors import faults

MOE = "model: {layers: 2, moe: {experts: 8, "


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (MOE + "top_k: 9}}", "1:45 model.moe.top_k: 9 choices are more than the 8 experts (model.moe.experts)"),
        (MOE + "top_k: 0}}", "1:45 model.moe.top_k: 0 has to be at least 1"),
        (MOE + "jitter: 1.0}}", "1:46 model.moe.jitter: 1.0 has to be at least 0 and below 1"),
        (MOE + "capacity: 0.0}}", "1:48 model.moe.capacity: 0.0 has to be above 0"),
        (MOE + "bias_rate: -0.1}}", "1:49 model.moe.bias_rate: -0.1 cannot be negative"),
        ("model: {moe: {experts: -1}}", "1:24 model.moe.experts: -1 cannot be negative"),
        (
            MOE + "dense_layers: 2}}",
            "1:52 model.moe.dense_layers: 2 dense layers of 2 (model.layers) leave none with experts",
        ),
        (
            "model: {preset: gpt2, moe: {experts: 8}}",
            "1:38 model.mlp_bias: experts have no biases; write `mlp_bias: false`, also where the preset sets it",
        ),
        (
            MOE + "top_k: 1}}",
            "1:45 model.moe.top_k: one choice whose weights sum to 1 weighs 1 always, and the router learns nothing "
            "from the text; use score `softmax` or `sigmoid` and write `renormalize: false`",
        ),
        (
            MOE + "score: softmax_chosen, renormalize: false}}",
            "1:74 model.moe.renormalize: the softmax over the chosen ones sums to 1 already; use score `softmax` for "
            "weights that do not",
        ),
        (
            MOE + "balance: batch}}\ntrain: {batch: 8, micro_batch: 2}",
            "1:47 model.moe.balance: the balance of the whole batch cannot be had from a part of it; use `sequence`, "
            "or all rows at once",
        ),
        (
            MOE + "balance: batch}}\ntrain: {noise_scale_every: 2}",
            "1:47 model.moe.balance: the balance of the whole batch has no gradient of single rows; use `sequence`, or "
            "do not measure it",
        ),
        (
            MOE + "top_k: 2}}\ntrain: {compile: true}",
            "2:18 train.compile: rows are sorted by expert, and how many each gets only the data know: no graph can be "
            "compiled; leave one of them out",
        ),
        (
            MOE + "ffn: 30}, heads: 4, ffn: 64, width: 64}\nmesh: {tp: 4}",
            "2:12 mesh.tp: 4 ranks cannot share an expert's ffn of 30 evenly (model.moe.ffn)",
        ),
        (
            MOE + "top_k: 2}}\nmesh: {ep: 3}\ntrain: {batch: 9}",
            "2:12 mesh.ep: 3 ranks cannot share 8 experts evenly (model.moe.experts)",
        ),
        (
            "mesh: {ep: 2}",
            "1:12 mesh.ep: 2 ranks have no experts to share; set model.moe.experts, or use mesh.dp for the rows",
        ),
        (
            MOE + "top_k: 2}}\nmesh: {ep: 2}\ntrain: {noise_scale_every: 2}",
            "3:28 train.noise_scale_every: the gradient of single rows cannot be had with mesh.ep; leave one of them "
            "out",
        ),
        (
            "mesh: {sequence_parallel: true}",
            "1:27 mesh.sequence_parallel: the positions are shared out over tp, and mesh.tp is 1; raise it, or leave "
            "this out",
        ),
        (
            "mesh: {dp: 2, zero1: true, fsdp: true}",
            "1:22 mesh.zero1: fsdp shares the optimizer's state out already; leave zero1 out",
        ),
    ],
    ids=lambda value: value[-40:],
)
def test_refusals(tmp_path: Path, text: str, line: str) -> None:
    assert faults(tmp_path, text) == [f"run.yaml:{line}"]


def test_what_is_allowed(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {preset: gpt2, mlp_bias: false, layers: 2, heads: 4, moe: {experts: 8, top_k: 1, renormalize: false,"
        " dense_layers: 1, z_weight: 1e-3, jitter: 0.01, capacity: 1.25, balance: batch, ffn: 30}}\n"
        "mesh: {ep: 4, tp: 2, sequence_parallel: true}\ntrain: {noise_scale_every: null}"
    )
    spec = load_spec([file], [], PRESETS)
    assert (spec.model.moe.z_weight, spec.model.moe.capacity) == (1e-3, 1.25)


@pytest.mark.parametrize(
    ("moe", "message"),
    [
        ({"top_k": 9}, "9 choices are more than the 8 experts"),
        ({"dense_layers": 6}, "6 dense layers of 6 .* leave none with experts"),
    ],
    ids=["top_k", "dense_layers"],
)
def test_a_model_that_cannot_be_is_refused_from_python_too(moe: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        complete(ModelSpec(moe=MoeSpec(experts=8, **moe)), 100)
