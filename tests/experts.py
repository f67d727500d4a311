"""Build small mixtures of experts, and take steps with them on any mesh."""

from __future__ import annotations

from typing import Any

import torch

from ironfn import tree
from ironfn.algo.experts import router_bias, watch_experts
from ironfn.algo.step import State, make_step
from ironfn.grad.value_and_grad import accumulate, value_and_grad
from ironfn.layout.table import shard, unshard
from ironfn.loss.lm import lm_loss
from ironfn.mesh.axis import Mesh
from ironfn.model.arch import Arch, complete
from ironfn.model.families import PRESETS
from ironfn.model.forward import Forward
from ironfn.model.tables import table
from ironfn.optim.adamw import adamw
from ironfn.spec.records import ModelSpec, MoeSpec
from ironfn.types import Batch, Params

CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def arch_of(vocab: int = 13, *, model: dict[str, Any] | None = None, **moe: Any) -> Arch:
    """Return a small Llama whose blocks are mixtures of four experts."""
    small: dict[str, Any] = {"layers": 2, "heads": 4, "kv_heads": 4, "head_dim": 4, "width": 16, "ffn": 8}
    small |= {"context": 16, "init_std": 0.5, "pad_vocab_to": 4}
    experts = MoeSpec(**({"experts": 4, "top_k": 2, "ffn": 12, "z_weight": 0.01, "balance_weight": 0.1} | moe))
    return complete(ModelSpec(preset="llama", moe=experts, **(dict(PRESETS["llama"]) | small | (model or {}))), vocab)


def rows_of(batch: Batch, mesh: Mesh) -> Batch:
    """Return this rank's share of the rows."""
    return {name: value.tensor_split(mesh.shares)[mesh.share] for name, value in batch.items()}


def same(found: Params, expected: Params) -> None:
    """Hold two trees equal as the laws ask."""
    theirs = tree.flatten(expected)
    assert set(tree.flatten(found)) == set(theirs)
    for path, leaf in tree.flatten(found).items():
        torch.testing.assert_close(leaf, theirs[path], **CLOSE, msg=lambda m, p=path: f"{p}: {m}")


def steps(
    arch: Arch, params: Params, batch: Batch, mesh: Mesh, how: Forward, count: int = 2, micro: int | None = None
) -> tuple[State, list[dict[str, float]]]:
    """Take steps of AdamW on this rank's share; return the state with whole parameters, and the metrics."""
    layout = table(mesh.sequence_parallel)
    mine, opt = shard(tree.clone(params), layout, mesh), adamw(eps=1e-4)
    vg = value_and_grad(lm_loss(arch, how, chunk=5))
    vg = vg if micro is None else accumulate(vg, micro)
    carry = watch_experts(arch)
    step = make_step(vg, opt, lambda _: 0.01, table=layout, mesh=mesh, carry=carry, clip=0.5)
    bias = router_bias(arch)
    state = State(0, mine, opt.init(mine), extra={"fixed": bias} if bias else {})
    seen: list[dict[str, float]] = []
    for _ in range(count):
        state, metrics = step(state, rows_of(batch, mesh))
        seen.append(metrics)
    return State(state.step, unshard(state.params, layout, mesh), {}, extra=state.extra), seen
