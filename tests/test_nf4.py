"""Matrices in 4 bits: bitsandbytes' numbers, on every mesh, and what a model of them is."""

from __future__ import annotations

from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch
from attrs import evolve
from torch import Tensor

from ironfn import tree
from ironfn.grad.remat import recompute
from ironfn.grad.value_and_grad import value_and_grad
from ironfn.layout.fsdp import fetch, shard_table
from ironfn.layout.reduce import reduce_grads
from ironfn.layout.table import by_path, shard, shard_leaf, unshard
from ironfn.loss.cross_entropy import pieces_of
from ironfn.loss.lm import lm_loss
from ironfn.loss.log_probs import asked_places, place_log_probs
from ironfn.mesh import fake
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.model import nf4
from ironfn.model.adapters import Adapting, adapter_shapes, first_adapter, frozen_base, frozen_paths, merge
from ironfn.model.arch import Arch
from ironfn.model.forward import Forward
from ironfn.model.init import shapes
from ironfn.model.tables import table
from ironfn.model.transformer import head_weight, logits
from ironfn.model.weights import Weight
from ironfn.spec.adapter_records import AdapterSpec
from ironfn.types import Batch, Params
from property_tests.strategies import batch_of, params_of
from tests.peers import make_arch

SPEC = AdapterSpec(kind="lora", rank=4, alpha=8.0, base="nf4")


def matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def test_the_levels_are_those_of_bitsandbytes() -> None:
    assert torch.equal(torch.tensor(nf4.LEVELS), bnb.get_4bit_type("nf4", device="cpu")[:16])
    assert torch.equal(nf4.magnitude_levels(), bnb.create_dynamic_map(signed=True))


@pytest.mark.parametrize("shape", [(128, 256), (576, 576), (192, 576), (1536, 64)], ids=str)
def test_codes_are_those_of_bitsandbytes(shape: tuple[int, int]) -> None:
    w = matrix(*shape)
    w[3] = 0.0
    codes, state = bnb.quantize_4bit(w, quant_type="nf4", compress_statistics=True)
    mine = nf4.quantized(w)
    assert torch.equal(mine["codes"].flatten(), codes.flatten())
    assert torch.equal(mine["mean"], state.offset)
    assert torch.equal(mine["scale"], state.state2.absmax)
    # of the magnitudes bitsandbytes' code for CPUs now and then takes the second nearest level (it looks levels up in a
    # coarse table); ours is the nearest, as in its reference
    levels, off = nf4.magnitude_levels(), mine["absmax"].flatten().int() - state.absmax.flatten().int()
    assert off.abs().max() <= 1
    assert off.count_nonzero() <= 0.005 * off.numel()
    rest = bnb.quantize_4bit(w, quant_type="nf4")[1].absmax - state.offset
    scaled = rest / state.state2.absmax.repeat_interleave(nf4.GROUP)[: len(rest)]
    distance = (levels[mine["absmax"].flatten().int()] - scaled).abs()
    assert (distance <= (levels[state.absmax.flatten().int()] - scaled).abs() + 1e-7).all()


@pytest.mark.parametrize("shape", [(128, 256), (192, 576)], ids=str)
def test_its_codes_become_its_numbers(shape: tuple[int, int]) -> None:
    codes, state = bnb.quantize_4bit(matrix(*shape), quant_type="nf4", compress_statistics=True)
    parts = {"codes": codes.view(shape[0], -1), "absmax": state.absmax.view(shape[0], -1)}
    held = nf4.held("wq", parts | {"scale": state.state2.absmax, "mean": state.offset}, SINGLE)
    assert torch.equal(held.rows(torch.float32), bnb.dequantize_4bit(codes, state))
    some = torch.tensor([5, 0, 5, shape[0] - 1])
    assert torch.equal(held.rows(torch.float32, some), bnb.dequantize_4bit(codes, state)[some])


def test_a_number_takes_4_127_bits() -> None:
    parts = nf4.quantized(matrix(1024, 1024))
    assert nf4.bits(tree.unflatten(parts)) == pytest.approx(4 + 8 / 64 + 32 / (64 * 256), abs=1e-4)
    assert tree.nbytes(tree.unflatten(parts)) <= 0.14 * 4 * 1024 * 1024


