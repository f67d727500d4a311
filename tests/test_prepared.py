"""Matrices prepared for decoding compute what the plain ones do: laid out anew to rounding, in 8 bits to those bits."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ironfn import tree
from ironfn.generate.paged import in_place
from ironfn.layout.table import shard
from ironfn.mesh import fake
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.model import prepared, skinny
from ironfn.model.init import init
from ironfn.model.prepared import int8, packed, quantization_error, quantized
from ironfn.model.tables import table
from ironfn.model.transformer import logits
from ironfn.types import Params
from tests import peers
from tests.family_peers import PEERS
from tests.paging import Laid, in_passes

CLOSE: dict[str, float] = {"rtol": 1e-5, "atol": 1e-5}
MATRICES = ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")


def seen_by_int8(params: Params, tied: bool) -> Params:
    """Round the matrices as torch's own quantiser does, and give a tied head a table of its own."""
    flat = dict(tree.flatten(params))
    head = "embed/tokens" if tied else "head/w"
    flat = {p: rounded(x, 1) if p.rsplit("/", 1)[-1] in MATRICES and x.dim() == 2 else x for p, x in flat.items()}
    return tree.unflatten(flat | {"head/w": rounded(tree.flatten(params)[head], 0)})


def rounded(w: Tensor, dim: int) -> Tensor:
    scale = w.abs().amax(1 - dim) / 127
    zero = torch.zeros(len(scale), dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(w, scale, zero, dim, -127, 127)


@pytest.mark.parametrize("name", PEERS)
def test_a_packed_model_is_transformers_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For one row, a few, and many; small matrices and those that are held to be large; in as many parts as threads."""
    peer = PEERS[name]
    arch = peer.arch()
    model = peer.build(arch)
    tokens = torch.randint(0, arch.vocab, (3, 24))
    for small, threads in ((0, 1), (skinny._SMALL, 6)):
        monkeypatch.setattr(skinny, "_SMALL", small)
        monkeypatch.setattr(torch, "get_num_threads", partial(int, threads))
        params, ready = packed(peer.tree(model, arch), arch)
        with torch.no_grad():
            for part in (tokens, tokens[:1, :5], tokens[:1, :1]):
                torch.testing.assert_close(logits(params, {"tokens": part}, ready, SINGLE), model(part).logits, **CLOSE)


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi", "bloom", "qwen2-moe"])
def test_a_model_in_8_bits_is_the_model_of_the_rounded_matrices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", partial(int, 6))
    peer = PEERS[name]
    arch = peer.arch()
    whole = peer.tree(peer.build(arch), arch)
    params, ready = int8(whole, arch)
    tokens = torch.randint(0, arch.vocab, (3, 24))
    with torch.no_grad():
        few = logits(params, {"tokens": tokens[:1, :2]}, ready, SINGLE)
        found = logits(params, {"tokens": tokens}, ready, SINGLE)
        expected = logits(seen_by_int8(whole, arch.tied), {"tokens": tokens}, ready, SINGLE)
        exact = logits(whole, {"tokens": tokens}, arch, SINGLE)
    off, off_by_bits = ((x - exact).square().mean().sqrt() for x in (found, expected))
    assert (found - expected).square().mean().sqrt() < 0.05 * off_by_bits, "activations round far less than weights"
    assert off < 1.02 * off_by_bits
    torch.testing.assert_close(few, expected[:1, :2], rtol=1e-5, atol=1e-5)


def test_the_error_of_8_bits_is_known() -> None:
    """A column whose largest number is m is off by at most m / 254, and evenly so: m / 127 / sqrt(12)."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(512, 300, generator=generator)
    w[:, 0] = 0
    whole, scale = quantized(w)
    assert whole.dtype == torch.int8
    assert whole.abs().max() == 127
    assert ((whole * scale - w).abs() <= w.abs().amax(0) / 254 * (1 + 1e-5)).all()
    even = (w.abs().amax(0) / 127).square().sum() * len(w) / 12
    assert quantization_error(w) == pytest.approx(float(even.sqrt() / w.norm()), rel=0.02)
    assert quantization_error(torch.full((4, 4), 0.3)) < 1e-6


def a_product(rows: int) -> tuple[Any, Tensor, Tensor]:
    """Return a prepared matrix, numbers to multiply it by, and the exact result."""
    generator = torch.Generator().manual_seed(1)
    arch = peers.make_arch("gpt2", 40)
    params = init(arch, 1, table(False), SINGLE)
    w = torch.randn(48, 48, generator=generator)
    params["blocks"]["0"]["attn"]["wo"] = w  # pyright: ignore
    x = torch.randn(rows, 48, generator=generator) * 10 ** torch.randn(rows, 1, generator=generator)
    whole, scale = quantized(w)
    exact = x.double() @ (whole.double() * scale.double())
    return int8(params, arch)[0]["blocks"]["0"]["attn"]["wo"].times, x, exact  # pyright: ignore


def test_activations_keep_13_bits() -> None:
    times, x, exact = a_product(9)
    off = (times(x).double() - exact).norm(dim=1) / exact.norm(dim=1)
    low = (x.bfloat16().double() - x.double()).norm(dim=1) / x.norm(dim=1).double()
    assert (off < low / 5).all(), "far nearer than bfloat16 would be"


def test_a_row_in_8_bits_does_not_depend_on_its_neighbours() -> None:
    """But for how many there are: the activations of up to two rows are not rounded at all."""
    times, x, exact = a_product(33)
    for sizes in ((1, 2), (3, 12, 33)):
        together = times(x[: sizes[-1]])
        for size in sizes:
            for start in range(0, sizes[-1] - size + 1, size):
                assert torch.equal(times(x[start : start + size]), together[start : start + size])
    torch.testing.assert_close(times(x[:2]).double(), exact[:2], rtol=1e-5, atol=1e-6)
    assert torch.equal(times(x.view(3, 11, -1)), times(x).view(3, 11, -1))


def test_what_is_no_number_stays_none_and_nothing_stays_nothing() -> None:
    times, x, _ = a_product(4)
    clean = times(x)
    x[0, 3], x[2, 5], x[3] = math.nan, math.inf, 0.0
    found = times(x)
    assert not found[0].isfinite().any()
    assert not found[2].isfinite().any()
    assert torch.equal(found[1], clean[1])
    assert torch.equal(found[3], torch.zeros(48))


@pytest.mark.parametrize("make", [skinny.float32, prepared._int8])
def test_no_row_has_no_result(make: Any) -> None:
    """A step of the engine may read prompts alone, and then it asks the head for nothing."""
    product = make(torch.randn(384, 768))
    assert product(torch.empty(0, 384)).shape == (0, 768)
    assert product(torch.empty(2, 0, 384)).shape == (2, 0, 768)


@pytest.mark.parametrize("shape", [(7, 5), (3, 1), (20, 130), (9, 1100)])
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_any_shape_is_parted_for_any_threads(
    shape: tuple[int, int], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", partial(int, threads))
    generator = torch.Generator().manual_seed(2)
    w = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
    scale = torch.rand(shape[1], generator=generator)
    for rows in (1, 2):
        x = torch.randn(rows, shape[0], generator=generator)
        exact = x.double() @ w.double()
        torch.testing.assert_close(skinny.float32(w.float())(x).double(), exact, rtol=1e-5, atol=1e-3)
        torch.testing.assert_close(skinny.bytes_of(w, scale)(x).double(), exact * scale, rtol=1e-5, atol=1e-3)


def test_other_numbers_than_float32_stay_as_they_are() -> None:
    arch = peers.make_arch("llama", 31)
    for dtype in (torch.float64, torch.bfloat16):
        params = init(arch, 0, table(False), SINGLE, dtype)
        same, still = packed(params, arch)
        assert same is params
        assert still is arch


@pytest.mark.parametrize("prepare", [packed, int8])
def test_the_tree_that_was_prepared_is_as_it_was(prepare: Any) -> None:
    arch = peers.make_arch("llama", 31, kv_heads=2)
    params = init(arch, 0, table(False), SINGLE)
    before = {path: x.clone() for path, x in tree.flatten(params).items()}
    prepare(params, arch)
    assert list(tree.flatten(params)) == list(before)
    assert all(torch.equal(x, before[path]) for path, x in tree.flatten(params).items())


def test_what_reads_the_same_rows_is_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny, "_SMALL", 0)
    arch = peers.make_arch("llama", 31, kv_heads=2, layers=3)
    params, ready = packed(init(arch, 0, table(False), SINGLE), arch)
    calls: list[str] = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.extend(n for n in ("_embedding_bag", "_linear_pointwise") if func.__name__.startswith(n))
            return func(*args, **(kwargs or {}))

    with Products():
        in_passes(params, ready, Laid([[1, 2, 3]], [[0, 1, 2]], [0]), [[(0, 2)], [(0, 1)]], in_place)
    assert calls == ["_linear_pointwise"] * 13 + ["_embedding_bag"] * 13, "four a layer and the head"


@pytest.mark.parametrize("prepare", [packed, int8])
def test_a_rank_prepares_its_part(prepare: Any) -> None:
    arch = peers.make_arch("llama", 32, kv_heads=2)
    params, tokens = init(arch, 0, table(False), SINGLE), torch.arange(12)[None]

    def rank(mesh: Mesh) -> Tensor:
        mine, ready = prepare(shard(params, table(False), mesh), arch)
        with torch.no_grad():
            return logits(mine, {"tokens": tokens}, ready, mesh)

    alone = rank(SINGLE)
    # a scale is of a rank's part of a column: of wo and w_down it is another one
    close = CLOSE if prepare is packed else {"rtol": 0, "atol": 0.02 * float(alone.std())}
    for found in fake.run(rank, tp=2):
        torch.testing.assert_close(found, alone, **close)


def test_few_numbers_of_rows_reach_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN keeps what it compiles for each: 1,000 lengths of prompts would cost gigabytes."""
    monkeypatch.setattr(skinny, "_SMALL", 0)
    w = torch.randn(16, 24)
    times = skinny.float32(w)
    seen: set[int] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "_linear_pointwise" in str(func):
                seen.add(args[0].shape[0])
            return func(*args, **(kwargs or {}))

    for rows in range(1, 600):
        x = torch.randn(1, rows, 16)
        with Watch():
            found = times(x)
        torch.testing.assert_close(found, x @ w, rtol=0.0, atol=1e-4)
    assert 20 < len(seen) < 60


def test_bytes_add_up_exactly_where_they_are_largest() -> None:
    """Pairs of products would overflow 16 bits, if the numbers of a row had all of their 8."""
    w = torch.ones(1000, 8) * torch.tensor([1.0, -1.0]).repeat(4)
    for sign in (1, -1):
        found = prepared._int8(w)(sign * torch.ones(5, 1000))
        torch.testing.assert_close(found, sign * 1000 * torch.tensor([1.0, -1.0]).repeat(5, 4))
