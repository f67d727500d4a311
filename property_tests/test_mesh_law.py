"""Laws 1, 2, 10 and 11: the same step on every mesh, for every split, with or without donation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ironfn import tree
from ironfn.algo.step import State, make_step
from ironfn.grad.remat import recompute
from ironfn.grad.value_and_grad import accumulate, value_and_grad
from ironfn.layout.table import shard, unshard
from ironfn.loss.lm import lm_loss
from ironfn.mesh import fake
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.model.arch import Arch
from ironfn.model.attention import Dropout
from ironfn.model.forward import Forward, keep
from ironfn.model.init import init
from ironfn.model.tables import table
from ironfn.types import Batch, Params
from property_tests.strategies import archs, batch_of, optimizer, optimizers, params_of

CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def rows_of(batch: Batch, mesh: Mesh) -> Batch:
    """Return the rows of this rank of the data-parallel axis."""
    return {name: value.tensor_split(mesh.dp.size)[mesh.dp.index] for name, value in batch.items()}


def same(found: Params, expected: Params) -> None:
    theirs = tree.flatten(expected)
    for path, leaf in tree.flatten(found).items():
        torch.testing.assert_close(leaf, theirs[path], **CLOSE, msg=lambda m, p=path: f"{p}: {m}")


def two_steps(
    arch: Arch, params: Params, batch: Batch, mesh: Mesh, name: str, how: Forward, micro: int = 99, donate: bool = False
) -> tuple[Params, list[dict[str, float]]]:
    """Take two steps on this rank's share and return the whole parameters."""
    layout = table(mesh.sequence_parallel)
    mine = shard(tree.clone(params), layout, mesh)
    opt = optimizer(name)
    vg = accumulate(value_and_grad(lm_loss(arch, how, chunk=5)), micro)
    step = make_step(vg, opt, lambda s: 0.01 * (s + 1), table=layout, mesh=mesh, clip=0.5, donate=donate)
    state, seen = State(0, mine, opt.init(mine)), []
    for _ in range(2):
        state, metrics = step(state, rows_of(batch, mesh))
        seen.append(metrics)
    return unshard(state.params, layout, mesh), seen


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_step_is_the_same_on_every_mesh(data: st.DataObject) -> None:
    """unshard(step(shard(state), shard(batch), mesh)) == step(state, batch, single), in float64, rel. 1e-9."""
    dp, tp = data.draw(st.sampled_from([(2, 1), (1, 2), (2, 2), (3, 1), (1, 4), (4, 1)]), "mesh")
    arch = data.draw(archs(tp=tp), "arch")
    name = data.draw(optimizers() if tp == 1 else st.just("adamw"), "optimizer")
    sequence_parallel = tp > 1 and data.draw(st.booleans(), "sequence parallel")
    dropout = data.draw(st.sampled_from([None, Dropout(0.3, 7)]), "dropout")
    run = data.draw(st.sampled_from([keep, recompute]), "remat")
    micro = data.draw(st.integers(1, 3), "micro batch")
    rows, seed = dp * data.draw(st.integers(1, 2), "rows a rank"), data.draw(st.integers(0, 99), "seed")
    batch = batch_of(arch, rows, 8, seed, documents=data.draw(st.booleans(), "documents"))
    params, how = params_of(arch), Forward(run=run, dropout=dropout)
    alone, metrics = two_steps(arch, params, batch, SINGLE, name, Forward(dropout=dropout))
    ranks = fake.run(
        lambda mesh: two_steps(arch, params, batch, mesh, name, how, micro),
        dp=dp, tp=tp, sequence_parallel=sequence_parallel,
    )  # fmt: skip
    for found, seen in ranks:
        same(found, alone)
        for mine, theirs in zip(seen, metrics, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-11)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_split_of_a_batch_changes_a_step(data: st.DataObject) -> None:
    arch = data.draw(archs())
    batch = batch_of(arch, 5, 7, data.draw(st.integers(0, 99)), data.draw(st.booleans()))
    batch["weight"][data.draw(st.integers(0, 4))] = 0.0  # a micro-batch with nothing to learn
    params, micro = params_of(arch), data.draw(st.integers(1, 5))
    whole, _ = two_steps(arch, params, batch, SINGLE, "adamw", Forward())
    parts, _ = two_steps(arch, params, batch, SINGLE, "adamw", Forward(), micro)
    same(parts, whole)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_donation_changes_no_bit(data: st.DataObject) -> None:
    arch, name = data.draw(archs()), data.draw(optimizers())
    batch, params = batch_of(arch, 3, 6, 1, True), params_of(arch)
    before = tree.clone(params)
    kept, _ = two_steps(arch, params, batch, SINGLE, name, Forward())
    given_away, _ = two_steps(arch, params, batch, SINGLE, name, Forward(), donate=True)
    for path, leaf in tree.flatten(kept).items():
        assert torch.equal(leaf, tree.flatten(given_away)[path]), path
        assert torch.equal(tree.flatten(params)[path], tree.flatten(before)[path]), path


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_first_weights_are_the_same_on_every_mesh(data: st.DataObject) -> None:
    tp = data.draw(st.sampled_from([2, 4]))
    arch = data.draw(archs(tp=tp))
    layout = table(False)
    whole = tree.flatten(init(arch, 3, layout, SINGLE))
    for found in fake.run(lambda mesh: unshard(init(arch, 3, layout, mesh), layout, mesh), tp=tp, dp=2):
        for path, leaf in tree.flatten(found).items():
            assert torch.equal(leaf, whole[path]), path
