"""Adapters beside a frozen model: their mathematics, their cost, their first values, and what they leave alone."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ironfn import rng, tree
from ironfn.algo.step import State, make_step
from ironfn.grad.noise import per_row_grads
from ironfn.grad.value_and_grad import value_and_grad
from ironfn.layout.table import by_path, shard, unshard
from ironfn.loss.lm import lm_loss
from ironfn.mesh import fake
from ironfn.mesh.axis import SINGLE
from ironfn.model import experts
from ironfn.model.adapters import Adapting, adapter_shapes, first_adapter, matrices, merge, targets
from ironfn.model.arch import Arch
from ironfn.model.attention import written_out
from ironfn.model.forward import Forward
from ironfn.model.fused import linear
from ironfn.model.init import init
from ironfn.model.lowrank import low_rank
from ironfn.model.norms import Normed
from ironfn.model.tables import table
from ironfn.model.transformer import logits
from ironfn.optim.presets import labels_of, make_optimizer, shapes_of
from ironfn.spec.adapter_records import AdapterSpec
from ironfn.spec.records import AdamWSpec, OptimSpec
from ironfn.types import Batch, Params
from property_tests.scenario import adapter_of
from property_tests.strategies import batch_of, params_of
from tests.peers import make_arch

CLOSE = {"rtol": 1e-9, "atol": 1e-10}
LORA = AdapterSpec(kind="lora", rank=4, alpha=8.0)
EVERYWHERE = ["all-linear", "embed/tokens", "head/w"]
KINDS = {
    "lora": AdapterSpec(kind="lora", rank=4, alpha=8.0, targets=EVERYWHERE),
    "rslora": AdapterSpec(kind="lora", rank=4, alpha=8.0, rslora=True, targets=EVERYWHERE),
    "dora": AdapterSpec(kind="lora", rank=4, alpha=8.0, dora=True, targets=["all-linear", "head/w"]),
}


def made(spec: AdapterSpec, **fields: Any) -> tuple[Arch, Params, Params, Batch]:
    """Return a small Llama in float64, an adapter that changes it, and a batch."""
    arch = make_arch("llama", 61, **fields)
    base = params_of(arch)
    return arch, base, adapter_of(spec, arch, base), batch_of(arch, 2, 12, 0, False)


def test_the_scale_is_alpha_over_the_rank_or_over_its_root() -> None:
    assert AdapterSpec(rank=8, alpha=16).scale == 2.0
    assert AdapterSpec(rank=8, alpha=16, rslora=True).scale == pytest.approx(5.656854249492381, abs=1e-12)


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_fresh_adapter_changes_nothing(kind: str, tied: bool) -> None:
    spec = KINDS[kind]
    arch, base, _, batch = made(spec, tied=tied)
    fresh = first_adapter(spec, arch, base, 0, table(False), dtype=torch.float64)
    found = logits(tree.merge(base, fresh), batch, arch, SINGLE, Forward(adapt=Adapting(spec)))
    expected = logits(base, batch, arch, SINGLE)
    assert torch.equal(found, expected) or kind == "dora"
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_merged_is_the_same_model(kind: str, tied: bool) -> None:
    spec = KINDS[kind]
    arch, base, adapter, batch = made(spec, tied=tied)
    before = tree.clone(base)
    whole, without = merge(spec, arch, base, adapter)
    found = logits(tree.merge(adapter, base), batch, arch, SINGLE, Forward(adapt=Adapting(spec)))
    torch.testing.assert_close(logits(whole, batch, without, SINGLE), found, **CLOSE)
    assert (found - logits(base, batch, arch, SINGLE)).abs().max() > 0.1
    assert not without.tied, "the adapter of a tied head must not reach the embedding"
    assert all(torch.equal(x, y) for x, y in zip(tree.leaves(before), tree.leaves(base), strict=True))


def test_a_tied_model_stays_tied_where_only_its_blocks_changed() -> None:
    arch, base, adapter, _ = made(LORA, tied=True)
    whole, without = merge(LORA, arch, base, adapter)
    assert without.tied
    assert "head" not in whole


def test_half_precision_is_added_up_in_float32_and_cast_once() -> None:
    arch, base, adapter, _ = made(LORA)
    low, factors = (tree.map(lambda x: x.to(torch.bfloat16), leaves) for leaves in (base, adapter))
    merged = tree.flatten(merge(LORA, arch, low, factors)[0])["blocks/0/attn/wq"]
    w, a, b = (
        tree.flatten(tree.merge(low, factors))[f"blocks/0/attn/wq{end}"].float() for end in ("", "_lora/a", "_lora/b")
    )
    assert torch.equal(merged, (w + 2.0 * (a @ b)).to(torch.bfloat16))


def by_hand(spec: AdapterSpec, arch: Arch, base: Params, factors: dict[str, Tensor]) -> Params:
    """Return the tree of w + s a b as autograd follows it."""
    flat = dict(tree.flatten(base))
    for path in targets(spec, arch):
        a, b = factors[f"{path}_lora/a"], factors[f"{path}_lora/b"]
        flat[path] = flat[path] + spec.scale * (a @ b)
        if (m := factors.get(f"{path}_lora/m")) is not None:
            flat[path] = flat[path] * (m / flat[path].detach().norm(dim=0))
    return tree.unflatten(flat)


@pytest.mark.parametrize("spec", [KINDS["lora"], AdapterSpec(kind="lora", rank=3, dora=True)], ids=["lora", "dora"])
def test_gradients_are_those_of_the_sum(spec: AdapterSpec) -> None:
    arch, base, adapter, batch = made(spec, tied=False)
    loss, grads = value_and_grad(lm_loss(arch, Forward(adapt=Adapting(spec))))(adapter, batch, SINGLE, base)
    leaves = {path: x.clone().requires_grad_() for path, x in tree.flatten(adapter).items()}
    total = lm_loss(arch)(by_hand(spec, arch, base, leaves), batch, SINGLE).total
    expected = torch.autograd.grad(total, list(leaves.values()))
    torch.testing.assert_close(loss.total, total.detach(), **CLOSE)
    for path, grad, other in zip(leaves, tree.leaves(grads), expected, strict=True):
        torch.testing.assert_close(grad, other, **CLOSE, msg=lambda m, p=path: f"{p}: {m}")


@pytest.mark.parametrize("dropped", [False, True], ids=["plain", "dropped"])
def test_the_product_has_all_derivatives(dropped: bool) -> None:
    g = torch.Generator().manual_seed(0)
    x, w, a, b = (
        torch.randn(s, generator=g, dtype=torch.float64, requires_grad=True)
        for s in ((2, 3, 4), (4, 5), (4, 2), (2, 5))
    )

    def product(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return low_rank(Normed(x), w, a, b, 1.5, x.sin() if dropped else None)

    torch.testing.assert_close(product(x, w, a, b), x @ w + 1.5 * (x.sin() if dropped else x) @ a @ b)
    assert torch.autograd.gradcheck(product, (x, w, a, b), check_forward_ad=True)
    frozen = w.detach()
    assert torch.autograd.gradcheck(lambda x, a, b: product(x, frozen, a, b), (x, a, b))


def test_torch_func_sees_an_adapter() -> None:
    arch, base, adapter, batch = made(LORA)
    how = Forward(attention=written_out, experts=experts.written_out, adapt=Adapting(LORA))
    loss = lm_loss(arch, how)
    expected, grads = value_and_grad(loss)(adapter, batch, SINGLE, base)

    def total(p: Params) -> Tensor:
        return loss(tree.merge(p, base), batch, SINGLE).total

    found, value = torch.func.grad_and_value(total)(adapter)
    torch.testing.assert_close(value, expected.total, **CLOSE)
    for mine, other in zip(tree.leaves(found), tree.leaves(grads), strict=True):
        torch.testing.assert_close(mine, other, **CLOSE)
    rows = per_row_grads(lambda p, batch, mesh: loss(tree.merge(p, base), batch, mesh), adapter, batch, SINGLE)
    alone = {name: x[:1] for name, x in batch.items()}
    one, first = value_and_grad(loss)(adapter, alone, SINGLE, base)
    for mine, other in zip(tree.leaves(rows), tree.leaves(first), strict=True):
        torch.testing.assert_close(mine[0] * one.weight, other, **CLOSE)


def test_a_frozen_product_keeps_nothing_of_what_it_reads() -> None:
    w = torch.randn(4, 5)
    x = torch.randn(3, 4, requires_grad=True) * 1.0
    seen = weakref.ref(x)
    y = linear(x, w)
    del x
    assert seen() is None
    assert y.requires_grad


def in_place(total: Any, a: Any, b: Any, **_: Any) -> int:
    """Count total += a b, which torch's counter passes over."""
    return 2 * a[0] * a[1] * b[1]


