"""Who moves what: owners, balance, state, buckets, norms; and the same on real processes."""

from __future__ import annotations

import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from attrs import evolve
from torch import Tensor

from ironfn import tree
from ironfn.layout.reduce import reduce_grads, squared_norm
from ironfn.layout.table import WHOLE_TABLE, Placement, by_path, cut, held, shard, unshard_leaf
from ironfn.layout.zero import balance, share_updates, state_layout
from ironfn.mesh import fake
from ironfn.mesh.axis import SINGLE, Axis, Mesh
from ironfn.model.arch import complete
from ironfn.model.init import shapes
from ironfn.model.tables import table
from ironfn.optim import muon as muon_module
from ironfn.optim.adamw import adamw
from ironfn.optim.muon import muon
from ironfn.optim.newton_schulz import operations
from ironfn.optim.presets import make_optimizer, whole_work
from ironfn.optim.zero1 import zero1
from ironfn.spec.records import ModelSpec, MuonSpec, OptimSpec
from ironfn.types import Params
from property_tests.test_zero_law import Case, train, train_on_sums
from tests.gloo import world

MODEL = shapes(complete(ModelSpec(width=384, layers=6, heads=6, ffn=1024), 4096))
MUON = OptimSpec(name="muon")


def meta(sizes: dict[str, tuple[int, ...]]) -> Params:
    return tree.unflatten({path: torch.empty(shape, device="meta") for path, shape in sizes.items()})


def ranks_of(dp: int) -> list[Mesh]:
    """Return the meshes of all ranks of dp, which cannot talk: to ask for layouts."""
    return [Mesh(dp=Axis("dp", dp, rank)) for rank in range(dp)]


