"""The decoder equals `transformers`: logits, losses and gradients, for Llama and GPT-2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from ironfn import tree
from ironfn.grad.value_and_grad import value_and_grad
from ironfn.loss.lm import lm_loss
from ironfn.mesh.axis import SINGLE
from ironfn.model import fused, norms
from ironfn.model.arch import complete
from ironfn.model.init import init, shapes
from ironfn.model.tables import table
from ironfn.model.transformer import hidden, logits
from ironfn.spec.records import ModelSpec
from tests import peers

LLAMAS = (
    {},
    {"kv_heads": 2},
    {"kv_heads": 1, "tied": False},
    {"head_dim": 16, "rope_theta": 500000.0, "norm_eps": 1e-3},
    {"attention_bias": True, "mlp_bias": True},
)
CASES = [("llama", fields) for fields in LLAMAS] + [("gpt2", {})]


def build(preset: str, fields: dict[str, Any], vocab: int = 101):
    arch = peers.make_arch(preset, vocab, **fields)
    model, params = getattr(peers, preset)(arch)
    return arch, model, params, getattr(peers, f"{preset}_tree")


@pytest.mark.parametrize(("preset", "fields"), CASES)
def test_logits_equal_transformers(preset: str, fields: dict[str, Any]) -> None:
    arch, model, params, _ = build(preset, fields)
    assert {p: tuple(x.shape) for p, x in tree.flatten(params).items()} == shapes(arch)
    tokens = torch.randint(0, arch.vocab, (3, 40))
    with torch.no_grad():
        theirs = model(tokens).logits
        ours = logits(params, {"tokens": tokens}, arch, SINGLE)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("preset", "fields"), CASES)
def test_loss_and_gradients_equal_transformers(preset: str, fields: dict[str, Any]) -> None:
    arch, model, params, as_tree = build(preset, fields)
    tokens = torch.randint(0, arch.vocab, (3, 41))
    weight = (torch.rand(3, 40) < 0.7).float()
    theirs = F.cross_entropy(model(tokens[:, :-1]).logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    (theirs * weight).sum().backward()
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weight": weight}
    loss, grads = value_and_grad(lm_loss(arch, chunk=32))(params, batch, SINGLE)
    torch.testing.assert_close(loss.total, (theirs * weight).sum().detach(), rtol=1e-6, atol=0)
    assert loss.weight == weight.sum()
    expected = tree.flatten(as_tree(model, arch, "grad"))
    for path, grad in tree.flatten(grads).items():
        torch.testing.assert_close(grad, expected[path], rtol=1e-4, atol=1e-5, msg=lambda m, p=path: f"{p}: {m}")


def test_a_forward_derivative_is_there_where_gradients_are_off() -> None:
    """The short way, for whoever asks for no derivative, must know that somebody asks for this one."""
    generator = torch.Generator().manual_seed(0)
    x, dx, w = (torch.randn(4, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    with torch.no_grad(), forward_ad.dual_level():
        value, tangent = forward_ad.unpack_dual(fused.linear(forward_ad.make_dual(x, dx), w))
    torch.testing.assert_close(value, x @ w)
    torch.testing.assert_close(tangent, dx @ w)
    with torch.no_grad():
        _, by_func = torch.func.jvp(lambda x: norms.rms_norm(x, w[0], 1e-5).value, (x,), (dx,))
        rows = torch.func.vmap(torch.func.grad(lambda x: norms.rms_norm(x, w[0], 1e-5).value.sum()))(x)
    _, expected = torch.func.jvp(lambda x: x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w[0], (x,), (dx,))
    torch.testing.assert_close(by_func, expected)
    assert (rows != 0).all()


def test_without_derivatives_nothing_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    arch = peers.make_arch("llama", 31)
    params = peers.llama(arch)[1]
    batch = {"tokens": torch.arange(9)[None]}
    expected = logits(params, batch, arch, SINGLE)
    for function in (fused._Linears, fused._GatedMlp, fused._Rotate, fused._Lookup, norms._RmsNorm):
        monkeypatch.setattr(function, "apply", None)
    with torch.no_grad():
        torch.testing.assert_close(logits(params, batch, arch, SINGLE), expected, rtol=1e-6, atol=1e-6)


def kept(layers: int, **fields: Any) -> int:
    """Return the bytes that autograd keeps of a forward pass, parameters not counted."""
    arch = complete(
        ModelSpec(width=48, layers=layers, heads=6, kv_heads=2, head_dim=8, ffn=80, context=64, **fields), 31
    )
    params = tree.map(torch.Tensor.requires_grad_, init(arch, 0, table(False), SINGLE))
    found: dict[int, torch.UntypedStorage] = {}

    def pack(x: Tensor) -> Tensor:
        found[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = hidden(params, {"tokens": torch.zeros(2, 32, dtype=torch.long)}, arch, SINGLE)
    own = {x.untyped_storage().data_ptr() for x in tree.leaves(params)}
    assert out[0].requires_grad
    return sum(storage.nbytes() for place, storage in found.items() if place not in own)


@pytest.mark.parametrize(
    ("fields", "more"),
    [({}, 80), ({"mlp": "gelu"}, 0), ({"parallel": True}, 80 - 48 - 1), ({"norm": "layer"}, 80 + 2)],
    ids=["llama", "plain feed-forward", "parallel", "layer norm"],
)
def test_a_block_keeps_no_result_of_its_norms(fields: dict[str, Any], more: int) -> None:
    """Of each token: what both norms read and their statistics, q, k, v, what is mixed and 6 sums, the feed-forward."""
    numbers = 2 * (48 + 1) + (6 + 2 + 2 + 6) * 8 + 6 + 80 + more
    assert kept(3, **fields) - kept(2, **fields) == 4 * numbers * 2 * 32


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16], ids=["float32", "float64", "bfloat16"]
)
def test_a_lookup_equals_torchs(dtype: torch.dtype) -> None:
    ids, rows, grad = torch.tensor([[3, 0, 3], [6, 3, 0]]), torch.randn(7, 5), torch.randn(2, 3, 5)
    rows, grad = rows.to(dtype).requires_grad_(), grad.to(dtype)
    found, expected = fused.lookup(ids, rows), F.embedding(ids, rows)
    assert torch.equal(found, expected)
    ours, theirs = (torch.autograd.grad(x, rows, grad)[0] for x in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=2**-7 if dtype == torch.bfloat16 else 1e-6, atol=0)
    assert ours.dtype == dtype
    plain = rows.detach()
    by_row = torch.func.vmap(torch.func.grad(lambda t, i, g: (fused.lookup(i, t) * g).sum()), (None, 0, 0))
    torch.testing.assert_close(by_row(plain, ids, grad).sum(0), theirs, rtol=2**-7, atol=2**-7)
    _, change = torch.func.jvp(lambda t: fused.lookup(ids, t), (plain,), (plain * 2,))
    assert torch.equal(change, expected.detach() * 2)
