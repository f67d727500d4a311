"""What is computed out of a cache, in pieces and beside others, is what one forward pass over the text gives."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ironfn import tree
from ironfn.generate.cache import make_pool
from ironfn.generate.paged import in_place, padded, paged
from ironfn.generate.pieces import Part, Piece, pieces, texts
from ironfn.layout.table import shard
from ironfn.mesh import fake
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.model.arch import Arch
from ironfn.model.causal import Look
from ironfn.model.tables import table
from ironfn.spec.records import MoeSpec, RopeSpec
from ironfn.types import Params
from property_tests.strategies import params_of
from tests import peers
from tests.family_peers import PEERS
from tests.paging import Laid, Pass, at_once, in_passes

FORMS = pytest.mark.parametrize("form", [in_place, padded], ids=lambda f: f.__name__)
TRUNK = 80
PASSES: list[Pass] = [
    [(0, 70), (3, 30)],  # two prompts
    [(0, 10), (3, 1)],  # the rest of one, while the other goes on
    [(1, 7), (0, 1), (2, 1), (3, 1)],  # two that share the first one's beginning: a chunk and a token
    *[[(3, 1), (2, 1), (1, 1), (0, 1)]] * 4,
    [(4, 4), (3, 1), (0, 40)],  # a long chunk behind the cache, a fresh one
    [(n, 1) for n in range(5)],
]


def laid(arch: Arch) -> Laid:
    """Lay five texts out: three with a common beginning, one in scattered slots, one of a few tokens."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(0, arch.vocab, (5, TRUNK + 50), generator=draw).tolist()
    common = list(range(100, 100 + TRUNK))
    scattered = torch.arange(400, 600).unflatten(0, (-1, 4))[torch.randperm(50, generator=draw)].flatten().tolist()
    lengths = [TRUNK + 46, TRUNK + 12, TRUNK + 6, 38, 5]
    slots = [
        [*common, *range(180, 230)],
        [*common, *range(300, 330)],
        [*common, *range(350, 380)],
        scattered,
        [0, 1, 7, 8, 9],
    ]
    whole = [ids[0], ids[0][:TRUNK] + ids[1], ids[0][:TRUNK] + ids[2], ids[3], ids[4]]
    return Laid([t[:n] for t, n in zip(whole, lengths, strict=True)], slots, [0, TRUNK, TRUNK, 0, 0])


def check(arch: Arch, params: Params, form: Any, rtol: float, atol: float) -> None:
    texts = laid(arch)
    for text, shared, found in zip(
        texts.texts, texts.shared, in_passes(params, arch, texts, PASSES, form), strict=True
    ):
        torch.testing.assert_close(found, at_once(params, arch, text)[shared:], rtol=rtol, atol=atol)


@FORMS
@pytest.mark.parametrize("name", PEERS)
def test_every_family_decodes_what_it_computes(name: str, form: Any) -> None:
    """To what float32 can say of a log-probability about -7, and to what float64 can."""
    peer = PEERS[name]
    arch = peer.arch(context=256)
    params = peer.tree(peer.build(arch), arch)
    check(arch, params, form, 1e-6, 1e-5)
    check(arch, tree.map(lambda x: x.double(), params), form, 0, 1e-9)


HARD: dict[str, dict[str, Any]] = {
    "one key for all heads": {"kv_heads": 1},
    "a window of 1": {"windows": [1]},
    "a window that ends in the trunk": {"windows": [70, 0]},
    "a cap": {"attention_softcap": 1.5, "windows": [60, 0], "attention_scale": 0.4},
    "slopes over a window": {"positions": "alibi", "windows": [0, 50], "kv_heads": 2},
    "learned positions": {"positions": "learned"},
    "dynamic angles": {"rope": RopeSpec("dynamic", factor=4.0, original_context=200)},
    "long angles": {"rope": RopeSpec("longrope", 4.0, 200, short_factor=[1.0] * 6, long_factor=[3.0] * 6)},
    "experts": {"moe": MoeSpec(experts=4, ffn=16, shared=1)},
}


@FORMS
@pytest.mark.parametrize("name", HARD)
def test_in_float64_nothing_but_the_order_of_sums_differs(name: str, form: Any) -> None:
    arch = peers.make_arch("llama", 31, context=256, **HARD[name])
    check(arch, params_of(arch), form, 0, 1e-9)


