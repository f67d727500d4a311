"""Low precision goes where the spec says and nowhere else; a compiled loss is the loss."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from ironfn import tree
from ironfn.algo.step import State, make_step
from ironfn.grad.remat import recompute
from ironfn.grad.value_and_grad import value_and_grad
from ironfn.loss.lm import lm_loss
from ironfn.mesh.axis import SINGLE
from ironfn.model.arch import Arch
from ironfn.model.attention import Dropout, by_mask
from ironfn.model.forward import Forward
from ironfn.model.init import init
from ironfn.model.norms import rms_norm
from ironfn.model.rope import angles
from ironfn.model.tables import table
from ironfn.model.transformer import hidden, logits
from ironfn.optim.adamw import adamw
from ironfn.optim.combine import master_weights
from ironfn.types import Batch, Params
from tests import peers

LOW = Forward(compute=torch.bfloat16)


def a_batch(arch: Arch, rows: int = 4, length: int = 24, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, arch.vocab, (rows, length + 1), generator=generator)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weight": torch.ones(rows, length)}


# Computing in bfloat16 over float32 parameters.


@pytest.mark.parametrize("preset", ["llama", "gpt2"])
def test_gradients_come_back_in_the_parameters_dtype_and_near(preset: str) -> None:
    """bfloat16 keeps 8 bits: the loss stays within 2^-8 of float32's, the gradient points where float32's does."""
    arch = peers.make_arch(preset, 101)
    _, params = getattr(peers, preset)(arch)
    batch = a_batch(arch)
    exact, grads = value_and_grad(lm_loss(arch))(params, batch, SINGLE)
    low, low_grads = value_and_grad(lm_loss(arch, LOW))(params, batch, SINGLE)
    assert low.total.dtype == torch.float32
    assert low.total != exact.total, "something was computed in low precision"
    assert float(low.total) == pytest.approx(float(exact.total), rel=2**-8)
    assert {leaf.dtype for leaf in tree.leaves(low_grads)} == {torch.float32}
    flat, low_flat = (torch.cat([g.flatten() for g in tree.leaves(each)]) for each in (grads, low_grads))
    assert float(F.cosine_similarity(flat, low_flat, 0)) > 0.999
    assert float(low_flat.norm()) == pytest.approx(float(flat.norm()), rel=0.02)


class Watch(TorchDispatchMode):
    """Note the dtypes of the inputs of every operation, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = {x.dtype for x in args if isinstance(x, Tensor) and x.is_floating_point()}
        self.seen.setdefault(func.overloadpacket.__name__, set()).update(found)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("preset", ["llama", "gpt2"])
def test_products_are_low_and_norms_are_high(preset: str) -> None:
    """No product of float32, and no statistic of a norm in bfloat16, in the whole forward pass."""
    arch = peers.make_arch(preset, 101)
    _, params = getattr(peers, preset)(arch)
    batch = a_batch(arch)
    with torch.no_grad(), Watch() as watch:
        lm_loss(arch, LOW)(params, batch, SINGLE)
    products = set().union(*(watch.seen.get(name, set()) for name in ("mm", "addmm", "bmm", "baddbmm")))
    assert products == {torch.bfloat16}
    statistics = watch.seen["rsqrt"] if preset == "llama" else watch.seen["native_layer_norm"]
    assert statistics == {torch.float32}
    assert watch.seen["log"] == {torch.float32}, "the cross-entropy sums in float32"


