"""What every optimizer keeps: donation, groups, decay, fp32 masters, state, clipping."""

from __future__ import annotations

import math

import pytest
import torch

from ironfn import tree
from ironfn.optim.adamw import adamw
from ironfn.optim.clip import clip_by_global_norm, scale_to_norm
from ironfn.optim.combine import master_weights, partition
from ironfn.optim.muon import jordan, muon
from ironfn.optim.optimizer import Optimizer, pure, scale_lr
from ironfn.optim.presets import LABELS, groups_table, labels_of, make_optimizer
from ironfn.spec.records import AdamWSpec, MuonSpec, OptimSpec
from ironfn.types import Params

MODEL = {
    "embed/tokens": (20, 8),
    "embed/positions": (6, 8),
    **{
        f"blocks/{layer}/{leaf}": shape
        for layer in range(2)
        for leaf, shape in {
            "norm1/scale": (8,),
            "norm1/bias": (8,),
            "attn/wq": (8, 8),
            "attn/wk": (8, 4),
            "attn/wv": (8, 4),
            "attn/wo": (8, 8),
            "attn/bq": (8,),
            "norm2/scale": (8,),
            "mlp/w_gate": (8, 12),
            "mlp/w_up": (8, 12),
            "mlp/w_down": (12, 8),
            "mlp/b_up": (12,),
        }.items()
    },
    "norm/scale": (8,),
    "head/w": (20, 8),
}
MUON_SPEC = OptimSpec(name="muon", lr=0.01)


def draw(shapes: dict[str, tuple[int, ...]], seed: int, dtype: torch.dtype = torch.float32) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return tree.unflatten({p: torch.randn(s, generator=generator).to(dtype) for p, s in shapes.items()})


def all_optimizers() -> dict[str, Optimizer]:
    labels = labels_of(MUON_SPEC, MODEL)
    by_label = {"muon": muon(), "adamw": adamw(), "adamw_no_decay": adamw(weight_decay=0.0)}
    return {
        "adamw": adamw(),
        "partition": partition(by_label, labels.__getitem__),
        "master_weights": master_weights(partition(by_label, labels.__getitem__)),
        "preset_adamw": make_optimizer(OptimSpec(), draw(MODEL, 0)),
        "preset_muon": make_optimizer(OptimSpec(name="muon", muon=MuonSpec(precision="bfloat16")), draw(MODEL, 0)),
        "scaled": scale_lr(adamw(), 0.5),
    }


def snapshot(*trees: Params) -> list[bytes]:
    return [leaf.reshape(-1).view(torch.uint8).numpy().tobytes() for t in trees for leaf in tree.leaves(t)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(all_optimizers()))