@pytest.mark.parametrize("name", ["one key for all heads", "slopes over a window", "experts"])
def test_ranks_that_share_the_heads_decode_alike(name: str) -> None:
    arch = peers.make_arch("llama", 32, context=256, **(HARD[name] | {"kv_heads": 2}))
    params, cuts = params_of(arch), table(False)
    texts = laid(arch)

    def rank(mesh: Mesh) -> list[Tensor]:
        return in_passes(shard(params, cuts, mesh), arch, texts, PASSES, paged, mesh)

    alone = in_passes(params, arch, texts, PASSES, paged)
    for found in fake.run(rank, tp=2):
        for mine, whole in zip(found, alone, strict=True):
            torch.testing.assert_close(mine, whole, rtol=0, atol=1e-9)


@FORMS
def test_bfloat16_is_as_near_as_its_numbers(form: Any) -> None:
    """The cache, the pieces and their sum round no more often than one pass does."""
    arch = peers.make_arch("llama", 31, context=256, kv_heads=2)
    exact = params_of(arch)
    low = tree.map(lambda x: x.bfloat16(), exact)
    texts = laid(arch)
    for text, shared, found in zip(texts.texts, texts.shared, in_passes(low, arch, texts, PASSES, form), strict=True):
        whole = at_once(low, arch, text)[shared:].double()
        truth = at_once(tree.map(lambda x: x.double(), low), arch, text)[shared:]
        assert (found.double() - truth).square().mean() < 1.5 * (whole - truth).square().mean()


def test_a_text_reads_its_own_slots_only() -> None:
    """What lies in all other slots may be anything, even no number."""
    arch = peers.make_arch("llama", 31, context=256, kv_heads=2)
    params, texts = params_of(arch), laid(arch)
    pool = make_pool(arch, 700, 1, SINGLE, torch.float64)
    for x in (*pool.keys, *pool.values):
        x.fill_(math.nan)
    clean = in_passes(params, arch, texts, PASSES, in_place)
    for found, same in zip(in_passes(params, arch, texts, PASSES, in_place, pool=pool), clean, strict=True):
        assert torch.equal(found, same)
    used = {slot for slots, text in zip(texts.slots, texts.texts, strict=True) for slot in slots[: len(text)]}
    for x in (*pool.keys, *pool.values):
        assert x.isnan().any(-1).any(0).nonzero().flatten().tolist() == sorted({*range(700)} - used)


def test_what_is_shared_is_read_once() -> None:
    """Four texts of 300 common tokens, each with 20 of its own: no product sees the common ones twice."""
    parts = [Part(1, 319, ((0, 300), (400 + 20 * n, 420 + 20 * n))) for n in range(4)]
    found = pieces(texts(parts), 0)
    assert found == [
        Piece((0, 1, 2, 3), 0, ((0, 300),)),
        *(Piece((n,), 300, ((400 + 20 * n, 420 + 20 * n),)) for n in range(4)),
    ]
    ahead = pieces(texts([Part(1, 349, ((0, 350),)), *parts[:1], Part(8, 300, ((0, 300), (900, 908)))]), 0)
    assert Piece((0, 1, *range(2, 10)), 0, ((0, 300),)) in ahead, "one whose own tokens follow at once, and a chunk"
    assert Piece((0,), 300, ((300, 350),)) in ahead


def test_what_lies_together_is_read_without_a_copy() -> None:
    arch = peers.make_arch("llama", 31, context=2048, kv_heads=2)
    made: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            views = {pool.keys[0].untyped_storage().data_ptr(), pool.values[0].untyped_storage().data_ptr()}
            tensors = [x for x in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(x, Tensor)]
            made.extend(x.numel() for x in tensors if x.untyped_storage().data_ptr() not in views)
            return out

    pool = make_pool(arch, 2000, 1, SINGLE, torch.float32)
    shared = [Part(1, 1210, ((0, 1200), (1300 + 50 * n, 1311 + 50 * n))) for n in range(4)]
    alone = [Part(1, 999, ((500, 1500),))]
    for parts in (shared, alone):
        q, k, v = (torch.randn(1, len(parts), n, 12) for n in (4, 2, 2))
        with Sizes():
            in_place(pool, parts)(None)(q, k, v, Look())
    assert max(made) < 1000