@pytest.mark.parametrize(("matrices", "dp"), [(19, 8), (72, 7)])
def test_every_matrix_is_orthogonalised_once_whole_and_ends_equal_everywhere(
    matrices: int, dp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counts that padding to a multiple of the ranks got wrong: KellerJordan/Muon#30 and #29."""
    g = torch.Generator().manual_seed(0)
    draw = {f"w/{i}": torch.randn(2 + i % 3, 4, generator=g).double() for i in range(matrices)}
    work = {path: float(operations(*x.shape)) for path, x in draw.items()}
    expected, _ = muon().update(
        tree.unflatten({p: 0.5 * x for p, x in draw.items()}), muon().init(tree.unflatten(draw)),
        tree.clone(tree.unflatten(draw)), 0.1,
    )  # fmt: skip
    seen, lock, real = Counter[torch.Size](), threading.Lock(), muon_module.orthogonalize

    def counted(x: Tensor, steps: int) -> Tensor:
        with lock:
            seen[x.shape[-2:]] += len(x)
        return real(x, steps)

    monkeypatch.setattr(muon_module, "orthogonalize", counted)

    def move(mesh: Mesh) -> Params:
        updates = share_updates(WHOLE_TABLE, {p: tuple(x.shape) for p, x in draw.items()}, mesh, work)
        optimizer = zero1(muon(layout=updates, mesh=mesh), WHOLE_TABLE, updates, mesh)
        params = tree.clone(tree.unflatten(draw))
        grads = tree.unflatten({p: 0.5 * x for p, x in draw.items() if held(updates[p], mesh)})
        return optimizer.update(grads, optimizer.init(params), params, 0.1)[0]

    found = fake.run(move, dp=dp)
    assert seen == Counter(x.shape for x in draw.values())
    for params in found:
        for path, x in tree.flatten(expected).items():
            torch.testing.assert_close(tree.flatten(params)[path], x, rtol=1e-12, atol=1e-12)
            assert tree.flatten(params)[path].equal(tree.flatten(found[0])[path])


@pytest.mark.parametrize("dp", [2, 4, 8])
def test_work_and_bytes_are_balanced(dp: int) -> None:
    """Within a job's share of the mean, which dealing the leaves round is not."""
    work = whole_work(MUON, MODEL)
    places = share_updates(table(False), MODEL, ranks_of(dp)[0], work)
    loads, sizes = [0.0] * dp, [0] * dp
    for path, cost in work.items():
        assert places[path].owner is not None
        loads[places[path].owner] += cost
        sizes[places[path].owner] += math.prod(MODEL[path])
    assert max(loads) <= sum(loads) / dp + max(work.values())
    assert max(loads) <= (1.03, 1.03, 1.12)[(2, 4, 8).index(dp)] * sum(loads) / dp
    assert max(sizes) <= sum(sizes) / dp + max(math.prod(MODEL[path]) for path in work)


def test_balance_gives_every_job_away_and_never_more_than_one_job_too_much() -> None:
    """Graham's bound, for a single cost: the fullest has at most the mean and one job."""
    g = torch.Generator().manual_seed(3)
    for ranks in range(1, 9):
        jobs = {str(i): (float(c),) for i, c in enumerate(torch.rand(23, generator=g))}
        given = balance(jobs, ranks)
        assert set(given) == set(jobs)
        loads = [sum(jobs[job][0] for job, rank in given.items() if rank == r) for r in range(ranks)]
        assert max(loads) <= sum(loads) / ranks + max(cost for (cost,) in jobs.values())


def test_a_layout_is_the_same_on_every_rank_and_refines_the_parameters() -> None:
    for spec in (OptimSpec(), MUON):
        found = [share_updates(table(True), MODEL, mesh, whole_work(spec, MODEL)) for mesh in ranks_of(4)]
        assert all(layout == found[0] for layout in found)
        assert list(found[0]) == list(MODEL)
        for path, place in found[0].items():
            before = by_path(table(True), [path])[path]
            assert place.cuts[: len(before.cuts)] == before.cuts
            assert (place.owner is None) != (place.dim("dp") is None), path


@pytest.mark.parametrize("dp", [2, 4, 8])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_rank_keeps_the_bytes_of_the_zero_formula(name: str, dp: int) -> None:
    """K bytes a parameter over dp ranks (arXiv 1910.02054, section 5.1), within 1 % and one leaf."""
    spec = OptimSpec(name=name)
    one = tree.nbytes(make_optimizer(spec, meta(MODEL)).init(meta(MODEL)))
    largest = max(math.prod(MODEL[path]) * 4 for path in whole_work(spec, MODEL)) if name == "muon" else 0
    for mesh in ranks_of(dp):
        updates = share_updates(table(False), MODEL, mesh, whole_work(spec, MODEL))
        optimizer = make_optimizer(spec, meta(MODEL), table=table(False), mesh=mesh, updates=updates)
        assert tree.nbytes(optimizer.init(meta(MODEL))) <= 1.01 * one / dp + largest


@pytest.mark.parametrize("half", [False, True])
def test_a_state_joined_by_its_layout_is_the_state_of_one_process(half: bool) -> None:
    """What a checkpoint writes: every leaf of every rank lies where `state_layout` says, counts on all ranks."""
    sizes = {"embed/t": (6, 4), "blocks/0/wq": (4, 4), "blocks/0/wo": (3, 5), "blocks/1/b": (4,), "blocks/1/s": (8,)}
    g = torch.Generator().manual_seed(1)
    dtype = torch.bfloat16 if half else torch.float64
    draw = tree.unflatten({p: torch.randn(s, generator=g).to(dtype) for p, s in sizes.items()})
    alone = make_optimizer(MUON, draw)
    _, expected = alone.update(tree.clone(draw), alone.init(draw), tree.clone(draw), 0.1)

    def state_of(mesh: Mesh) -> tuple[Params, dict[str, Placement]]:
        updates = share_updates(WHOLE_TABLE, sizes, mesh, whole_work(MUON, sizes))
        optimizer = make_optimizer(MUON, draw, table=WHOLE_TABLE, mesh=mesh, updates=updates)
        grads = shard(draw, updates, mesh)
        _, state = optimizer.update(grads, optimizer.init(draw), tree.clone(draw), 0.1)
        places = state_layout(state, updates)
        return tree.map_path(lambda p, x: unshard_leaf(x, places[p], mesh), state), places

    joined: dict[str, Tensor] = {}
    holders = Counter[str]()
    for state, _ in fake.run(state_of, dp=3):
        joined |= tree.flatten(state)
        # A rank that moved neither vector has counted their group's step all the same.
        assert int(state["inner"]["adamw_no_decay"]["count"] if half else state["adamw_no_decay"]["count"]) == 1
        holders.update(list(tree.flatten(state)))
    assert set(joined) == set(tree.flatten(expected))
    for path, x in tree.flatten(expected).items():
        torch.testing.assert_close(joined[path], x, rtol=1e-12, atol=0)
        assert holders[path] == 3 or not path.endswith("count"), path
    with pytest.raises(ValueError, match=r"adamw/m/embed/t' ends in no parameter's path"):
        state_layout(expected, {path: Placement() for path in sizes if path != "embed/t"})


def test_shard_norms_of_3_and_4_are_5_on_all_ranks() -> None:
    """karpathy/llm.c#524 took one shard's; others the largest, or twice the whole. What both have counts once."""
    places = {"cut": cut("dp", 0), "mine": Placement(owner=0), "yours": Placement(owner=1), "both": Placement()}

    def norms(mesh: Mesh) -> list[float]:
        part, own = ([3.0], [2.0]) if mesh.dp.index == 0 else ([4.0], [6.0])
        by_kind = {"cut": torch.tensor(part).double(), ("mine", "yours")[mesh.dp.index]: torch.tensor(own).double()}
        trees: list[Params] = [
            {"cut": by_kind["cut"]},
            {k: x for k, x in by_kind.items() if k != "cut"},
            {**by_kind, "both": torch.ones(1).double()},
            {"mine": torch.tensor([5.0])} if mesh.dp.index == 0 else {},
        ]
        return [math.sqrt(float(squared_norm(each, places, mesh))) for each in trees]

    for found in fake.run(norms, dp=2):
        assert found == pytest.approx([5.0, math.sqrt(40.0), math.sqrt(66.0), 5.0], rel=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_number_in_one_ranks_share_is_seen_by_all(bad: float) -> None:
    places = {"mine": Placement((("tp", 0),), owner=1), "w": cut("tp", 0)}

    def finite(mesh: Mesh) -> bool:
        grads: Params = {"w": torch.ones(2)}
        if mesh.dp.index == 1:
            grads["mine"] = torch.tensor([bad if mesh.tp.index == 0 else 1.0])
        return math.isfinite(float(squared_norm(grads, places, mesh)))

    assert fake.run(finite, dp=2, tp=2) == [False] * 4


def grads_on(mesh: Mesh) -> Params:
    g = torch.Generator().manual_seed(mesh.dp.index)
    sizes = {"a": (5, 3), "b": (7,), "c/d": (4, 4), "e": (1,), "f": (6, 2)}
    return tree.unflatten({path: torch.randn(shape, generator=g) for path, shape in sizes.items()})


@pytest.mark.parametrize("where", ["same", "shared"])
def test_the_size_of_a_bucket_changes_no_bit(where: str) -> None:
    """The fake group adds up in rank order, so that only a number in the wrong place could differ."""

    def reduced(mesh: Mesh, size: int) -> Params:
        grads = grads_on(mesh)
        sizes = {path: tuple(x.shape) for path, x in tree.flatten(grads).items()}
        to = share_updates(WHOLE_TABLE, sizes, mesh, {"a": 1.0, "f": 2.0}) if where == "shared" else None
        out = reduce_grads(grads, WHOLE_TABLE, mesh, to, size)
        assert grads == {}
        return out

    everything = fake.run(lambda mesh: reduced(mesh, 1 << 30), dp=3)
    for size in (1, 12, 13, 50, 100):
        for found, expected in zip(fake.run(lambda mesh, n=size: reduced(mesh, n), dp=3), everything, strict=True):
            assert list(tree.flatten(found)) == list(tree.flatten(expected))
            assert all(x.equal(tree.flatten(expected)[path]) for path, x in tree.flatten(found).items())
    total = {path: sum(tree.flatten(grads_on(m))[path] for m in ranks_of(3)) for path in ("a", "b", "c/d", "e", "f")}
    joined: dict[str, list[Tensor]] = {}
    for found in everything:
        for path, x in tree.flatten(found).items():
            joined.setdefault(path, []).append(x)
    for path, x in total.items():
        assert joined[path][0].equal(x) or torch.cat(joined[path]).equal(x), path


def test_gradients_die_as_their_buckets_leave() -> None:
    """Beside the gradients that are left, one bucket and its result are alive, and not a second copy of all."""
    count, numbers = 16, 1000

    def peak(mesh: Mesh) -> int:
        grads: Params = {str(i): torch.ones(numbers) for i in range(count)}
        alive = [weakref.ref(x) for x in tree.leaves(grads)]
        left: list[int] = []
        real: Callable[..., Tensor] = mesh.dp.backend.reduce_scatter

        class Watched:
            def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
                left.append(sum(ref() is not None for ref in alive))
                return real(x, dim)

        watched = evolve(mesh, dp=Axis("dp", 2, mesh.dp.index, Watched()))  # type: ignore[arg-type]
        to = share_updates(WHOLE_TABLE, {str(i): (numbers,) for i in range(count)}, mesh)
        reduce_grads(grads, WHOLE_TABLE, watched, to, 4 * numbers)
        return left == list(range(count - 1, -1, -1))

    assert all(fake.run(peak, dp=2))


def test_a_rank_without_any_share_takes_part() -> None:
    """One matrix of odd sides on 3 ranks: two of them hold nothing, and all end with the same parameters."""
    case = Case(3, 1, 1, {"matrix/0": (5, 7)}, {"matrix/0": Placement()}, "muon", False, True, False, 64)
    params: Params = {"matrix": {"0": torch.ones(5, 7).double()}}
    expected, norms, _ = train_on_sums(case, evolve(case, dp=1, zero=False), params)
    found = fake.run(lambda mesh: train(case, params, mesh), dp=3)
    assert sorted(len(tree.leaves(state)) for _, _, state in found) == [0, 0, 1]
    for moved, seen, _ in found:
        assert seen == pytest.approx(norms, rel=1e-9)
        torch.testing.assert_close(moved["matrix"]["0"], expected["matrix"]["0"], rtol=1e-9, atol=1e-11)


SIZES = {"columns/0": (3, 4), "rows/1": (8, 5), "stack/2": (4, 3, 4), "vector/3": (7,), "matrix/4": (8, 4)}
PLACES = {
    "columns/0": cut("tp", 1),
    "rows/1": cut("tp", 0),
    "stack/2": Placement((("ep", 0), ("tp", 2))),
    "vector/3": Placement(partial=("tp",)),
    "matrix/4": Placement(),
}


@pytest.mark.parametrize(
    ("n", "axes", "fsdp", "zero"),
    [
        (2, {"dp": 2}, False, True),
        (4, {"dp": 2, "tp": 2}, True, True),
        (4, {"dp": 2, "ep": 2}, False, True),
        (4, {"dp": 4}, True, False),
    ],
    ids=["dp2-zero", "dp2tp2-fsdp-zero", "dp2ep2-zero", "dp4-fsdp"],
)
def test_processes_move_what_one_process_does(n: int, axes: dict[str, int], fsdp: bool, zero: bool) -> None:
    sizes = {"dp": 1, "tp": 1, "ep": 1, **axes}
    case = Case(*sizes.values(), SIZES, PLACES, "both", fsdp, zero, False, 100)
    g = torch.Generator().manual_seed(7)
    params = tree.unflatten({p: torch.randn(s, generator=g, dtype=torch.float64) for p, s in SIZES.items()})
    expected, norms, _ = train_on_sums(case, evolve(case, dp=1, tp=1, ep=1, fsdp=False, zero=False), params)
    for moved, seen, _ in world(n, lambda mesh: train(case, params, mesh), **sizes):
        assert seen == pytest.approx(norms, rel=1e-9)
        for path, x in tree.flatten(expected).items():
            torch.testing.assert_close(tree.flatten(moved)[path], x, rtol=1e-9, atol=1e-11, msg=path)


def test_adamw_without_a_mesh_is_not_wrapped() -> None:
    """zero1 over one rank changes no bit."""
    params: Params = {"w": torch.randn(3, 4), "b": torch.randn(3)}
    updates = share_updates(WHOLE_TABLE, {"w": (3, 4), "b": (3,)}, SINGLE)
    plain, wrapped = adamw(), zero1(adamw(), WHOLE_TABLE, updates, SINGLE)
    one = plain.update(tree.clone(params), plain.init(params), tree.clone(params), 0.1)
    two = wrapped.update(tree.clone(params), wrapped.init(params), tree.clone(params), 0.1)
    for a, b in zip(one, two, strict=True):
        assert all(x.equal(y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


def test_moonshots_scale_is_that_of_the_whole_matrix() -> None:
    """[4, 36] cut over tp into [4, 18]: 0.2 sqrt(36) = 1.2. The shape of the share would give 0.85."""
    spec = OptimSpec(name="muon", muon=MuonSpec(weight_decay=0.0))
    x = torch.randn(4, 36, generator=torch.Generator().manual_seed(0)).double()

    def moved(mesh: Mesh) -> Tensor:
        params = shard({"w": x}, {"w": cut("tp", 1)}, mesh)
        optimizer = make_optimizer(spec, {"w": x}, table={"w": cut("tp", 1)}, mesh=mesh)
        after, _ = optimizer.update(tree.clone(params), optimizer.init(params), tree.clone(params), 1.0)
        return unshard_leaf(params["w"] - after["w"], cut("tp", 1), mesh)

    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    for found in fake.run(moved, tp=2):
        torch.testing.assert_close(found, 1.2 * (u * s) @ vh, rtol=1e-8, atol=1e-8)


def test_master_copies_are_shares_too() -> None:
    """bfloat16 leaves and whole numbers as gradients, whose sums are exact: every bit is that of one process."""
    sizes = {"a": (6, 4), "b": (5,), "c": (3, 2)}
    g = torch.Generator().manual_seed(2)
    params = tree.unflatten({p: torch.randn(s, generator=g).bfloat16() for p, s in sizes.items()})
    grads = [tree.map(lambda p: torch.randint(-4, 5, p.shape, generator=g).bfloat16(), params) for _ in range(3)]

    def train_in_half(mesh: Mesh) -> tuple[Params, int]:
        updates = share_updates(WHOLE_TABLE, sizes, mesh)
        optimizer = make_optimizer(OptimSpec(), params, mesh=mesh, updates=updates)
        moved, state = tree.clone(params), optimizer.init(params)
        for _ in range(3):
            mine = tree.clone(grads[mesh.dp.index]) if mesh.dp.size > 1 else tree.map(lambda *g: sum(g), *grads)
            moved, state = optimizer.update(reduce_grads(mine, WHOLE_TABLE, mesh, updates), state, moved, 0.01)
        return moved, tree.count(state["inner"]) + tree.count(state["master"])

    (expected, numbers), ranks = train_in_half(SINGLE), fake.run(train_in_half, dp=3)
    for moved, _ in ranks:
        assert all(x.equal(tree.flatten(expected)[path]) for path, x in tree.flatten(moved).items())
    counts = 2  # of the two groups, on every rank
    assert sum(each - counts for _, each in ranks) == numbers - counts
