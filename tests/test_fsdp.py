"""Parameters shared out over dp: how long a block's whole weights live, and in which dtype its gradients add up."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ironfn import tree
from ironfn.grad.remat import recompute
from ironfn.grad.value_and_grad import value_and_grad
from ironfn.layout.fsdp import fetch, shard_table
from ironfn.layout.reduce import reduce_grads
from ironfn.layout.table import WHOLE_TABLE, cut, shard
from ironfn.layout.zero import share_updates
from ironfn.loss.lm import lm_loss
from ironfn.mesh import fake
from ironfn.mesh.axis import Mesh
from ironfn.model.arch import complete
from ironfn.model.forward import Forward, keep
from ironfn.model.init import init, shapes
from ironfn.model.tables import table
from ironfn.spec.records import ModelSpec
from tests import gloo

ARCH = complete(ModelSpec(width=32, layers=12, heads=2, ffn=96, context=16), 64)


def most_alive(mesh: Mesh, run: Callable[..., Any], gathered: list[str]) -> int:
    """Return the most bytes of gathered leaves that are alive at once over a forward and a backward pass."""
    places = shard_table(table(False), shapes(ARCH), mesh)
    alive: dict[int, int] = {}
    most, real = [0], fetch(places, mesh)

    def watched(path: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        whole = real(path, x, dtype)
        if whole.shape != x.shape:
            gathered.append(path)
            store = whole.untyped_storage()
            alive[store.data_ptr()] = store.nbytes()
            weakref.finalize(store, alive.pop, store.data_ptr(), None)
            most[0] = max(most[0], sum(alive.values()))
        return whole

    params = shard(init(ARCH, 0, WHOLE_TABLE, Mesh()), places, mesh)
    g = torch.Generator().manual_seed(mesh.dp.index)
    ids = torch.randint(0, 64, (2, 17), generator=g)
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "weight": torch.ones(2, 16)}
    value_and_grad(lm_loss(ARCH, Forward(run=run, fetch=watched)))(params, batch, mesh)
    return most[0]


def test_a_blocks_whole_weights_live_while_it_runs() -> None:
    """With recompute at most a block and the head are whole at once; without it, all 12 blocks are kept."""
    sizes = {p: 4 * torch.Size(s).numel() for p, s in shapes(ARCH).items() if len(s) == 2}
    block = sum(size for path, size in sizes.items() if path.startswith("blocks/0/"))
    gathered: list[str] = []
    for most in fake.run(lambda mesh: most_alive(mesh, recompute, gathered if mesh.dp.index == 0 else []), dp=2):
        assert block <= most <= block + sizes["embed/tokens"]
    # Every block is fetched for the forward pass and again for the backward; the tied table to look up and to score.
    assert gathered.count("blocks/3/attn/wq") == 2
    assert gathered.count("embed/tokens") == 2
    for most in fake.run(lambda mesh: most_alive(mesh, keep, []), dp=2):
        assert most >= 12 * block


def test_gradients_of_bfloat16_products_are_summed_in_the_leafs_float32() -> None:
    """1 + 2^-9 fits float32 and not bfloat16, where the sum of the ranks' gradients would be 1."""

    def gradient(mesh: Mesh) -> Tensor:
        share = torch.zeros(2, 3, requires_grad=True)
        whole = fetch({"w": cut("dp", 0)}, mesh)("w", share, torch.bfloat16)
        assert whole.dtype == torch.bfloat16
        assert whole.shape == (4, 3)
        (grad,) = torch.autograd.grad((whole * (1.0 if mesh.dp.index == 0 else 2.0**-9)).sum(), share)
        return grad

    for grad in fake.run(gradient, dp=2):
        assert grad.dtype == torch.float32
        assert grad.equal(torch.full((2, 3), 1.0 + 2.0**-9))


def test_gradients_of_bfloat16_leaves_are_summed_in_float32_and_rounded_once() -> None:
    """256 + 1 + 1 + 1 is 259, in bfloat16 260; added up in bfloat16 it stays 256. The same on every kind of mesh."""

    def whole(mesh: Mesh) -> list[Tensor]:
        shape, parts = (4, 2), [256.0, 1.0, 1.0, 1.0]
        mine = torch.full(shape, parts[mesh.world.index], dtype=torch.bfloat16)
        found = [reduce_grads({"w": mine.clone()}, WHOLE_TABLE, mesh, bucket_bytes=6)["w"]]
        if mesh.ep.size == 1:
            updates = share_updates(WHOLE_TABLE, {"w": shape}, mesh)
            found.append(reduce_grads({"w": mine.clone()}, WHOLE_TABLE, mesh, updates)["w"])
            share = torch.zeros(1, 2, dtype=torch.bfloat16, requires_grad=True)
            leaf = fetch({"w": cut("dp", 0)}, mesh)("w", share, torch.bfloat16)
            found += torch.autograd.grad((leaf * mine).sum(), share)
        return found

    for found in (*fake.run(whole, dp=4), *fake.run(whole, dp=2, ep=2), *gloo.world(4, whole)):
        for grad in found:
            assert grad.equal(torch.full(grad.shape, 260.0, dtype=torch.bfloat16))


@pytest.mark.parametrize("dp", [2, 3])
def test_the_layout_cuts_what_divides_and_leaves_the_rest(dp: int) -> None:
    sizes = {"a": (6, 5), "b": (5, 12), "c": (5, 7), "norm": (12,), "t": (4, 12)}
    rows = ((r"t", cut("tp", 1)), *WHOLE_TABLE)
    places = fake.run(lambda mesh: shard_table(rows, sizes, mesh), dp=dp, tp=2)[0]
    assert {path: place.dim("dp") for path, place in places.items()} == {
        "a": 0, "b": 1, "c": None, "norm": None, "t": 0 if dp == 2 else 1,
    }  # fmt: skip
    assert places["t"].cuts[0] == ("tp", 1)


def test_the_shares_of_all_ranks_are_the_whole() -> None:
    whole = init(ARCH, 0, WHOLE_TABLE, Mesh())

    def mine(mesh: Mesh) -> tuple[int, bool]:
        places = shard_table(table(False), shapes(ARCH), mesh)
        params = shard(whole, places, mesh)
        get = fetch(places, mesh)
        same = all(get(p, x, x.dtype).equal(tree.flatten(whole)[p]) for p, x in tree.flatten(params).items())
        return tree.count(params), same

    for numbers, same in fake.run(mine, dp=4):
        assert same
        vectors = sum(s[0] for s in shapes(ARCH).values() if len(s) == 1)
        assert numbers == (tree.count(whole) - vectors) / 4 + vectors
