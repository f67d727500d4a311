"""Trees keep their paths, their order and their leaves; random numbers follow global coordinates and nothing else."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ironfn import rng, tree
from ironfn.types import Params

ROOT = Path(__file__).parents[1]


def a_tree() -> Params:
    return {"b": {"x": torch.arange(3.0), "a": torch.ones(2, 2)}, "a": torch.tensor(5.0)}


def test_paths_come_in_the_trees_own_order_and_lead_back() -> None:
    flat = tree.flatten(a_tree())
    assert list(flat) == ["b/x", "b/a", "a"]
    back = tree.unflatten(flat)
    assert list(back) == ["b", "a"]
    assert all(torch.equal(x, y) for x, y in zip(tree.leaves(back), tree.leaves(a_tree()), strict=True))


@pytest.mark.parametrize(
    "flat", [{"a": 1, "a/b": 2}, {"a/b": 1, "a": 2}, {"a/b": 1, "a/b/c": 2}], ids=lambda flat: " then ".join(flat)
)
def test_a_path_through_another_leaf_is_refused(flat: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="path"):
        tree.unflatten(flat)


def test_map_visits_every_leaf_with_its_mates_by_path_and_not_by_order() -> None:
    mate = {"a": torch.tensor(1.0), "b": {"a": torch.full((2, 2), 2.0), "x": torch.full((3,), 3.0)}}
    total = tree.flatten(tree.map(torch.add, a_tree(), mate))
    assert total["b/x"].tolist() == [3.0, 4.0, 5.0]
    assert total["b/a"].tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert float(total["a"]) == 6.0
    with pytest.raises(KeyError):
        tree.map(torch.add, a_tree(), {"b": mate["b"]})
    named = tree.flatten(tree.map_path(lambda path, leaf: f"{path}:{leaf.numel()}", a_tree()))
    assert list(named.values()) == ["b/x:3", "b/a:4", "a:1"]


def test_select_and_merge_take_a_tree_apart_and_join_it_again() -> None:
    inner = tree.select(a_tree(), lambda path: path.startswith("b/"))
    outer = tree.select(a_tree(), lambda path: not path.startswith("b/"))
    assert (list(tree.flatten(inner)), list(outer)) == (["b/x", "b/a"], ["a"])
    assert list(tree.flatten(tree.merge(inner, outer))) == ["b/x", "b/a", "a"]
    with pytest.raises(ValueError, match="'b/x' is in two"):
        tree.merge(inner, a_tree())
    assert tree.select(a_tree(), lambda path: False) == {}


def test_rebuild_wants_as_many_leaves_as_there_are() -> None:
    assert tree.flatten(tree.rebuild(a_tree(), "xyz")) == {"b/x": "x", "b/a": "y", "a": "z"}
    with pytest.raises(ValueError, match="shorter"):
        tree.rebuild(a_tree(), "xy")


def test_a_clone_shares_nothing() -> None:
    mine = a_tree()
    copy = tree.clone(mine)
    tree.leaf(tree.branch(copy, "b"), "x").zero_()
    assert tree.leaf(tree.branch(mine, "b"), "x").tolist() == [0.0, 1.0, 2.0]


def test_sizes() -> None:
    sized = {"a": torch.zeros(3, 4), "b": {"c": torch.zeros(5, dtype=torch.bfloat16), "d": torch.zeros(()).double()}}
    assert tree.count(sized) == 18
    assert tree.nbytes(sized) == 48 + 10 + 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_norm_is_that_of_all_numbers_together(dtype: torch.dtype) -> None:
    numbers = {"a": torch.randn(50, 3).to(dtype), "b": {"c": torch.randn(7).to(dtype)}}
    expected = torch.cat([leaf.double().flatten() for leaf in tree.leaves(numbers)]).norm()
    found = tree.norm(numbers)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    assert float(found) == pytest.approx(float(expected), rel=1e-2 if dtype == torch.bfloat16 else 1e-6)
    assert float(tree.norm({"a": torch.tensor([3.0]), "b": torch.tensor([-4.0])})) == 5.0


def test_a_key_tells_its_coordinates_apart() -> None:
    keys = [rng.key(0), rng.key("0"), rng.key(0, 0), rng.key(0, "a"), rng.key("a", 0), rng.key("a0"), rng.key(-1)]
    keys += [rng.key("ab", "c"), rng.key("a", "bc"), rng.key(0, "blocks/1"), rng.key(0, "blocks/11"), rng.key(2**70)]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**63 for key in keys)
    assert len({rng.key(0, "step", step) for step in range(20000)}) == 20000


def test_a_key_is_the_same_in_every_process() -> None:
    """Python's own hash is salted by process; a key is not."""
    code = "from ironfn import rng; print(rng.key(3, 'blocks/7/attn/wq', 11), rng.normal((2,), 1.0, 5).tolist())"
    for salt in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": salt, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
        assert done.stdout == f"{rng.key(3, 'blocks/7/attn/wq', 11)} {rng.normal((2,), 1.0, 5).tolist()}\n"


