"""Texts that share a row and their beginning are computed as each of them is alone: the values, and the gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ironfn import tree
from ironfn.mesh.axis import SINGLE
from ironfn.model.arch import Arch
from ironfn.model.attention import by_mask, by_span, written_out
from ironfn.model.forward import Forward
from ironfn.model.shared import common, fold
from ironfn.model.transformer import hidden
from ironfn.spec.records import MoeSpec
from ironfn.types import Params
from property_tests.strategies import params_of
from tests import peers

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"kv_heads": 2}),
    "gpt2": ("gpt2", {}),
    "experts": ("llama", {"moe": MoeSpec(experts=4, ffn=16)}),
    "windows": ("gemma2", {"windows": [3, 0], "attention_softcap": 2.0}),
    "alibi": ("llama", {"positions": "alibi"}),
}
GROUPS = [
    [[5, 6, 7, 8], [5, 6, 9], [5, 6, 7, 8, 9, 10]],  # one is the beginning of another
    [[1, 2, 3]],
    [[4, 4], [4, 4]],  # the same text twice
    [[1, 2], [3, 2, 1]],  # nothing in common
]
ids = st.lists(st.integers(0, 5), min_size=1, max_size=7)


def model(family: str) -> tuple[Arch, Params]:
    preset, fields = FAMILIES[family]
    arch = peers.make_arch(preset, 17, **fields)
    return arch, params_of(arch)


def alone(params: Params, arch: Arch, groups: list[list[list[int]]], how: Forward) -> Tensor:
    """Return the hidden states of every text, each computed in a row of its own, end to end."""
    rows = [hidden(params, {"tokens": torch.tensor([text])}, arch, SINGLE, how)[0][0] for g in groups for text in g]
    return torch.cat(rows)


def together(params: Params, arch: Arch, groups: list[list[list[int]]], how: Forward) -> Tensor:
    folded = fold(groups)
    x, _ = hidden(params, folded.batch, arch, SINGLE, how)
    return x[0, folded.places]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", [by_span, by_mask, written_out], ids=lambda f: f.__name__)
def test_texts_together_are_texts_alone(family: str, attention: Any) -> None:
    arch, params = model(family)
    how = Forward(attention=attention)
    torch.testing.assert_close(
        together(params, arch, GROUPS, how), alone(params, arch, GROUPS, how), rtol=1e-11, atol=1e-11
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(ids, min_size=1, max_size=4), min_size=1, max_size=4))
def test_any_texts_together_are_texts_alone(groups: list[list[list[int]]]) -> None:
    arch, params = model("llama")
    torch.testing.assert_close(
        together(params, arch, groups, Forward()), alone(params, arch, groups, Forward()), rtol=1e-11, atol=1e-11
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_their_gradients_are_those_of_texts_alone(family: str) -> None:
    """So that preference pairs and groups of completions can be trained on in one row."""
    arch, params = model(family)
    grads: list[list[Tensor]] = []
    for form in (together, alone):
        leaves = {path: leaf.detach().clone().requires_grad_() for path, leaf in tree.flatten(params).items()}
        x = form(tree.unflatten(leaves), arch, GROUPS, Forward())
        weights = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)
        found = torch.autograd.grad((x * weights).sum(), list(leaves.values()), allow_unused=True)
        grads.append([torch.zeros(1) if grad is None else grad for grad in found])
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)


def test_what_texts_share_is_in_the_row_once() -> None:
    folded = fold(GROUPS)
    assert folded.tokens.tolist() == [[5, 6, 7, 8, 9, 7, 8, 9, 10, 1, 2, 3, 4, 4, 1, 2, 3, 2, 1]]
    assert folded.position.tolist() == [[0, 1, 2, 3, 2, 2, 3, 4, 5, 0, 1, 2, 0, 1, 0, 1, 0, 1, 2]]
    assert folded.lengths == (4, 3, 6, 3, 2, 2, 2, 3)
    assert folded.tokens[0, folded.places].tolist() == [i for group in GROUPS for text in group for i in text]
    assert folded.segment.tolist() == [[0] * 4 + [1] + [2] * 4 + [3] * 3 + [4] * 2 + [6] * 2 + [7] * 3]
    assert folded.until.tolist() == [[2] * 2 + [0] * 2 + [1] + [2] * 4 + [3] * 3 + [5] * 2 + [6] * 2 + [7] * 3]
    assert [common(group) for group in GROUPS] == [2, 3, 2, 0]


def test_a_text_does_not_see_its_neighbours() -> None:
    """Another id in a sibling, or in another group, moves nothing; one in the trunk moves both branches."""
    arch, params = model("llama")

    def states(trunk: int, sibling: int) -> tuple[Tensor, ...]:
        groups = [[[trunk, 2, 3], [trunk, 2, sibling, 5]], [[sibling, 1]]]
        return together(params, arch, groups, Forward()).split([3, 4, 2])

    before, after, moved = states(1, 6), states(1, 7), states(4, 6)
    torch.testing.assert_close(before[0], after[0], rtol=0, atol=1e-12)
    assert not torch.allclose(before[1][2:], after[1][2:])
    assert not torch.allclose(before[0], moved[0])
    assert not torch.allclose(before[1][2:], moved[1][2:])
