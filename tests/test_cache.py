"""The tensors of a cache: their size on a mesh, and copies between slots."""

from __future__ import annotations

import pytest
import torch

from ironfn.generate.cache import blocks_within, copy_tokens, make_pool, token_bytes
from ironfn.mesh import fake
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.model.arch import complete
from ironfn.model.families import model_spec

ARCH = complete(model_spec("llama", layers=3, heads=4, kv_heads=2, width=32, head_dim=6), 50)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tp", [1, 2], ids=["whole", "tp"])
def test_a_pool_takes_the_bytes_that_a_budget_counts(tp: int, dtype: torch.dtype) -> None:
    def parts(mesh: Mesh) -> list[tuple[torch.Size, int]]:
        pool = make_pool(ARCH, 5, 4, mesh, dtype)
        tensors = (*pool.keys, *pool.values)
        assert sum(x.nbytes for x in tensors) == 20 * token_bytes(ARCH, mesh, dtype)
        budget = sum(x.nbytes for x in tensors)
        assert [blocks_within(budget + more, ARCH, 4, mesh, dtype) for more in (-1, 0, budget)] == [4, 5, 10]
        return [(x.shape, len({t.data_ptr() for t in tensors})) for x in tensors if x.dtype == dtype and not x.any()]

    assert fake.run(parts, tp=tp) == [[((2 // tp, 20, 6), 6)] * 6] * tp


def test_a_budget_below_one_block_is_refused_with_what_one_takes() -> None:
    with pytest.raises(ValueError, match=r"1000 bytes holds no block of 4 tokens; give it at least 1152"):
        blocks_within(1000, ARCH, 4, SINGLE, torch.float32)


def test_tokens_are_copied_in_every_layer_as_if_at_once() -> None:
    pool = make_pool(ARCH, 4, 4, SINGLE, torch.float32)
    tensors = (*pool.keys, *pool.values)
    for x in tensors:
        x.normal_()
    before = [x.clone() for x in tensors]
    copies = [(0, 4, 3), (4, 12, 2), (9, 0, 1), (7, 7, 1)]  # what one copy writes another reads
    assert copy_tokens(pool, copies) is pool
    for x, old in zip(tensors, before, strict=True):
        expected = old.clone()
        for source, target, count in copies:
            expected[:, target : target + count] = old[:, source : source + count]
        assert torch.equal(x, expected)
        assert not torch.equal(x, old)
    assert copy_tokens(pool, []) is pool
