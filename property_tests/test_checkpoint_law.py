"""Laws 3 and 4, the part of the disk: what is loaded is, bit for bit, what was saved, whatever the tree."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ironfn import tree
from ironfn.checkpoint import load, load_newest, save, verify
from ironfn.checkpoint.plan import DTYPES

names = st.text(st.characters(exclude_categories=("C", "Z"), exclude_characters="/"), min_size=1, max_size=4)
scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=9)
)
metas = st.dictionaries(
    st.text(max_size=6).filter(lambda key: key != "step"),
    st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner)),
    max_size=4,
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draw a tensor of any dtype, bits and layout: whole, turned, sliced, expanded, of no dims or of no elements."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    dtype = draw(st.sampled_from(list(DTYPES)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, [*shape, size], dtype=torch.uint8, generator=generator)
    whole = (raw[..., 0] > 127) if dtype == torch.bool else raw.view(dtype)[..., 0]
    for dim in range(whole.dim()):
        begin, step = draw(st.integers(0, 2)), draw(st.integers(1, 2))
        whole = whole[(slice(None),) * dim + (slice(begin, None, step),)]
    whole = whole.permute(draw(st.permutations(range(whole.dim()))))
    return whole.unsqueeze(0).expand(3, *whole.shape) if draw(st.booleans()) else whole


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a tree, some of whose leaves may be one tensor, or views of one."""
    shared = draw(st.lists(tensors(), min_size=1, max_size=3))
    leaf = tensors() | st.sampled_from(shared)
    inner = st.recursive(leaf, lambda node: st.dictionaries(names, node, max_size=4), max_leaves=12)
    return draw(st.dictionaries(names.filter(lambda name: name != "__metadata__"), inner, max_size=5))


def bits(leaf: torch.Tensor) -> tuple[object, ...]:
    raw = torch.empty(leaf.shape, dtype=leaf.dtype).copy_(leaf).reshape(-1)  # contiguous, whatever the strides were
    return leaf.dtype, tuple(leaf.shape), raw.view(torch.uint8).tolist()


def shape_of(node: Any) -> Any:
    return {name: shape_of(inner) for name, inner in node.items()} if isinstance(node, dict) else bits(node)


@settings(max_examples=60)
@given(saved=trees(), meta=metas, step=st.integers(0, 10**9), file_bytes=st.sampled_from([1, 64, 2 << 30]))
def test_what_is_loaded_is_what_was_saved(saved: dict[str, Any], meta: dict, step: int, file_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as room:
        path = save(Path(room), step, saved, meta, file_bytes=file_bytes)
        assert verify(path) == []
        loaded, found = load(path)
        assert shape_of(loaded) == shape_of(saved)
        assert found == {**meta, "step": step}
        into = tree.map(lambda leaf: torch.zeros(leaf.shape, dtype=leaf.dtype), saved)
        newest = load_newest(Path(room), print, into=into)
        assert newest is not None
        assert shape_of(into) == shape_of(saved)
        assert all(load(path, keep=lambda p, only=p: p == only)[0] for p in list(tree.flatten(saved))[:2])