def test_donated_buffers_give_the_values_of_copies(name: str, dtype: torch.dtype) -> None:
    """Law 10, over several steps; and the pure form leaves its arguments as they were, byte for byte."""
    donating = all_optimizers()[name]
    copying = pure(donating)
    params_a, params_b = draw(MODEL, 0, dtype), draw(MODEL, 0, dtype)
    state_a, state_b = donating.init(params_a), copying.init(params_b)
    for step in range(4):
        grads = draw(MODEL, 1 + step, dtype)
        arguments = (grads, state_b, params_b)
        before = snapshot(*arguments)
        params_b, state_b = copying.update(*arguments, 0.01)
        assert snapshot(*arguments) == before
        params_a, state_a = donating.update(grads, state_a, params_a, 0.01)
        assert snapshot(params_a, state_a) == snapshot(params_b, state_b)
        assert list(tree.flatten(params_a)) == list(MODEL)
        assert list(tree.flatten(state_a)) == list(tree.flatten(state_b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(all_optimizers()))
def test_a_state_survives_being_written_by_path_and_read_back(name: str, dtype: torch.dtype) -> None:
    """What a checkpoint does: the tree becomes paths, tensors with their dtypes, and a tree again. Float32 throughout,
    whatever the parameters are."""
    optimizer = pure(all_optimizers()[name])
    params = draw(MODEL, 0, dtype)
    params, state = optimizer.update(draw(MODEL, 1, dtype), optimizer.init(params), params, 0.01)
    reread = tree.unflatten({path: leaf.clone() for path, leaf in tree.flatten(state).items()})
    one = optimizer.update(draw(MODEL, 2, dtype), state, params, 0.01)
    two = optimizer.update(draw(MODEL, 2, dtype), reread, params, 0.01)
    assert snapshot(*one) == snapshot(*two)
    assert all(leaf.dtype in (torch.float32, torch.int64) for leaf in tree.leaves(one[1]))


@pytest.mark.parametrize("name", ["adamw", "partition", "master_weights"])
def test_leaves_without_a_gradient_stay_as_they_are(name: str) -> None:
    optimizer = all_optimizers()[name]
    params, frozen = draw(MODEL, 0), ["blocks/0/attn/wq", "blocks/1/norm1/scale", "embed/tokens"]
    before = {path: leaf.clone() for path, leaf in tree.flatten(params).items()}
    grads = tree.select(draw(MODEL, 1), lambda path: path not in frozen)
    moved, _ = optimizer.update(grads, optimizer.init(params), params, 0.1)
    for path, leaf in tree.flatten(moved).items():
        assert leaf.equal(before[path]) == (path in frozen), path


@pytest.mark.parametrize("spec", [OptimSpec(lr=0.1), OptimSpec(name="muon", lr=0.1)])
def test_without_gradients_matrices_decay_and_norms_and_biases_do_not(spec: OptimSpec) -> None:
    params = draw(MODEL, 0)
    before = {path: leaf.clone() for path, leaf in tree.flatten(params).items()}
    optimizer = make_optimizer(spec, params)
    moved, _ = optimizer.update(tree.map(torch.zeros_like, params), optimizer.init(params), params, 0.1)
    for path, leaf in tree.flatten(moved).items():
        if leaf.ndim == 1:
            assert leaf.equal(before[path]), path
        else:
            torch.testing.assert_close(leaf, before[path] * (1 - 0.1 * 0.1), rtol=1e-6, atol=0)


def test_a_skipped_step_leaves_adamws_count() -> None:
    """Skipping is not calling update: the next update is the first one, bias correction and all."""
    params = {"w": torch.zeros(3)}
    optimizer = pure(adamw())
    state = optimizer.init(params)
    assert int(state["count"]) == 0
    assert state["count"].dtype == torch.int64
    _, state = optimizer.update({"w": torch.ones(3)}, state, params, 0.1)
    assert int(state["count"]) == 1


@pytest.mark.parametrize("spec", [OptimSpec(name="adamw"), OptimSpec(name="muon", muon=MuonSpec(scale="jordan"))])
def test_bfloat16_weights_move_through_float32_masters(spec: OptimSpec) -> None:
    """Weight 1.0, steps of 6e-4, 100 of them: about 0.06. Without masters each step rounds away and it stays at 1."""

    def moved_by(optimizer: Optimizer, params: Params) -> float:
        state, start = optimizer.init(params), params["norm"].clone()
        for _ in range(100):
            params, state = optimizer.update(tree.map(torch.ones_like, params), state, params, 6e-4)
        assert params["norm"].dtype == torch.bfloat16
        return float((start - params["norm"]).float().abs().max())

    def params() -> Params:
        return {"norm": torch.ones(4, dtype=torch.bfloat16), "w": torch.ones(4, 4, dtype=torch.bfloat16)}

    assert moved_by(make_optimizer(spec, params()), params()) == pytest.approx(0.06, abs=2**-8)
    assert moved_by(adamw(weight_decay=0.0), params()) == 0.0


@pytest.mark.parametrize("optimizer", [adamw(), muon()])
def test_half_precision_parameters_are_moved_in_float32_and_rounded_once(optimizer: Optimizer) -> None:
    half, grads = {"w": draw({"w": (6, 9)}, 0, torch.bfloat16)["w"]}, draw({"w": (6, 9)}, 1, torch.bfloat16)
    exact = {"w": half["w"].float()}
    expected, _ = optimizer.update({"w": grads["w"].float()}, optimizer.init(exact), exact, 0.1)
    moved, _ = optimizer.update(grads, optimizer.init(half), half, 0.1)
    assert moved["w"].equal(expected["w"].bfloat16())


def test_masters_train_exactly_as_float32_weights_that_see_the_same_gradients() -> None:
    rounded = draw(MODEL, 0, torch.bfloat16)
    exact = tree.map(lambda p: p.float(), rounded)
    with_masters, plain = make_optimizer(MUON_SPEC, rounded), make_optimizer(MUON_SPEC, exact)
    states = with_masters.init(rounded), plain.init(exact)
    for step in range(5):
        grads = draw(MODEL, 1 + step, torch.bfloat16)
        wide = tree.map(lambda g: g.float(), grads)
        rounded, state = with_masters.update(grads, states[0], rounded, 0.01)
        exact, other = plain.update(wide, states[1], exact, 0.01)
        states = state, other
    assert snapshot(states[0]["master"], states[0]["inner"]) == snapshot(exact, states[1])
    assert snapshot(rounded) == snapshot(tree.map(lambda p: p.bfloat16(), exact))


def test_a_float32_leaf_is_its_own_master() -> None:
    params = {"norm": torch.ones(4), "w": torch.ones(4, 4, dtype=torch.bfloat16)}
    state = master_weights(adamw()).init(params)
    assert list(tree.flatten(state["master"])) == ["w"]
    assert "master" not in master_weights(adamw()).init({"norm": torch.ones(4)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_holds_the_bytes_that_the_table_says(name: str, dtype: torch.dtype) -> None:
    """Per number 8 bytes for AdamW and 4 for Muon, 4 more for a master, and 8 for each AdamW group's count."""
    spec, params = OptimSpec(name=name), draw(MODEL, 0, dtype)
    state = make_optimizer(spec, params).init(params)
    rows = groups_table(spec, MODEL, dtype)
    assert tree.nbytes(state) == sum(row.state_bytes for row in rows) + 8 * 2
    muons = sum(math.prod(s) for p, s in MODEL.items() if "/w" in p and "head" not in p) if name == "muon" else 0
    total = sum(math.prod(s) for s in MODEL.values())
    assert tree.nbytes(state) == 8 * total - 4 * muons + (4 * total if dtype == torch.bfloat16 else 0) + 16


def test_the_default_groups() -> None:
    labels = labels_of(MUON_SPEC, MODEL)
    for path, label in labels.items():
        matrix = path.split("/")[-1] in {"wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down"}
        table = path in {"embed/tokens", "embed/positions", "head/w"}
        assert label == ("muon" if matrix else "adamw" if table else "adamw_no_decay"), path
    assert set(labels_of(OptimSpec(), MODEL).values()) == {"adamw", "adamw_no_decay"}


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("transformer.wte.weight", (50, 8)),
        ("transformer.wpe.weight", (50, 8)),
        ("lm_head.weight", (50, 8)),
        ("model.embed_tokens.weight", (50, 8)),
        ("blocks/0/attn/wq/lora_a", (8, 2)),
        ("blocks/0/mlp/w_up", (4, 8, 12)),
        ("conv.weight", (8, 1, 3)),
    ],
)
def test_muon_is_never_given_tables_heads_low_rank_factors_or_stacks(path: str, shape: tuple[int, ...]) -> None:
    assert labels_of(MUON_SPEC, {path: shape}) == {path: "adamw"}


def test_muon_takes_stacks_of_experts_and_no_other_leaf_of_three_dimensions() -> None:
    stack = {"blocks/0/mlp/experts/w_up": (4, 8, 12)}
    assert set(labels_of(MUON_SPEC, stack).values()) == {"muon"}
    (row,) = groups_table(MUON_SPEC, stack)
    assert (row.label, row.numbers, row.state_bytes) == ("muon", 384, 4 * 384)
    with pytest.raises(ValueError, match=r"gives 'conv' of shape \(4, 8, 12\) to muon"):
        labels_of(OptimSpec(groups={"conv": "muon"}), {"conv": (4, 8, 12)})


def test_a_stack_moves_as_its_matrices_do() -> None:
    stack, grads = (torch.randn(3, 6, 9, generator=torch.Generator().manual_seed(s)).double() for s in (0, 1))
    one, two = muon(), muon()
    moved, _ = one.update({"x": grads.clone()}, one.init({"x": stack}), {"x": stack.clone()}, 0.1)
    apart = {str(i): stack[i].clone() for i in range(3)}
    expected, _ = two.update({str(i): grads[i].clone() for i in range(3)}, two.init(apart), apart, 0.1)
    torch.testing.assert_close(moved["x"], torch.stack([expected[str(i)] for i in range(3)]), rtol=1e-12, atol=1e-12)


def test_muon_takes_the_hidden_matrices_of_a_foreign_model() -> None:
    shapes = {"model.layers.0.self_attn.q_proj.weight": (8, 8), "model.layers.0.mlp.headroom.weight": (8, 12)}
    assert set(labels_of(MUON_SPEC, shapes).values()) == {"muon"}


def test_the_first_matching_override_decides() -> None:
    groups = {r"blocks/1/.*/wq$": "adamw_no_decay", r"attn/w[qk]": "muon_no_decay", "^head": "muon"}
    labels = labels_of(OptimSpec(name="muon", groups=groups), MODEL)
    assert labels["blocks/1/attn/wq"] == "adamw_no_decay"
    assert labels["blocks/0/attn/wq"] == labels["blocks/1/attn/wk"] == "muon_no_decay"
    assert labels["blocks/0/attn/wv"] == labels["head/w"] == "muon"


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"norm1": "muon"}, r"'norm1' gives 'blocks/0/norm1/scale' of shape \(8,\) to muon"),
        ({"atn/wq": "muon"}, r"no parameter's path has \['atn/wq'\]"),
        ({"attn/w(": "muon"}, "not a regular expression"),
    ],
)
def test_overrides_that_cannot_be_meant_are_refused(groups: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        labels_of(OptimSpec(groups=groups), MODEL)


def test_every_leaf_is_in_exactly_one_row_of_the_table() -> None:
    rows = groups_table(MUON_SPEC, MODEL)
    assert sorted(path for row in rows for path in row.paths) == sorted(MODEL)
    assert [row.label for row in rows] == sorted((row.label for row in rows), key=LABELS.index)
    wq = next(row for row in rows if row.pattern == "blocks/*/attn/wq")
    assert (wq.label, wq.paths, wq.shape, wq.numbers, wq.state_bytes) == (
        "muon", ("blocks/0/attn/wq", "blocks/1/attn/wq"), (8, 8), 128, 512,
    )  # fmt: skip


def test_the_preset_gives_each_group_its_own_numbers() -> None:
    """One step from known states, each group alone, equals the whole."""
    spec = OptimSpec(
        name="muon",
        adamw=AdamWSpec(beta1=0.7, beta2=0.8, eps=1e-3, weight_decay=0.3),
        muon=MuonSpec(momentum=0.5, nesterov=False, steps=3, weight_decay=0.2, scale="jordan", lr_factor=4.0),
        groups={"wo": "muon_no_decay"},
    )
    alone = {
        "muon": scale_lr(muon(0.5, False, 3, 0.2, jordan), 4.0),
        "muon_no_decay": scale_lr(muon(0.5, False, 3, 0.0, jordan), 4.0),
        "adamw": adamw(0.7, 0.8, 1e-3, 0.3),
        "adamw_no_decay": adamw(0.7, 0.8, 1e-3, 0.0),
    }
    params, grads = draw(MODEL, 0), draw(MODEL, 1)
    labels = labels_of(spec, MODEL)
    whole = pure(make_optimizer(spec, params))
    moved, state = whole.update(grads, whole.init(params), params, 0.01)
    assert set(state) == set(alone)
    for label, optimizer in alone.items():
        p, g = (tree.select(t, lambda path, label=label: labels[path] == label) for t in (params, grads))
        expected = tree.flatten(pure(optimizer).update(g, optimizer.init(p), p, 0.01)[0])
        for path, leaf in expected.items():
            assert leaf.equal(tree.flatten(moved)[path]), path


def test_partition_names_the_leaves_whose_label_nobody_has() -> None:
    optimizer = partition({"a": adamw()}, lambda path: "b" if "norm" in path else "a")
    with pytest.raises(ValueError, match=r"'b': \['norm/scale'\].*\['a'\]"):
        optimizer.init({"norm": {"scale": torch.ones(2)}, "w": torch.ones(2)})


@pytest.mark.parametrize("shape", [(), (3,), (2, 2, 3, 3)])
def test_muon_refuses_what_is_no_matrix_and_names_it(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"'blocks/0/x'.*adamw"):
        muon().init({"blocks": {"0": {"x": torch.ones(shape)}}})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: adamw(beta1=1.0), "beta1 is 1.0"),
        (lambda: adamw(beta2=-0.1), "beta2 is -0.1"),
        (lambda: adamw(eps=-1e-8), "eps is -1e-08"),
        (lambda: adamw(weight_decay=math.nan), "weight_decay is nan"),
        (lambda: muon(momentum=1.0), "momentum is 1.0"),
        (lambda: muon(steps=0), "steps is 0"),
        (lambda: muon(weight_decay=-1.0), "weight_decay is -1.0"),
    ],
)
def test_numbers_out_of_range_are_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("max_norm", [0.5, 3.0, 1e6])
def test_clipping_is_torchs(max_norm: float) -> None:
    grads = draw(MODEL, 0)
    peers = [torch.nn.Parameter(torch.empty_like(g)) for g in tree.leaves(grads)]
    for peer, g in zip(peers, tree.leaves(grads), strict=True):
        peer.grad = g.clone()
    total = torch.nn.utils.clip_grad_norm_(peers, max_norm)
    clipped, norm = clip_by_global_norm(grads, max_norm)
    torch.testing.assert_close(norm, total)
    for peer, g in zip(peers, tree.leaves(clipped), strict=True):
        torch.testing.assert_close(g, peer.grad, rtol=3e-6, atol=0)  # torch divides by norm + 1e-6
    torch.testing.assert_close(tree.norm(clipped), total.clamp(max=max_norm))


def test_clipping_below_the_norm_changes_no_bit() -> None:
    grads = draw(MODEL, 0)
    before = snapshot(grads)
    clipped, _ = clip_by_global_norm(grads, float(tree.norm(grads)))
    assert snapshot(clipped) == before


def test_clipping_takes_the_norm_of_the_whole_mesh() -> None:
    """Two shards with norms 3 and 4 and a limit of 1: both are divided by 5, not by 3 or 4."""
    shard = {"w": torch.tensor([3.0, 0.0])}
    torch.testing.assert_close(scale_to_norm(shard, torch.tensor(5.0), 1.0)["w"], torch.tensor([0.6, 0.0]))


def test_clipping_to_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"norm to clip to is 0\.0"):
        clip_by_global_norm({"w": torch.ones(2)}, 0.0)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_one_bad_number_is_found(bad: float, dtype: torch.dtype) -> None:
    grads = draw(MODEL, 0, dtype)
    assert bool(clip_by_global_norm(grads, 1.0)[1].isfinite())
    grads["blocks"]["1"]["attn"]["wk"][3, 2] = bad
    assert not bool(clip_by_global_norm(grads, 1.0)[1].isfinite())