def flops(arch: Arch, params: Params, batch: Batch, how: Forward, fixed: Params | None) -> int:
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: in_place})
    with counter:
        value_and_grad(lm_loss(arch, how))(params, batch, SINGLE, fixed)
    return counter.get_total_flops()


def test_no_frozen_weight_has_a_gradient_in_the_count_of_operations() -> None:
    arch, base, adapter, batch = made(LORA, tied=False)
    batch["weight"] = torch.ones_like(batch["weight"])
    tokens, sizes = batch["tokens"].numel(), targets(LORA, arch)
    full = flops(arch, base, batch, Forward(), None)
    ours = flops(arch, adapter, batch, Forward(adapt=Adapting(LORA)), base)
    # the full backward has two products a matrix and one of the head more than ours; and ours ends at the first block,
    # whose queries, keys and values read what nobody trains
    first = [sizes[f"blocks/0/attn/w{n}"] for n in "qkv"]
    less = sum(i * o for i, o in [*sizes.values(), *first, matrices(arch)["head/w"]])
    more = LORA.rank * (3 * sum(i + o for i, o in sizes.values()) - sum(i for i, _ in first))
    assert ours == full - 2 * tokens * (less - more)


def test_only_what_is_trained_has_a_gradient_a_moment_and_a_decay() -> None:
    arch, base, adapter, batch = made(LORA)
    before, spec = tree.clone(base), OptimSpec(name="muon", adamw=AdamWSpec(weight_decay=0.5))
    assert set(labels_of(spec, shapes_of(adapter)).values()) == {"adamw"}, "thin factors are no matrices for Muon"
    optimizer = make_optimizer(spec, adapter)
    state = State(0, adapter, optimizer.init(adapter), extra={"fixed": base})
    moments = tree.nbytes(state.opt) - 8
    assert moments == 2 * tree.nbytes(adapter)
    step = make_step(value_and_grad(lm_loss(arch, Forward(adapt=Adapting(LORA)))), optimizer, lambda s: 0.1)
    losses: list[float] = []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    assert losses[2] < losses[0]
    for x, y in zip(tree.leaves(tree.branch(state.extra, "fixed")), tree.leaves(before), strict=True):
        assert torch.equal(x, y)