def made(tied: bool = True, **fields: Any) -> tuple[Arch, Params, Params, Batch]:
    """Return a small Llama, its frozen form in NF4, and a batch."""
    arch = make_arch("llama", 64, width=128, heads=4, kv_heads=4, ffn=128, tied=tied, **fields)
    base = tree.map(lambda x: x.float(), params_of(arch))
    return arch, base, frozen_base(SPEC, base, table(False)), batch_of(arch, 4, 12, 0, False)


def opened(arch: Arch, held: Params) -> Params:
    """Return the model whose matrices are what NF4 makes of them, by bitsandbytes' own formula."""
    plain = AdapterSpec(kind="lora", base="nf4", targets=["attn/wq"], alpha=0.0)
    return merge(plain, arch, held, first_adapter(plain, arch, held, 0, table(False)))[0]


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_training_beside_nf4_is_training_beside_its_numbers(kind: str) -> None:
    arch, base, held, batch = made()
    spec = AdapterSpec(kind="lora", rank=4, base="nf4", dora=kind == "dora", targets=["attn", "mlp/w_up"])
    adapter = first_adapter(spec, arch, held, 0, table(False))
    adapter = tree.map(lambda x: x + 0.01 * torch.randn_like(x), adapter)
    dense = opened(arch, held)
    assert set(tree.flatten(dense)) == set(tree.flatten(base))
    assert "wq" not in held["blocks"]["0"]["attn"]  # type: ignore[index, call-overload]
    vg = value_and_grad(lm_loss(arch, Forward(adapt=Adapting(spec))))
    (mine, grads), (theirs, expected) = vg(adapter, batch, SINGLE, held), vg(adapter, batch, SINGLE, dense)
    torch.testing.assert_close(mine.total, theirs.total, rtol=1e-6, atol=0)
    for a, b in zip(tree.leaves(grads), tree.leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    near = tree.flatten(base)["blocks/0/attn/wq"] - tree.flatten(dense)["blocks/0/attn/wq"]
    assert 0 < near.norm() < 0.1 * tree.flatten(base)["blocks/0/attn/wq"].norm()


def test_tables_may_be_in_nf4_too() -> None:
    arch, base, _, batch = made()
    layout = table(False)
    held = nf4.quantize(base, lambda path: path == "embed/tokens" or "/w" in path, layout)
    spec = AdapterSpec(kind="lora", rank=4, base="nf4", targets=["embed/tokens", "head/w"])
    adapter = first_adapter(spec, arch, held, 0, layout)
    adapter = tree.map(lambda x: x + 0.01 * torch.randn_like(x), adapter)
    found = logits(tree.merge(adapter, held), batch, arch, SINGLE, Forward(adapt=Adapting(spec)))
    whole, without = merge(spec, arch, held, adapter)
    torch.testing.assert_close(logits(whole, batch, without, SINGLE), found, rtol=1e-4, atol=1e-4)
    assert tree.nbytes(held) < 0.14 * tree.nbytes(base)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("softcap", [None, 3.0], ids=["plain", "capped"])
def test_a_head_in_nf4_is_read_by_pieces(tied: bool, softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nf4, "_PIECE", 24)  # 64 rows are two whole pieces and a part
    arch, base, _, batch = made(tied=tied)
    arch, spec = evolve(arch, logit_softcap=softcap), AdapterSpec(kind="lora", rank=4, base="nf4_all")
    held = frozen_base(spec, base, table(False))
    assert sorted(tree.flatten(held)) == sorted(p for p in frozen_paths(spec, arch) if p not in spec_matrices(arch))
    adapter = first_adapter(spec, arch, held, 0, table(False))
    adapter = tree.map(lambda x: x + 0.01 * torch.randn_like(x), adapter)
    how, dense = Forward(adapt=Adapting(spec)), opened(arch, held)
    w = head_weight(held, arch, how)
    assert isinstance(w, Weight)
    assert [len(part) for part in pieces_of(w, torch.float32)] == [24, 24, 16]
    batch["weight"][:, ::3] = 0.0
    vg = value_and_grad(lm_loss(arch, how, chunk=5))
    (mine, grads), (theirs, expected) = vg(adapter, batch, SINGLE, held), vg(adapter, batch, SINGLE, dense)
    torch.testing.assert_close(mine.total, theirs.total, rtol=1e-6, atol=0)
    for a, b in zip(tree.leaves(grads), tree.leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    whole = tree.merge(adapter, dense)
    torch.testing.assert_close(
        logits(tree.merge(adapter, held), batch, arch, SINGLE, how), logits(whole, batch, arch, SINGLE, how)
    )
    places = asked_places(batch | {"segment": torch.zeros_like(batch["tokens"])})
    found, same = (
        place_log_probs(params, batch, arch, SINGLE, how, places)[0] for params in (tree.merge(adapter, held), whole)
    )
    torch.testing.assert_close(found, same)


def spec_matrices(arch: Arch) -> set[str]:
    """Return the matrices that are kept in 4 bits and nowhere else."""
    return {path for path in shapes(arch) if path in ("embed/tokens", "head/w") or path.split("/")[-1].startswith("w")}


def test_the_base_takes_an_eighth_with_its_tables() -> None:
    _, base, held, _ = made(tied=False)
    spec = AdapterSpec(kind="lora", base="nf4_all")
    assert tree.nbytes(frozen_base(spec, base, table(False))) <= 0.14 * tree.nbytes(base) < tree.nbytes(held)


@pytest.mark.parametrize(
    "sizes",
    [{"tp": 2}, {"dp": 2}, {"tp": 2, "dp": 2, "sequence_parallel": True}],
    ids=["tp", "fsdp", "tp, fsdp, sequence parallel"],
)
def test_it_is_the_same_on_every_mesh(sizes: dict[str, Any]) -> None:
    arch, base, _, batch = made(tied=False)
    layout, spec = table(False), evolve(SPEC, base="nf4_all")
    held = frozen_base(spec, base, layout)
    adapter = tree.map(lambda x: x + 0.01 * torch.randn_like(x), first_adapter(spec, arch, held, 0, layout))
    alone, expected = value_and_grad(lm_loss(arch, Forward(adapt=Adapting(spec))))(adapter, batch, SINGLE, held)

    def part(mesh: Mesh) -> tuple[float, Params]:
        rows = table(mesh.sequence_parallel)
        mine = frozen_base(spec, shard(base, rows, mesh), rows, mesh)
        for path, leaf in tree.flatten(mine).items():
            place = by_path(rows, [path])[path]
            assert torch.equal(leaf, shard_leaf(tree.flatten(held)[path], place, mesh, path)), path
        both = {path: tuple(x.shape) for path, x in tree.flatten(held).items()} | adapter_shapes(spec, arch)
        places = shard_table(by_path(rows, both), both, mesh)
        how = Forward(adapt=Adapting(spec, mesh), fetch=fetch(places, mesh), run=recompute)
        take = slice(mesh.share * 4 // mesh.shares, (mesh.share + 1) * 4 // mesh.shares)
        local = {name: x[take] for name, x in batch.items()}
        loss, grads = value_and_grad(lm_loss(arch, how))(
            shard(adapter, places, mesh), local, mesh, shard(held, places, mesh)
        )
        return float(mesh.dp.backend.all_reduce(loss.total)), unshard(reduce_grads(grads, places, mesh), places, mesh)

    for total, grads in fake.run(part, **sizes):
        assert total == pytest.approx(float(alone.total), rel=1e-5)
        for path, leaf in tree.flatten(grads).items():
            torch.testing.assert_close(leaf, tree.flatten(expected)[path], rtol=1e-3, atol=1e-4)


def test_what_does_not_fit_is_refused_with_its_path() -> None:
    arch = make_arch("llama", 61, width=48, ffn=80)
    with pytest.raises(ValueError, match=r"blocks/0/attn/wq: NF4 takes 64 inputs at a time, and 48"):
        frozen_base(SPEC, params_of(arch), table(False))