def test_the_leaves_of_keep_float32_keep_their_gradients_exact() -> None:
    """A norm's scale of 1 + 2^-12 is 1 in bfloat16: kept high it changes the logits, cast it does not."""
    arch = peers.make_arch("llama", 101)
    _, params = peers.llama(arch)
    batch = a_batch(arch)

    def scaled(by: float) -> Params:
        return tree.map_path(lambda path, x: torch.full_like(x, by) if "norm" in path else x, params)

    def changes(how: Forward) -> bool:
        one, other = (logits(scaled(by), batch, arch, SINGLE, how) for by in (1.0, 1.0 + 2**-12))
        return not torch.equal(one, other)

    with torch.no_grad():
        assert not changes(Forward(compute=torch.bfloat16, float32=()))
        assert changes(Forward(compute=torch.bfloat16, float32=("norm",)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_rms_statistic_is_summed_in_float32(dtype: torch.dtype) -> None:
    """One channel 1e3, the rest 1e-2, as `transformers` norms it: a bfloat16 sum would lose the small ones."""
    x = torch.full((3, 512), 1e-2)
    x[:, 7] = 1e3
    x[1] *= 64.0  # and squares that float16, if anybody took it, could not hold
    x = x.to(dtype)
    scale = torch.linspace(0.5, 1.5, 512)
    theirs = LlamaRMSNorm(512, eps=1e-5)
    theirs.weight.data = scale
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * scale.double()
    found = rms_norm(x, scale, 1e-5).value
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=0)
    torch.testing.assert_close(
        found.float(), theirs(x).float(), rtol=2**-7 if dtype == torch.bfloat16 else 1e-6, atol=0
    )


def test_small_channels_are_not_lost_in_a_low_precision_sum() -> None:
    """4096 channels of 1: a bfloat16 running sum stops at 256, and the norm would be off by 4."""
    found = rms_norm(torch.ones(1, 4096, dtype=torch.bfloat16), torch.ones(4096), 0.0).value
    assert torch.equal(found, torch.ones(1, 4096, dtype=torch.bfloat16))


# Rotary tables.


def test_rotary_angles_are_float32_whatever_the_model_computes_in() -> None:
    """Position 257 has no bfloat16: a table made of bfloat16 positions would turn by 256 or 258."""
    arch = peers.make_arch("llama", 101, context=512)
    position = torch.tensor([[255, 256, 257, 258]])
    found = angles(position, None, arch)
    assert found is not None
    cos, sin = found
    assert cos.dtype == sin.dtype == torch.float32
    config = peers.llama(arch)[0].config
    their_cos, their_sin = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=torch.float32), position)
    torch.testing.assert_close(cos[:, :, 0], their_cos, rtol=1e-6, atol=1e-6)
    sign = torch.tensor([-1.0] * 6 + [1.0] * 6)  # ours is given with the sign that it enters the turn with
    torch.testing.assert_close(sin[:, :, 0], their_sin * sign, rtol=1e-6, atol=1e-6)
    exact = torch.cos(257.0 / 10000.0 ** (torch.arange(0, 12, 2, dtype=torch.float64) / 12))
    torch.testing.assert_close(cos[0, 2, 0, :6].double(), exact, rtol=0, atol=2e-5)


def test_a_low_precision_model_tells_positions_256_to_258_apart() -> None:
    """The last token attends from 256, 257 and 258 to the same keys: three turns, three results."""
    arch = peers.make_arch("llama", 101, context=512)
    _, params = peers.llama(arch)
    low = tree.map(lambda x: x.bfloat16() * 4, params)
    tokens = torch.randint(0, 101, (1, 6))
    for how, weights in ((LOW, params), (Forward(), low)):
        found = []
        for at in (256, 257, 258):
            position = torch.tensor([[0, 1, 2, 3, 4, at]])
            found.append(logits(weights, {"tokens": tokens, "position": position}, arch, SINGLE, how)[0, -1])
        assert not torch.equal(found[0], found[1])
        assert not torch.equal(found[1], found[2])


def test_the_tables_do_not_depend_on_when_the_model_was_cast() -> None:
    """Casting the parameters and computing in bfloat16 give the same logits: nothing is cached in a dtype."""
    arch = peers.make_arch("llama", 101)
    _, params = peers.llama(arch)
    rounded = tree.map_path(lambda path, x: x if "norm" in path else x.bfloat16(), params)
    batch = a_batch(arch)
    with torch.no_grad():
        assert torch.equal(logits(rounded, batch, arch, SINGLE), logits(params, batch, arch, SINGLE, LOW))


# bfloat16 parameters and their float32 masters.


def train(params: Params, arch: Arch, how: Forward, optimizer, steps: int, lr: float) -> tuple[State, list[float]]:
    step = make_step(value_and_grad(lm_loss(arch, how)), optimizer, lambda step: lr, clip=1.0, donate=True)
    state, losses = State(0, params, optimizer.init(params)), []
    batch = a_batch(arch)
    for _ in range(steps):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return state, losses


