"""The decoder equals `transformers`: logits, losses and gradients, for Llama and GPT-2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F

from ironfn import tree
from ironfn.grad.value_and_grad import value_and_grad
from ironfn.loss.lm import lm_loss
from ironfn.mesh.axis import SINGLE
from ironfn.model import fused
from ironfn.model.init import shapes
from ironfn.model.transformer import logits
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
        _, by_func = torch.func.jvp(lambda x: fused.rms_norm(x, w[0], 1e-5), (x,), (dx,))
        rows = torch.func.vmap(torch.func.grad(lambda x: fused.rms_norm(x, w[0], 1e-5).sum()))(x)
    _, expected = torch.func.jvp(lambda x: x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w[0], (x,), (dx,))
    torch.testing.assert_close(by_func, expected)
    assert (rows != 0).all()


def test_without_derivatives_nothing_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    arch = peers.make_arch("llama", 31)
    params = peers.llama(arch)[1]
    batch = {"tokens": torch.arange(9)[None]}
    expected = logits(params, batch, arch, SINGLE)
    for name in ("_Linear", "_GatedMlp", "_RmsNorm", "_Rotate"):
        monkeypatch.setattr(getattr(fused, name), "apply", None)
    with torch.no_grad():
        torch.testing.assert_close(logits(params, batch, arch, SINGLE), expected, rtol=1e-6, atol=1e-6)
