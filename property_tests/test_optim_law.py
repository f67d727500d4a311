"""Laws 9 and 10 for optimizers: torch's values whatever the shapes and numbers, and whatever the buffers."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ironfn import tree
from ironfn.optim.adamw import adamw
from ironfn.optim.combine import master_weights
from ironfn.optim.muon import jordan, moonshot, muon
from ironfn.optim.newton_schulz import COEFFICIENTS, orthogonalize
from ironfn.optim.optimizer import Optimizer, pure
from ironfn.optim.presets import groups_table, labels_of, make_optimizer
from ironfn.optim.schedules import make_schedule
from ironfn.spec.records import OptimSpec, ScheduleSpec
from ironfn.types import Params

sizes = st.integers(1, 9)
matrices = st.tuples(sizes, sizes)
any_shape = st.lists(sizes, max_size=3).map(tuple)
NAMES = (
    "embed/tokens",
    "blocks/0/attn/wq",
    "blocks/0/attn/bq",
    "blocks/1/mlp/w_up",
    "blocks/1/norm1/scale",
    "norm/scale",
)


def shapes_of_models(shape: st.SearchStrategy[tuple[int, ...]]) -> st.SearchStrategy[dict[str, tuple[int, ...]]]:
    return st.dictionaries(st.sampled_from(NAMES), shape, min_size=1)


def draw(shapes: dict[str, tuple[int, ...]], seed: int) -> Params:
    """Draw in float64, where a reference and we can agree to the last digits whatever the order of the sums."""
    generator = torch.Generator().manual_seed(seed)
    return tree.unflatten({p: torch.randn(s, generator=generator, dtype=torch.float64) for p, s in shapes.items()})


def follow(ours: Optimizer, peer: torch.optim.Optimizer, peers: dict[str, Tensor], params: Params, seed: int) -> None:
    shapes = {path: tuple(p.shape) for path, p in tree.flatten(params).items()}
    state = ours.init(params)
    for step in range(4):
        grads, lr = draw(shapes, seed + 1 + step), 0.01 * (1 + step)
        for path, g in tree.flatten(grads).items():
            peers[path].grad = oriented(g, peer)
        for group in peer.param_groups:
            group["lr"] = lr
        peer.step()
        params, state = ours.update(grads, state, params, lr)
    for path, p in tree.flatten(params).items():
        torch.testing.assert_close(p, oriented(peers[path].detach(), peer), rtol=0, atol=1e-9)


def oriented(x: Tensor, peer: torch.optim.Optimizer) -> Tensor:
    """Turn a matrix between [inputs, outputs] and torch.optim.Muon's [outputs, inputs]."""
    return x.T.clone() if isinstance(peer, torch.optim.Muon) else x.clone()


@settings(max_examples=60, deadline=None)
@given(
    shapes=shapes_of_models(any_shape),
    beta1=st.floats(0.0, 0.99),
    beta2=st.floats(0.0, 0.999),
    decay=st.floats(0.0, 1.0),
    eps=st.floats(1e-10, 1e-2),
    seed=st.integers(0, 999),
)
def test_adamw_is_torchs(shapes: dict, beta1: float, beta2: float, decay: float, eps: float, seed: int) -> None:
    params = draw(shapes, seed)
    peers = {path: p.clone().requires_grad_() for path, p in tree.flatten(params).items()}
    peer = torch.optim.AdamW(peers.values(), betas=(beta1, beta2), eps=eps, weight_decay=decay)
    follow(adamw(beta1, beta2, eps, decay), peer, peers, params, seed)


@settings(max_examples=60, deadline=None)
@given(
    shapes=shapes_of_models(matrices),
    momentum=st.floats(0.0, 0.99),
    nesterov=st.booleans(),
    steps=st.integers(1, 6),
    decay=st.floats(0.0, 1.0),
    rule=st.sampled_from([(jordan, "original"), (moonshot, "match_rms_adamw")]),
    seed=st.integers(0, 999),
)
def test_muon_is_torchs(
    shapes: dict, momentum: float, nesterov: bool, steps: int, decay: float, rule: tuple, seed: int
) -> None:
    params = draw(shapes, seed)
    peers = {path: p.T.clone().requires_grad_() for path, p in tree.flatten(params).items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "bfloat16", lambda x: x.clone(), raising=False)
        peer = torch.optim.Muon(
            peers.values(),
            momentum=momentum,
            nesterov=nesterov,
            ns_steps=steps,
            weight_decay=decay,
            adjust_lr_fn=rule[1],
        )
        ours = muon(momentum, nesterov, steps, decay, rule[0])
        follow(ours, peer, peers, params, seed)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 120), columns=st.integers(1, 120), steps=st.integers(1, 7), seed=st.integers(0, 999))
