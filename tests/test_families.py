"""Every family equals `transformers`: logits at every position, padded left and right; losses and gradients."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ironfn import tree
from ironfn.grad.value_and_grad import value_and_grad
from ironfn.loss.lm import lm_loss
from ironfn.mesh.axis import SINGLE
from ironfn.model.arch import Arch
from ironfn.model.attention import by_mask, by_span, written_out
from ironfn.model.forward import Forward
from ironfn.model.init import shapes
from ironfn.model.transformer import hidden, logits
from ironfn.types import Params
from tests.family_peers import PEERS, Peer

CLOSE: dict[str, float] = {"rtol": 1e-5, "atol": 1e-5}
LENGTH = 24


def built(name: str) -> tuple[Peer, Arch, nn.Module, Params]:
    peer = PEERS[name]
    arch = peer.arch()
    model = peer.build(arch)
    return peer, arch, model, peer.tree(model, arch)


def padded(model: nn.Module, tokens: Tensor, real: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the arguments of theirs, and our batch, of rows whose real tokens lie together."""
    position = (real.long().cumsum(1) - 1).clamp(min=0)
    theirs: dict[str, Any] = {"input_ids": tokens, "attention_mask": real.long()}
    if "position_ids" in inspect.signature(model.forward).parameters:
        theirs["position_ids"] = position
    return theirs, {"tokens": tokens, "position": position, "segment": torch.where(real, 0, -1)}


@pytest.mark.parametrize("name", PEERS)
def test_logits_equal_transformers_at_every_position(name: str) -> None:
    """Whole rows, rows padded on the left and on the right; by every way to attend."""
    _, arch, model, params = built(name)
    assert {path: tuple(x.shape) for path, x in tree.flatten(params).items()} == shapes(arch)
    tokens = torch.randint(0, arch.vocab, (3, LENGTH))
    places = torch.arange(LENGTH).expand(3, -1)
    real = torch.stack([places[0] >= 0, places[1] >= 7, places[2] < 15])
    theirs, batch = padded(model, tokens, real)
    with torch.no_grad():
        expected = model(**theirs).logits
        for attention in (by_span, by_mask, written_out):
            found = logits(params, batch, arch, SINGLE, Forward(attention=attention))
            torch.testing.assert_close(found[real], expected[real], **CLOSE)
        alone = logits(params, {"tokens": tokens[:1]}, arch, SINGLE)
    torch.testing.assert_close(alone, expected[:1], **CLOSE)
    assert expected[real].std() > 0.3, "a model that says nothing proves nothing"


@pytest.mark.parametrize("name", PEERS)
def test_loss_and_gradients_equal_transformers(name: str) -> None:
    peer, arch, model, params = built(name)
    tokens = torch.randint(0, arch.vocab, (3, LENGTH + 1))
    weight = (torch.rand(3, LENGTH) < 0.7).float() / 50
    theirs = F.cross_entropy(model(tokens[:, :-1]).logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    (theirs * weight).sum().backward()
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weight": weight}
    loss, grads = value_and_grad(lm_loss(arch, chunk=32, penalties=False))(params, batch, SINGLE)
    torch.testing.assert_close(loss.total, (theirs * weight).sum().detach(), rtol=1e-5, atol=0)
    expected = tree.flatten(peer.tree(model, arch, "grad"))
    for path, grad in tree.flatten(grads).items():
        torch.testing.assert_close(grad, expected[path], rtol=1e-4, atol=1e-5, msg=lambda m, p=path: f"{p}: {m}")


@pytest.mark.parametrize("name", ["gemma2", "bloom"])
def test_a_compiler_follows_the_whole_of_a_family(name: str) -> None:
    """One graph, with no break; what a back end makes of it is torch's affair."""
    arch = PEERS[name].arch(layers=2)
    params = PEERS[name].tree(PEERS[name].build(arch, num_hidden_layers=2), arch)
    torch.compiler.reset()
    body = torch.compile(hidden, fullgraph=True, dynamic=False, backend="aot_eager")
    tokens, segment = torch.randint(0, arch.vocab, (2, 16)), torch.zeros(2, 16, dtype=torch.long)
    segment[1, 9:] = 1
    batch = {"tokens": tokens, "targets": tokens.roll(-1, 1), "weight": torch.ones(2, 16), "segment": segment}
    found, grads = value_and_grad(lm_loss(arch, Forward(attention=by_mask), body=body))(params, batch, SINGLE)
    loss, expected = value_and_grad(lm_loss(arch))(params, batch, SINGLE)
    torch.testing.assert_close(found.total, loss.total)
    for path, grad in tree.flatten(grads).items():
        torch.testing.assert_close(grad, tree.flatten(expected)[path], **CLOSE)


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context": 16},
    "yarn": {"factor": 4.0, "original_context": 16},
    "yarn mscale": {"factor": 4.0, "original_context": 16, "mscale": 0.7, "mscale_all_dim": 0.3, "truncate": False},
    "yarn betas": {"factor": 3.0, "original_context": 20, "beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.3},
    "longrope": {
        "factor": 4.0, "original_context": 16, "short_factor": [1.0, 1.1, 1.2, 1.4], "long_factor": [1.0, 2.0, 3.5, 4.0]
    },
}  # fmt: skip


@pytest.mark.parametrize("length", [12, 40])
@pytest.mark.parametrize("rope", ROPES)
def test_stretched_angles_equal_transformers_beyond_the_original_context(rope: str, length: int) -> None:
    peer, kind = PEERS["phi3" if rope == "longrope" else "llama2"], rope.split()[0]
    arch = peer.arch(
        context=16 if kind in ("linear", "dynamic") else 64, rope={"kind": kind, **ROPES[rope]}, windows=[]
    )
    theirs = {"rope_type": kind, "rope_theta": arch.rope_theta} | ROPES[rope]
    theirs["original_max_position_embeddings"] = theirs.pop("original_context", arch.context)
    extra = {"original_max_position_embeddings": 16, "sliding_window": None} if kind == "longrope" else {}
    model = peer.build(arch, rope_parameters=theirs, **extra)
    params = peer.tree(model, arch)
    tokens = torch.randint(0, arch.vocab, (2, length))
    with torch.no_grad():
        torch.testing.assert_close(logits(params, {"tokens": tokens}, arch, SINGLE), model(tokens).logits, **CLOSE)
