"""Change the mesh in the middle of a run: the state is bit-equal, and the run goes on as if it had never moved."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve, frozen

from drivers.places import Places, places
from ironfn import tree
from ironfn.algo.experts import router_bias, watch_experts
from ironfn.algo.step import State, make_step
from ironfn.checkpoint import as_tree, load_newest, read_manifest, save, verify
from ironfn.grad.value_and_grad import value_and_grad
from ironfn.layout.fsdp import fetch
from ironfn.layout.table import unshard_leaf
from ironfn.loss.lm import lm_loss
from ironfn.mesh import fake
from ironfn.mesh.axis import Mesh
from ironfn.model.forward import Forward
from ironfn.model.init import init
from ironfn.spec.records import AdamWSpec, MeshSpec, OptimSpec, PrecisionSpec, RunSpec, TrainSpec
from ironfn.types import Batch, Flat
from property_tests.strategies import batch_of
from tests.experts import arch_of, rows_of
from tests.gloo import world

BEFORE, AFTER = 3, 20
ARCH = arch_of(model={"layers": 1}, score="sigmoid", bias_rate=0.02, shared=1)

CHANGES: list[tuple[MeshSpec, MeshSpec]] = [
    (MeshSpec(), MeshSpec(dp=2)),
    (MeshSpec(dp=2), MeshSpec(dp=4, zero1=True)),
    (MeshSpec(dp=4, zero1=True), MeshSpec(dp=2, zero1=True)),
    (MeshSpec(dp=4), MeshSpec(tp=2)),
    (MeshSpec(tp=2), MeshSpec(tp=4, sequence_parallel=True)),
    (MeshSpec(tp=4, sequence_parallel=True), MeshSpec()),
    (MeshSpec(ep=2), MeshSpec(dp=2)),
    (MeshSpec(dp=2), MeshSpec(tp=2, ep=2)),
    (MeshSpec(dp=2, zero1=True), MeshSpec(dp=2, fsdp=True)),
    (MeshSpec(dp=2, fsdp=True), MeshSpec()),
    (MeshSpec(dp=2, fsdp=True, zero1=True), MeshSpec(dp=2, tp=2, zero1=True)),
    (MeshSpec(dp=2, tp=2, zero1=True), MeshSpec(dp=2, ep=2, fsdp=True)),
]
"""The twelve ordered changes: DP 1, 2, 4, TP 1, 2, 4, EP 1, 2, ZeRO-1 and FSDP on and off."""


def name(spec: MeshSpec) -> str:
    words = [f"{axis}{getattr(spec, axis)}" for axis in ("dp", "tp", "ep") if getattr(spec, axis) > 1]
    return " ".join(words + [word for word in ("zero1", "fsdp") if getattr(spec, word)]) or "single"


@frozen
class Seen:
    """Tell what a rank saw: the losses, and every leaf of the state, whole but for what others own."""

    losses: list[float]
    state: Flat
    final: Flat


def batch(step: int) -> Batch:
    return {p: x.float() if x.is_floating_point() else x for p, x in batch_of(ARCH, 4, 8, step, documents=True).items()}


def spec_of(mesh: MeshSpec, optimizer: str, dtype: str) -> RunSpec:
    # eps: gradients that are 0 but for rounding must not be divided by their own size
    optim = OptimSpec(optimizer, adamw=AdamWSpec(eps=1e-3))
    return RunSpec(mesh=mesh, optim=optim, train=TrainSpec(precision=PrecisionSpec(params=dtype)))  # type: ignore[arg-type]


def first_state(where: Places, mesh: Mesh, dtype: str, seed: int) -> State:
    params = init(ARCH, seed, where.params, mesh, getattr(torch, dtype))
    return State(0, params, where.optimizer.init(params), extra={"fixed": router_bias(ARCH)})


def go_on(state: State, where: Places, mesh: Mesh, steps: int) -> tuple[State, list[float]]:
    vg = value_and_grad(lm_loss(ARCH, Forward(fetch=fetch(where.params, mesh)), chunk=5))
    step = make_step(
        vg, where.optimizer, lambda s: 0.02 / (s + 1),
        table=where.params, mesh=mesh, updates=where.updates, carry=watch_experts(ARCH), clip=1.0,
    )  # fmt: skip
    losses = []
    for number in range(state.step, state.step + steps):
        state, metrics = step(state, rows_of(batch(number), mesh))
        losses.append(metrics["loss"])
    return state, losses


def gathered(state: State, where: Places, mesh: Mesh) -> Flat:
    flat = tree.flatten(as_tree(state))
    return {path: unshard_leaf(leaf, where.saved[path], mesh).clone() for path, leaf in flat.items()}


def leave(room: Path, spec: RunSpec, after: int = AFTER) -> Callable[[Mesh], Seen]:
    """Train, save, and go on without moving."""

    def run(mesh: Mesh) -> Seen:
        where = places(spec, ARCH, mesh)
        state, _ = go_on(first_state(where, mesh, spec.train.precision.params, 0), where, mesh, BEFORE)
        save(room, state.step, as_tree(state), {}, layout=where.saved, mesh=mesh)
        before = gathered(state, where, mesh)
        state, losses = go_on(state, where, mesh, after)
        return Seen(losses, before, gathered(state, where, mesh))

    return run


def arrive(room: Path, spec: RunSpec, after: int = AFTER) -> Callable[[Mesh], Seen]:
    """Load what was saved into a state of other values, and go on."""

    def run(mesh: Mesh) -> Seen:
        where = places(spec, ARCH, mesh)
        state = first_state(where, mesh, spec.train.precision.params, 1)
        found = load_newest(room, pytest.fail, into=as_tree(state), layout=where.saved, mesh=mesh)
        assert found is not None
        state = evolve(state, step=found.meta["step"])
        before = gathered(state, where, mesh)
        state, losses = go_on(state, where, mesh, after)
        return Seen(losses, before, gathered(state, where, mesh))

    return run


def on(spec: RunSpec, function: Callable[[Mesh], Seen]) -> Seen:
    m = spec.mesh
    ranks = fake.run(function, dp=m.dp, tp=m.tp, ep=m.ep, sequence_parallel=m.sequence_parallel, timeout=30)
    return joined(ranks)


def joined(ranks: list[Seen]) -> Seen:
    """Put together what the ranks saw: they agree on all that more than one of them has."""
    first = ranks[0]
    state, final = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for rank in ranks:
        assert rank.losses == first.losses
        for whole, part in ((state, rank.state), (final, rank.final)):
            assert all(torch.equal(whole.setdefault(p, x), x) for p, x in part.items())
    return Seen(first.losses, state, final)


Leaver = Callable[[MeshSpec, str, str, int], tuple[Path, Seen]]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Leaver:
    """Return the function that trains on a mesh, saves and stays there: each mesh once."""

    @functools.cache
    def stay(mesh: MeshSpec, optimizer: str, dtype: str, after: int) -> tuple[Path, Seen]:
        room, spec = tmp_path_factory.mktemp("room"), spec_of(mesh, optimizer, dtype)
        return room, on(spec, leave(room, spec, after))

    return stay


def bits(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.contiguous().view(-1).view(torch.uint8)


def same_bits(found: Flat, expected: Flat) -> None:
    assert found.keys() == expected.keys()
    for path, leaf in found.items():
        assert (leaf.dtype, leaf.shape) == (expected[path].dtype, expected[path].shape), path
        assert torch.equal(bits(leaf), bits(expected[path])), path


def close(found: Seen, expected: Seen) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.final.keys() == expected.final.keys()
    for path, leaf in found.final.items():
        right = expected.final[path].double()
        assert float((leaf.double() - right).norm()) <= 1e-5 * float(right.norm()), path


IDS = [f"{name(a)} to {name(b)}" for a, b in CHANGES]


@pytest.mark.parametrize(("before", "after"), CHANGES, ids=IDS)
def test_a_run_that_changes_its_mesh_is_the_run_that_never_moved(
    left: Leaver, before: MeshSpec, after: MeshSpec
) -> None:
    room, stayed = left(before, "adamw", "float32", AFTER)
    assert verify(room / f"step-{BEFORE:08d}") == []
    spec = spec_of(after, "adamw", "float32")
    moved = on(spec, arrive(room, spec))
    same_bits(moved.state, stayed.state)
    shapes = {path: leaf.shape for path, leaf in read_manifest(room / f"step-{BEFORE:08d}").leaves.items()}
    assert shapes == {path: tuple(leaf.shape) for path, leaf in stayed.state.items()}
    close(moved, stayed)


@pytest.mark.parametrize(("before", "after"), CHANGES, ids=IDS)
def test_master_weights_and_whole_matrices_move_to_the_bit(left: Leaver, before: MeshSpec, after: MeshSpec) -> None:
    """Muon's momenta are owned whole by single ranks; a bfloat16 parameter has a float32 copy in the state."""
    room, stayed = left(before, "muon", "bfloat16", 0)
    assert sum("/master/" in path for path in stayed.state) == sum(path.startswith("params/") for path in stayed.state)
    spec = spec_of(after, "muon", "bfloat16")
    same_bits(on(spec, arrive(room, spec, 0)).state, stayed.state)


def test_real_processes_change_their_mesh(tmp_path: Path) -> None:
    before, after = (spec_of(mesh, "adamw", "float32") for mesh in (MeshSpec(dp=2, zero1=True), MeshSpec(tp=2)))

    def plain(function: Callable[[Mesh], Seen]) -> Callable[[Mesh], Any]:
        def run(mesh: Mesh) -> Any:
            seen = function(mesh)
            return [seen.losses, seen.state, seen.final]

        return run

    stayed = joined([Seen(*each) for each in world(2, plain(leave(tmp_path, before)), dp=2, timeout=60)])
    moved = joined([Seen(*each) for each in world(2, plain(arrive(tmp_path, after)), tp=2, timeout=60)])
    same_bits(moved.state, stayed.state)
    close(moved, stayed)
