"""Every loss works under torch.func, and value_and_grad equals it; packing and padding change nothing (law 6)."""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ironfn import tree
from ironfn.grad.noise import per_row_grads
from ironfn.grad.remat import recompute
from ironfn.grad.value_and_grad import value_and_grad
from ironfn.loss.lm import lm_loss
from ironfn.mesh.axis import SINGLE
from ironfn.model import experts
from ironfn.model.arch import Arch
from ironfn.model.attention import by_mask, by_span, written_out
from ironfn.model.forward import Forward
from ironfn.types import Batch, Params
from property_tests.scenario import mixtures
from property_tests.strategies import archs, batch_of, params_of

CLOSE = {"rtol": 1e-9, "atol": 1e-11}
WRITTEN_OUT = Forward(attention=written_out, experts=experts.written_out)


def same(found: Params, expected: Params) -> None:
    theirs = tree.flatten(expected)
    for path, leaf in tree.flatten(found).items():
        torch.testing.assert_close(leaf, theirs[path], **CLOSE, msg=lambda m, p=path: f"{p}: {m}")


def arch_with(data: st.DataObject, **moe: Any) -> Arch:
    """Draw a dense model, or a mixture with some fields given."""
    if not data.draw(st.booleans(), "experts"):
        return data.draw(archs())
    return data.draw(archs(moe=evolve(data.draw(mixtures(1, 1)), **moe)))


def drawn(data: st.DataObject) -> tuple[Arch, Params, Batch]:
    arch = arch_with(data)
    return arch, params_of(arch), batch_of(arch, 3, 8, data.draw(st.integers(0, 99)), data.draw(st.booleans()))


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_value_and_grad_equals_torch_func(data: st.DataObject) -> None:
    arch, params, batch = drawn(data)
    loss = lm_loss(arch, WRITTEN_OUT, chunk=5)
    grads, value = torch.func.grad_and_value(lambda p: loss(p, batch, SINGLE).total)(params)
    for how in (Forward(attention=by_span), Forward(attention=by_mask, run=recompute)):
        mine, my_grads = value_and_grad(lm_loss(arch, how, chunk=5))(params, batch, SINGLE)
        torch.testing.assert_close(mine.total, value, **CLOSE)
        same(my_grads, grads)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_vmap_gives_the_gradient_of_every_row(data: st.DataObject) -> None:
    arch, params, batch = drawn(data)
    batch["weight"][:, 0] = 1.0
    grads = per_row_grads(lm_loss(arch, WRITTEN_OUT, chunk=5), params, batch, SINGLE)
    for row in range(3):
        alone = {name: value[row : row + 1] for name, value in batch.items()}
        loss, expected = value_and_grad(lm_loss(arch))(params, alone, SINGLE)
        same(tree.map(lambda g, at=row, n=loss.weight: g[at] * n, grads), expected)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_jvp_is_the_gradient_along_a_direction(data: st.DataObject) -> None:
    arch, params, batch = drawn(data)
    loss = lm_loss(arch, WRITTEN_OUT, chunk=5)
    direction = tree.map(torch.randn_like, params)
    _, change = torch.func.jvp(lambda p: loss(p, batch, SINGLE).total, (params,), (direction,))
    _, grads = value_and_grad(loss)(params, batch, SINGLE)
    along = sum((a * b).sum() for a, b in zip(tree.leaves(grads), tree.leaves(direction), strict=True))
    torch.testing.assert_close(change, along, **CLOSE)


def packed(documents: list[Tensor], length: int) -> Batch:
    """Return one row that holds the documents one after the other, and padding."""
    sizes = [len(d) - 1 for d in documents]
    fill = length - sum(sizes)
    return {
        "tokens": torch.cat([*(d[:-1] for d in documents), torch.zeros(fill, dtype=torch.long)])[None],
        "targets": torch.cat([*(d[1:] for d in documents), torch.full((fill,), 10**6)])[None],
        "weight": torch.cat([torch.ones(sum(sizes)), torch.zeros(fill)]).double()[None],
        "position": torch.cat([*(torch.arange(n) for n in sizes), torch.zeros(fill, dtype=torch.long)])[None],
        "segment": torch.cat([*(torch.full((n,), i) for i, n in enumerate(sizes)), torch.full((fill,), -1)])[None],
    }


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_document_is_the_same_alone_padded_or_packed(data: st.DataObject) -> None:
    arch = arch_with(data, capacity=None)
    params, sizes = params_of(arch), data.draw(st.lists(st.integers(2, 5), min_size=1, max_size=3))
    documents = [torch.randint(0, arch.vocab, (n,)) for n in sizes]
    attention = data.draw(st.sampled_from([by_span, by_mask, written_out]))
    vg = value_and_grad(lm_loss(arch, Forward(attention=attention), chunk=5, penalties=False))
    together, grads = vg(params, packed(documents, 16), SINGLE)
    total, sums = torch.zeros((), dtype=torch.float64), tree.map(torch.zeros_like, params)
    for document in documents:
        for length in (len(document) - 1, 9):
            alone, part = vg(params, packed([document], length), SINGLE)
            total, sums = total + alone.total / 2, tree.map(lambda a, b: a + b / 2, sums, part)
    torch.testing.assert_close(together.total, total, **CLOSE)
    assert together.weight == sum(sizes) - len(sizes)
    same(grads, sums)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_document_does_not_see_another(data: st.DataObject) -> None:
    arch = data.draw(archs())
    params = params_of(arch)
    first, other, second = (torch.randint(0, arch.vocab, (5,)) for _ in range(3))
    how = Forward(attention=data.draw(st.sampled_from([by_span, by_mask, written_out])))
    batch, changed = packed([first, second], 9), packed([other, second], 9)
    only_second = evolve_weight(batch, 4)
    loss, _ = value_and_grad(lm_loss(arch, how))(params, only_second, SINGLE)
    again, grads = value_and_grad(lm_loss(arch, how))(params, evolve_weight(changed, 4), SINGLE)
    assert loss.total == again.total
    if arch.positions == "learned":
        assert tree.flatten(grads)["embed/positions"][4:].count_nonzero() == 0, "positions begin anew"


def evolve_weight(batch: Batch, start: int) -> Batch:
    weight = batch["weight"].clone()
    weight[:, :start] = 0.0
    return {**batch, "weight": weight}