def test_normal_has_the_spread_asked_for_and_is_rounded_after_the_draw() -> None:
    drawn = rng.normal((400, 500), 0.02, 1, "a")
    assert float(drawn.mean()) == pytest.approx(0.0, abs=4 * 0.02 / math.sqrt(200_000))
    assert float(drawn.std()) == pytest.approx(0.02, rel=0.01)
    assert torch.equal(rng.normal((400, 500), 0.02, 1, "a", dtype=torch.bfloat16), drawn.bfloat16())
    assert not torch.equal(rng.normal((400, 500), 0.02, 1, "b"), drawn)


def test_drawing_leaves_torchs_own_generator_alone() -> None:
    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    rng.normal((10,), 1.0, 0)
    rng.dropout(torch.ones(4, 4), 0.5, 1, (torch.arange(4), torch.arange(4)))
    assert torch.equal(torch.rand(3), expected)


def grid(*sizes: int) -> list[Tensor]:
    return [torch.arange(size) for size in sizes]


def test_bits_of_a_slice_are_the_slice_of_the_bits() -> None:
    whole = rng.bits(7, grid(6, 8, 5))
    part = rng.bits(7, [torch.tensor([4, 1]), torch.arange(3, 7), torch.tensor([0, 4])])
    assert torch.equal(part, whole[[4, 1]][:, 3:7][:, :, [0, 4]])
    assert whole.min() >= 0
    assert whole.max() < 2**32


def test_coordinates_beyond_32_bits_and_their_order_matter() -> None:
    small, large = torch.tensor([1, 2]), torch.tensor([1, 2]) + 2**32
    drawn = [rng.bits(0, [small]), rng.bits(0, [large]), rng.bits(1, [small]), rng.bits(2**40, [small])]
    assert len({tuple(bits.tolist()) for bits in drawn}) == 4
    pair = rng.bits(0, grid(50, 50))
    assert (pair == pair.t()).sum() <= 50 + 2, "(a, b) and (b, a) are different points"


def test_bits_look_random_in_every_bit_and_along_every_axis() -> None:
    """2^18 points: every bit is set in half of them within 5 standard deviations, so are neighbours' differences."""
    drawn = rng.bits(3, grid(512, 512))
    tolerance = 5 * 0.5 / 512
    for bits in (drawn, drawn[1:] ^ drawn[:-1], drawn[:, 1:] ^ drawn[:, :-1]):
        for place in range(32):
            share = float(((bits >> place) & 1).double().mean())
            assert share == pytest.approx(0.5, abs=tolerance), f"bit {place}"
    assert len(drawn.unique()) > 512 * 512 - 30, "about 8 collisions are due"


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_dropout_drops_its_share_and_keeps_the_mean(rate: float) -> None:
    x = torch.ones(500, 400)
    kept = rng.dropout(x, rate, rng.key(1), grid(500, 400))
    share = float((kept == 0).double().mean())
    assert share == pytest.approx(rate, abs=5 * math.sqrt(rate * (1 - rate) / 200_000) + 1e-12)
    assert set(kept.unique().tolist()) <= {0.0, float(torch.tensor(1.0) / (1 - rate))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dropout_keeps_the_dtype_and_the_same_places_in_every_dtype(dtype: torch.dtype) -> None:
    x = torch.ones(30, 40, dtype=dtype)
    dropped = rng.dropout(x, 0.3, 5, grid(30, 40))
    assert dropped.dtype == dtype
    assert torch.equal(dropped == 0, rng.dropout(x.float(), 0.3, 5, grid(30, 40)) == 0)