def test_newton_schulz_acts_on_the_singular_values_alone(rows: int, columns: int, steps: int, seed: int) -> None:
    x = torch.randn(2, rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    s = s / s.norm(dim=-1, keepdim=True)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    torch.testing.assert_close(orthogonalize(x, steps), u * s.unsqueeze(-2) @ vh, rtol=0, atol=1e-8)


@settings(max_examples=40, deadline=None)
@given(
    shapes=shapes_of_models(st.one_of(matrices, sizes.map(lambda n: (n,)))),
    name=st.sampled_from(["adamw", "muon"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    transposed=st.booleans(),
    seed=st.integers(0, 999),
)
def test_donation_changes_no_bit(shapes: dict, name: str, dtype: torch.dtype, transposed: bool, seed: int) -> None:
    """Whatever buffers the gradients come in: autograd hands out transposed ones as well."""
    params = tree.map(lambda p: p.to(dtype), draw(shapes, seed))
    donating = make_optimizer(OptimSpec(name=name), params)
    pair = {"donated": (donating, tree.clone(params)), "copied": (pure(donating), tree.clone(params))}
    results = []
    for optimizer, p in pair.values():
        state = optimizer.init(p)
        for step in range(3):
            grads = tree.map(lambda g: g.to(dtype), draw(shapes, seed + 1 + step))
            if transposed:
                grads = tree.map(lambda g: g.T.contiguous().T if g.ndim == 2 else g, grads)
            p, state = optimizer.update(grads, state, p, 0.01)
        results.append(tree.leaves(p) + tree.leaves(state))
    assert all(one.equal(two) for one, two in zip(*results, strict=True))


@settings(max_examples=40, deadline=None)
@given(shapes=shapes_of_models(st.one_of(matrices, any_shape)), name=st.sampled_from(["adamw", "muon"]))
def test_every_leaf_has_one_group_and_the_table_tells_its_bytes(shapes: dict, name: str) -> None:
    spec = OptimSpec(name=name)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        params = tree.map(lambda p, dtype=dtype: p.to(dtype), draw(shapes, 0))
        rows = groups_table(spec, shapes, dtype)
        assert sorted(path for row in rows for path in row.paths) == sorted(shapes)
        counts = sum(label.startswith("adamw") for label in set(labels_of(spec, shapes).values()))
        state = make_optimizer(spec, params).init(params)
        assert tree.nbytes(state) == sum(row.state_bytes for row in rows) + 8 * counts


@settings(max_examples=30, deadline=None)
@given(shapes=shapes_of_models(any_shape), seed=st.integers(0, 999), seen=st.integers(0, 6))
def test_masters_equal_float32_training(shapes: dict, seed: int, seen: int) -> None:
    """Any subset of the leaves in bfloat16: what the masters hold is what plain float32 training would."""
    halves = set(list(shapes)[:seen])
    exact = tree.map(lambda p: p.bfloat16().float(), draw(shapes, seed))
    mixed = tree.map_path(lambda path, p: p.bfloat16() if path in halves else p.clone(), exact)
    masters, plain = master_weights(adamw()), adamw()
    mixed_state, exact_state = masters.init(mixed), plain.init(exact)
    for step in range(3):
        grads = tree.map(lambda g: g.bfloat16().float(), draw(shapes, seed + 1 + step))
        half = tree.map_path(lambda path, g: g.bfloat16() if path in halves else g.clone(), grads)
        mixed, mixed_state = masters.update(half, mixed_state, mixed, 0.01)
        exact, exact_state = plain.update(grads, exact_state, exact, 0.01)
    kept = tree.flatten(mixed_state.get("master", {}))
    assert set(kept) == halves
    for path, p in tree.flatten(exact).items():
        assert (kept[path] if path in halves else tree.flatten(mixed)[path]).equal(p)
        assert tree.flatten(mixed)[path].equal(p.to(tree.flatten(mixed)[path].dtype))


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(["constant", "linear", "cosine", "polynomial", "wsd"]),
    steps=st.integers(1, 300),
    warmup=st.integers(0, 300),
    decay=st.integers(1, 300),
    final=st.floats(0.0, 1.0),
    lr=st.floats(0.0, 10.0),
)
def test_rates_rise_to_the_peak_and_fall_to_the_end(
    kind: str, steps: int, warmup: int, decay: int, final: float, lr: float
) -> None:
    """Or the lengths are refused. Every rate lies between 0 and the peak; the last one is the minimum of the fall."""
    spec = ScheduleSpec(kind=kind, warmup=warmup, final=final, decay_steps=decay, power=1.5)
    fits = warmup + decay <= steps if kind == "wsd" else warmup <= steps
    if not fits:
        with pytest.raises(ValueError, match="run of"):
            make_schedule(spec, lr, steps)
        return
    rates = [make_schedule(spec, lr, steps)(step) for step in range(steps)]
    assert all(0.0 <= rate <= lr for rate in rates)
    rise, fall = rates[: warmup + 1], rates[warmup:]
    if fall and not (kind == "wsd" and warmup + decay == steps):
        assert fall[0] == lr
        assert rise == sorted(rise)
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(fall))
    if len(fall) > 1 and kind != "constant":
        assert rates[-1] == pytest.approx(lr * final, abs=1e-15)