def test_bfloat16_parameters_train_through_float32_masters() -> None:
    """Forty steps on one batch: the loss falls as float32's does, and the parameters are the masters, rounded."""
    arch = peers.make_arch("llama", 61)
    first = init(arch, 0, table(False), SINGLE)
    _, exact = train(tree.clone(first), arch, Forward(), adamw(), 40, 3e-3)
    low, losses = train(tree.map(Tensor.bfloat16, first), arch, Forward(), master_weights(adamw()), 40, 3e-3)
    assert exact[-1] < 0.5 * exact[0]
    assert losses[-1] == pytest.approx(exact[-1], rel=0.05)
    masters = tree.flatten(tree.branch(low.opt, "master"))
    for path, leaf in tree.flatten(low.params).items():
        assert (leaf.dtype, masters[path].dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(leaf, masters[path].bfloat16())
    assert {x.dtype for x in tree.leaves(low.opt)} == {torch.float32, torch.int64}


def test_a_small_update_survives_in_the_master_and_would_be_lost_without() -> None:
    """Weight 1.0, gradient of constant sign, rate 6e-4, 100 steps: 0.06 through masters, nothing in bfloat16."""

    def descend(optimizer) -> float:
        params: Params = {"w": torch.ones(1, dtype=torch.bfloat16)}
        state = optimizer.init(params)
        for _ in range(100):
            params, state = optimizer.update({"w": torch.ones(1, dtype=torch.bfloat16)}, state, params, 6e-4)
        return float(tree.leaf(params, "w"))

    assert descend(master_weights(adamw(weight_decay=0.0))) == pytest.approx(1.0 - 0.06, abs=2**-8)
    assert descend(adamw(weight_decay=0.0)) == 1.0


def test_float16_and_bfloat16_losses_are_summed_in_float32() -> None:
    """A float16 sum of 96 losses of 5 nats would be rounded to multiples of 0.25 or more."""
    arch = peers.make_arch("llama", 101)
    _, params = peers.llama(arch)
    batch = a_batch(arch)
    low = tree.map(Tensor.bfloat16, params)
    loss, grads = value_and_grad(lm_loss(arch))(low, batch, SINGLE)
    assert loss.total.dtype == loss.weight.dtype == torch.float32
    assert {leaf.dtype for leaf in tree.leaves(grads)} == {torch.bfloat16}
    rows = logits(low, batch, arch, SINGLE).float()
    expected = F.cross_entropy(rows.flatten(0, 1), batch["targets"].flatten(), reduction="sum")
    torch.testing.assert_close(loss.total, expected, rtol=1e-3, atol=0)


# torch.compile.


@pytest.mark.parametrize(
    ("preset", "how"),
    [
        ("llama", Forward(attention=by_mask)),
        ("gpt2", Forward(attention=by_mask, dropout=Dropout(0.2, 3))),
        ("llama", Forward(attention=by_mask, run=recompute, compute=torch.bfloat16)),
    ],
    ids=["llama", "gpt2 with dropout", "remat in bfloat16"],
)
def test_a_compiled_loss_trains_as_the_eager_one(preset: str, how: Forward) -> None:
    """No graph break (``fullgraph``), no warning. The backend `aot_eager` traces, functionalises and partitions as the
    default one does, without its C++ compiler, which takes minutes; the default was seen to agree by hand.
    """
    arch = peers.make_arch(preset, 61, layers=1, width=16, heads=2, ffn=24)
    first = init(arch, 0, table(False), SINGLE)
    batch = a_batch(arch, 3, 12)
    batch |= {"segment": (torch.arange(12) // 5).expand(3, -1), "row": torch.arange(3)}
    losses = []
    torch._dynamo.reset()
    for body in (hidden, torch.compile(hidden, backend="aot_eager", fullgraph=True)):
        loss = lm_loss(arch, how, body=body)
        step = make_step(value_and_grad(loss), adamw(), lambda step: 1e-2)
        state, seen = State(0, tree.clone(first), adamw().init(first)), []
        for number in range(3):
            state, metrics = step(state, batch | {"row": torch.arange(3) + 3 * number})
            seen.append(metrics["loss"])
        losses.append(seen)
    assert losses[0] == pytest.approx(losses[1], rel=2e-6 if how.compute is None else 2e-3)
    assert all(math.isfinite(loss) for loss in losses[0])