def test_blocks_are_taken_by_number_in_whatever_order_the_leaves_come() -> None:
    spec = AdapterSpec(kind="lora", rank=2, targets=["blocks/1/attn/wq"])
    arch, base, adapter, batch = made(spec)
    how = Forward(adapt=Adapting(spec))
    first, last = (logits(tree.merge(*both), batch, arch, SINGLE, how) for both in ((base, adapter), (adapter, base)))
    assert torch.equal(first, last)


def test_first_values_are_those_of_peft_and_the_same_on_every_mesh() -> None:
    """tests/test_hf_peft.py holds the ranges to `peft` itself; here: the spread, and TP 1, 2 and 4."""
    arch = make_arch("llama", 64, heads=4, width=64)
    spec = AdapterSpec(kind="lora", rank=8, targets=EVERYWHERE)
    layout = by_path(table(False), adapter_shapes(spec, arch))
    base = init(arch, 0, table(False), SINGLE)
    whole = tree.flatten(first_adapter(spec, arch, base, 5, layout))
    for path, leaf in whole.items():
        if path.endswith("/a") and path.startswith("blocks"):
            assert leaf.std() == pytest.approx((3 * leaf.shape[0]) ** -0.5, rel=0.2), path
            assert leaf.abs().max() <= leaf.shape[0] ** -0.5
        elif path == "head/w_lora/b":
            assert leaf.std() == pytest.approx((3 * arch.width) ** -0.5, rel=0.2)
        elif path == "embed/tokens_lora/b":
            assert leaf.std() == pytest.approx(1.0, rel=0.2)
        else:
            assert not leaf.any(), path
    assert len({leaf.sum().item() for leaf in whole.values()}) > 15, "each leaf has its own draw"


