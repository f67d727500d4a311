"""Attention equals two loops over positions; every way to keep documents apart gives the same, dropout included."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ironfn.model.attention import Attention, Dropout, allowed, by_mask, by_span, spans, written_out

WAYS: tuple[Attention, ...] = (by_span, by_mask, written_out)
SEGMENT = torch.tensor([[0, 0, 0, 1, 1, 2, -1, -1], [0, 0, 0, 0, 0, 0, 0, 0], [0, 1, 2, 3, 3, 3, 3, -1]])


def looped(q: Tensor, k: Tensor, v: Tensor, segment: Tensor) -> Tensor:
    """Attend with one softmax for each row, head and position, over the positions it may see, and no mask."""
    rows, length, heads, width = q.shape
    out = torch.zeros_like(q)
    for r in range(rows):
        for h in range(heads):
            shared = h // (heads // k.shape[2])
            for t in range(length):
                seen = [s for s in range(t + 1) if segment[r, s] == segment[r, t]]
                scores = torch.stack([q[r, t, h] @ k[r, s, shared] / math.sqrt(width) for s in seen])
                weights = torch.exp(scores - scores.max())
                out[r, t, h] = sum(w * v[r, s, shared] for w, s in zip(weights / weights.sum(), seen, strict=True))
    return out


def qkv(heads: int, kv_heads: int, rows: int = 3, length: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(heads * 10 + kv_heads)
    return tuple(
        torch.randn(rows, length, n, 4, generator=generator, dtype=torch.float64, requires_grad=True)
        for n in (heads, kv_heads, kv_heads)
    )  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("attention", WAYS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1), (1, 1)])
def test_attention_is_the_double_loop(attention: Attention, heads: int, kv_heads: int) -> None:
    q, k, v = qkv(heads, kv_heads)
    real = (SEGMENT >= 0)[..., None, None]
    found, expected = attention(SEGMENT)(q, k, v), looped(q, k, v, SEGMENT)
    assert found.shape == q.shape
    torch.testing.assert_close(found * real, expected * real)
    direction = torch.randn(found.shape, dtype=torch.float64) * real
    mine = torch.autograd.grad(found, (q, k, v), direction)
    theirs = torch.autograd.grad(expected, (q, k, v), direction)
    for grad, by_loop in zip(mine, theirs, strict=True):
        torch.testing.assert_close(grad, by_loop)


@pytest.mark.parametrize("attention", WAYS)
def test_without_segments_a_row_is_one_document(attention: Attention) -> None:
    q, k, v = qkv(4, 2)
    expected = looped(q, k, v, torch.zeros(3, 8))
    torch.testing.assert_close(attention(None)(q, k, v), expected)
    torch.testing.assert_close(attention(torch.zeros(3, 8, dtype=torch.long))(q, k, v), expected)


@pytest.mark.parametrize("attention", WAYS)
def test_padding_is_finite_and_gives_nothing_back(attention: Attention) -> None:
    """Rows that are nothing but padding too: no NaN on the way forward, none on the way back."""
    q, k, v = qkv(2, 2)
    segment = SEGMENT.clone()
    segment[1] = -1
    out = attention(segment)(q, k, v)
    assert out.isfinite().all()
    real = (segment >= 0)[..., None, None]
    for grad in torch.autograd.grad((out * real).sum(), (q, k, v), materialize_grads=True):
        assert grad.isfinite().all()
        assert (grad * ~real).count_nonzero() == 0


@pytest.mark.parametrize("attention", WAYS)
def test_another_document_has_no_influence_at_all(attention: Attention) -> None:
    q, k, v = (x.detach() for x in qkv(4, 2))
    changed = [x.clone() for x in (q, k, v)]
    for x in changed:
        x[0, :3] = 1e3
    before, after = attention(SEGMENT)(q, k, v), attention(SEGMENT)(*changed)
    assert torch.equal(before[0, 3:], after[0, 3:])
    assert torch.equal(before[1:], after[1:])


@settings(max_examples=40)
@given(data=st.data())
def test_all_ways_agree_on_any_segments(data: st.DataObject) -> None:
    rows, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    steps = data.draw(st.lists(st.lists(st.booleans(), min_size=length, max_size=length), min_size=rows, max_size=rows))
    segment = torch.tensor(steps).long().cumsum(1)
    padding = data.draw(st.integers(0, length))
    segment[0, length - padding :] = -1
    kv_heads = data.draw(st.integers(1, 2))
    q, k, v = qkv(kv_heads * data.draw(st.integers(1, 3)), kv_heads, rows, length)
    real = (segment >= 0)[..., None, None]
    one, *others = (attention(segment)(q, k, v) * real for attention in WAYS)
    for other in others:
        torch.testing.assert_close(one, other)


def test_spans_cut_where_the_segment_changes_and_at_every_row() -> None:
    found = spans(torch.tensor([[0, 0, 1, 1], [1, 1, 1, -1], [-1, -1, -1, -1]]))
    assert found == [(2, True), (2, True), (3, True), (1, False), (4, False)]


def test_the_mask_lets_a_position_see_its_own_document_behind_it() -> None:
    mask = allowed(torch.tensor([[0, 0, 1, -1]]))
    assert mask.shape == (1, 1, 4, 4)
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


def test_half_precision_scores_are_summed_in_float32() -> None:
    """512 equal scores: the weights are 1 / 512 each, which a bfloat16 sum of 512 terms would miss by far."""
    ones = torch.ones(1, 512, 1, 4, dtype=torch.bfloat16)
    out = written_out(None)(ones, ones, ones)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, ones, rtol=1e-2, atol=0)


# Dropout.

ROWS = torch.tensor([3, 11, 12])


def dropped(rate: float, rows: Tensor = ROWS, first_head: int = 0, heads: slice = slice(None), seed: int = 1) -> Tensor:
    """Return which probabilities of a uniform attention are kept: with v the identity, the output is the row itself."""
    length = 8
    q = torch.zeros(len(rows), length, 4, length)[:, :, heads]
    eye = torch.eye(length)[None, :, None].expand(len(rows), length, q.shape[2], length)
    attend = Dropout(rate, seed).attention(None, "0/probabilities", rows, first_head)
    return attend(q, eye, eye).transpose(1, 2)


def test_dropped_probabilities_are_zero_and_the_rest_is_scaled() -> None:
    found = dropped(0.5)
    uniform = torch.ones(8, 8).tril() / torch.arange(1, 9)[:, None]
    kept = found != 0
    torch.testing.assert_close(found, torch.where(kept, 2 * uniform, 0.0).expand_as(found))
    assert not torch.equal(kept[0, 0], kept[0, 1])
    assert not torch.equal(kept[0, 0], kept[1, 0])


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_the_share_that_is_dropped(rate: float) -> None:
    found = dropped(rate, torch.arange(300))
    below = torch.ones(8, 8).tril().bool().expand_as(found)
    share = float((found[below] == 0).double().mean())
    assert share == pytest.approx(rate, abs=5 * math.sqrt(rate * (1 - rate) / int(below.sum())))


def test_what_is_dropped_depends_on_the_global_row_and_head_alone() -> None:
    whole = dropped(0.5)
    assert torch.equal(dropped(0.5, ROWS[[2, 0]]), whole[[2, 0]]), "rows in another order, or on another rank"
    assert torch.equal(dropped(0.5, first_head=2, heads=slice(2, 4)), whole[:, 2:]), "heads on another rank"
    assert not torch.equal(dropped(0.5, seed=2), whole)
    assert torch.equal(dropped(0.0), dropped(1e-12))


def test_activations_are_dropped_by_row_position_and_channel() -> None:
    x, drop = torch.ones(3, 6, 5), Dropout(0.4, 7)
    whole = drop.hidden(x, "0/mlp", ROWS)
    assert torch.equal(drop.hidden(x[:1], "0/mlp", ROWS[:1]), whole[:1])
    assert torch.equal(drop.hidden(x[:, :3], "0/mlp", ROWS, start=3), whole[:, 3:]), "a share of the positions"
    assert not torch.equal(drop.hidden(x, "1/mlp", ROWS), whole)