def test_dropout_is_a_function_of_row_position_and_input() -> None:
    spec = AdapterSpec(kind="lora", rank=4, dropout=0.5, targets=["attn/wq"])
    arch, base, adapter, batch = made(spec)
    both = tree.merge(base, adapter)
    drops, not_ = Forward(adapt=Adapting(spec, seed=1)), Forward(adapt=Adapting(spec))
    whole = logits(both, batch, arch, SINGLE, drops)
    assert torch.equal(whole, logits(both, batch, arch, SINGLE, drops))
    second = {name: x[1:] for name, x in batch.items()}
    torch.testing.assert_close(logits(both, second, arch, SINGLE, drops), whole[1:], **CLOSE)
    assert not torch.allclose(whole, logits(both, batch, arch, SINGLE, not_))
    x = torch.ones(2, 12, arch.width, dtype=torch.float64)
    weight = Adapting(spec, seed=1)(tree.branch(tree.branch(both, "blocks"), "0"), "blocks/0/", batch)
    found = weight["attn"]["wq"].times(x)  # type: ignore[index, call-overload, union-attr]
    mask = rng.dropout(
        x, 0.5, rng.key(1, "adapter", "blocks/0/attn/wq"), [batch["row"], *map(torch.arange, x.shape[1:])]
    )
    flat = tree.flatten(both)
    w, a, b = (flat[f"blocks/0/attn/wq{end}"] for end in ("", "_lora/a", "_lora/b"))
    torch.testing.assert_close(found, x @ w + spec.scale * (mask @ a) @ b, **CLOSE)
    assert 0.4 < (mask == 0).double().mean() < 0.6


def test_half_precision_products_leave_float32_gradients() -> None:
    spec = KINDS["dora"]
    arch, base, adapter, batch = made(spec)
    base, adapter = (tree.map(lambda x: x.float(), leaves) for leaves in (base, adapter))
    how = Forward(compute=torch.bfloat16, adapt=Adapting(spec))
    loss, grads = value_and_grad(lm_loss(arch, how))(adapter, batch, SINGLE, base)
    exact, theirs = value_and_grad(lm_loss(arch, Forward(adapt=Adapting(spec))))(adapter, batch, SINGLE, base)
    assert {g.dtype for g in tree.leaves(grads)} == {torch.float32}
    assert float(loss.total) == pytest.approx(float(exact.total), rel=0.02)
    mine, other = (torch.cat([g.flatten() for g in tree.leaves(each)]) for each in (grads, theirs))
    assert torch.cosine_similarity(mine, other, dim=0) > 0.98


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"targets": ["attn/wz"]}, "'attn/wz' names no matrix"),
        ({"targets": ["norm1/scale"]}, "names no matrix"),
        ({"targets": ["embed/tokens"], "dora": True}, "embed/tokens cannot have a length a column"),
        ({"targets": ["head/w"], "dropout": 0.1}, "head/w takes none"),
    ],
    ids=["unknown", "a norm", "dora of a table", "dropout of the head"],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        targets(AdapterSpec(kind="lora", **fields), make_arch("llama", 61))


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"tp": 2, "dp": 2}], ids=["tp", "tp and dp"])
def test_a_rank_draws_its_part_of_the_whole_adapter(sizes: dict[str, int]) -> None:
    arch, base, _, _ = made(KINDS["dora"], pad_vocab_to=2)
    layout = table(False)
    spec = KINDS["dora"]
    whole = tree.flatten(first_adapter(spec, arch, base, 5, layout, dtype=torch.float64))

    def mine(mesh: Any) -> Params:
        part = shard(base, layout, mesh)
        return unshard(first_adapter(spec, arch, part, 5, layout, mesh, torch.float64), layout, mesh)

    for found in fake.run(mine, **sizes):
        for path, leaf in tree.flatten(found).items():
            assert torch.equal(leaf, whole[path]), path
