"""The experts that computed a token when it was written compute it when it is learned from, weighed as of now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from drivers import run as driver
from ironfn import tree
from ironfn.algo.advantage import advantages
from ironfn.data.groups import Completion, Group, lay_groups
from ironfn.generate.engine import Generator
from ironfn.generate.queue import Limits
from ironfn.generate.rollout import Written, roll_out
from ironfn.generate.sampling import Sampling
from ironfn.grad.value_and_grad import accumulate, value_and_grad
from ironfn.layout.reduce import reduce_grads
from ironfn.layout.table import shard, unshard
from ironfn.loss.log_probs import asked_places, place_log_probs
from ironfn.loss.policy import Objective, clipped, policy_loss
from ironfn.mesh import fake
from ironfn.mesh.axis import SINGLE, Mesh, sum_over_rows
from ironfn.model.arch import Arch, complete
from ironfn.model.forward import DEFAULT
from ironfn.model.init import init
from ironfn.model.routing import route
from ironfn.model.tables import table
from ironfn.model.transformer import hidden, logits
from ironfn.spec.records import ModelSpec, MoeSpec
from ironfn.types import Batch, Params
from tests.ranks import Ranks
from tests.test_grpo import final, load, prepared, rows, spec_file, texts
from tests.test_moe_peers import arch_of, peer
from tests.tuning import same

MOES = {
    "mixtral": MoeSpec(experts=6, top_k=2, score="softmax_chosen"),
    "deepseek": MoeSpec(experts=6, top_k=3, score="sigmoid", shared=1, dense_layers=1, scale=1.5),
    "olmoe": MoeSpec(experts=4, top_k=2, renormalize=False),
}
PROMPTS = [[5], [7, 8, 9, 4, 4, 6], [7, 8, 9, 4, 1], [3, 1, 4, 1, 5, 9, 2, 6]]
END, LIMIT = 0, 7
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def model(name: str, seed: int = 0) -> tuple[Params, Arch]:
    arch = complete(
        ModelSpec(
            vocab_size=24, width=32, layers=3, heads=4, kv_heads=2, ffn=48, context=64, init_std=0.3, moe=MOES[name]
        ),
        1,
    )
    return tree.map(lambda x: x.double(), init(arch, seed, table(False), SINGLE)), arch


def written(params: Params, arch: Arch, limits: Limits | None = None) -> list[list[Written]]:
    generator = Generator(params=params, arch=arch, routes=True)
    streams: list[tuple[int | str, ...]] = [("prompt", *prompt) for prompt in PROMPTS]
    return roll_out(generator, PROMPTS, 3, LIMIT, Sampling(seed=1), frozenset([END]), streams, limits=limits)


def experts_of(data: bytes, ids: int, arch: Arch) -> np.ndarray:
    assert arch.moe is not None
    return np.frombuffer(data, np.int16).reshape(ids, len(arch.expert_layers), arch.moe.top_k)


def groups_of(found: list[list[Written]], arch: Arch) -> list[Group]:
    told = advantages(torch.tensor([[float(sum(each.ids) % 7) for each in group] for group in found])).tolist()
    return [
        Group(prompt, [
            Completion(w.ids, a, {"drawn": w.log_probs}, experts_of(w.experts, len(w.ids), arch))
            for w, a in zip(group, values, strict=True)
        ], experts_of(group[0].trunk, len(prompt) - 1, arch))
        for prompt, group, values in zip(PROMPTS, found, told, strict=True)
    ]  # fmt: skip


def batch_of(groups: list[Group], length: int = 40, rows: int = 1) -> Batch:
    batch = {name: torch.from_numpy(x) for name, x in lay_groups(groups, length, END, rows=rows).items()}
    return batch | {"row": torch.arange(len(batch["tokens"]))}


def moved(params: Params) -> Params:
    """Return the parameters as after some updates: most tokens would still go to the same experts, and some not."""
    draw = torch.Generator().manual_seed(3)
    return tree.map(lambda x: x + 0.05 * torch.randn(x.shape, generator=draw, dtype=x.dtype), params)


@pytest.mark.parametrize("limits", [Limits(), Limits(rows=2, tokens=5)], ids=["at once", "by pieces"])
@pytest.mark.parametrize("name", MOES)
def test_what_is_recorded_is_what_the_whole_text_chooses(name: str, limits: Limits) -> None:
    """Prompts that share beginnings, chunks of prompts, and continuations that wait: each text alone says the same."""
    params, arch = model(name)
    for prompt, group in zip(PROMPTS, written(params, arch, limits), strict=True):
        for each in group:
            ids = torch.tensor([[*prompt, *each.ids[:-1]]])
            expected = hidden(params, {"tokens": ids}, arch, SINGLE)[1]["experts"][0].numpy()
            trunk = experts_of(group[0].trunk, len(prompt) - 1, arch)
            assert np.array_equal(trunk, expected[: len(prompt) - 1])
            assert np.array_equal(experts_of(each.experts, len(each.ids), arch), expected[len(prompt) - 1 :])
    silent = roll_out(
        Generator(params=params, arch=arch), PROMPTS[:1], 1, 2, Sampling(), frozenset(), [("s",)], limits=limits
    )
    assert silent[0][0].experts == silent[0][0].trunk == b""


@pytest.mark.parametrize("kind", ["mixtral", "olmoe"])
def test_what_is_recorded_is_what_transformers_routes_to(kind: str) -> None:
    arch = arch_of(**({"score": "softmax_chosen"} if kind == "mixtral" else {"renormalize": False}))
    theirs, params = peer(arch, kind)
    for prompt, group in zip(PROMPTS, written(params, arch, Limits(rows=2, tokens=5)), strict=True):
        for each in group:
            ids = torch.tensor([[*prompt, *each.ids[:-1]]])
            told = theirs(input_ids=ids, output_router_logits=True)
            expected = torch.stack([x.topk(2).indices for x in told.router_logits], 1).sort(-1).values
            start = len(prompt) - 1
            own = experts_of(each.experts, len(each.ids), arch)
            found = np.concatenate([experts_of(group[0].trunk, start, arch), own])
            assert np.array_equal(np.sort(found, -1), expected.numpy())


@pytest.mark.parametrize("name", MOES)
def test_other_parameters_learn_by_the_experts_of_the_rollout(name: str) -> None:
    params, arch = model(name)
    found = written(params, arch)
    batch, later = batch_of(groups_of(found, arch)), moved(params)
    real = batch["segment"] >= 0
    _, seen = hidden(later, batch, arch, SINGLE)
    assert torch.equal(seen["experts"][real], batch["experts"][real].long())
    _, own = hidden(later, {n: x for n, x in batch.items() if n != "experts"}, arch, SINGLE)
    other = (own["experts"].sort(-1).values != seen["experts"].sort(-1).values).any(-1)[real].double().mean()
    assert 0.02 < other < 0.9, "some tokens would have gone elsewhere"
    places = asked_places(batch)
    log_p, _ = place_log_probs(later, batch, arch, SINGLE, DEFAULT, places)
    sums = places.sums(log_p)
    expected: dict[tuple[int, ...], float] = {}
    for prompt, group in zip(PROMPTS, found, strict=True):
        for each in group:
            ids, start = torch.tensor([[*prompt, *each.ids[:-1]]]), len(prompt) - 1
            own = experts_of(each.experts, len(each.ids), arch)
            given = np.concatenate([experts_of(group[0].trunk, start, arch), own])
            alone = {"tokens": ids, "experts": torch.from_numpy(given)[None].long()}
            scores = logits(later, alone, arch, SINGLE)[0, start:].log_softmax(-1)
            expected[(*prompt, *each.ids)] = float(scores.gather(1, torch.tensor(each.ids)[:, None]).sum())
    assert sorted(sums.tolist()) == pytest.approx(
        sorted(expected[(*p, *w.ids)] for p, g in zip(PROMPTS, found, strict=True) for w in g), rel=1e-9
    )


@pytest.mark.parametrize("score", ["softmax", "softmax_chosen", "sigmoid"])
def test_weights_of_given_experts_are_the_routers_of_now(score: Any) -> None:
    """By the formulas of the papers, values and gradients by the router."""
    _, arch = model("mixtral")
    assert arch.moe is not None
    arch = evolve(arch, moe=evolve(arch.moe, score=score))
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, 32, generator=draw, dtype=torch.float64)
    w = torch.randn(32, 6, generator=draw, dtype=torch.float64, requires_grad=True)
    given = torch.rand(2, 4, 3, 6, generator=draw).argsort(-1)[..., :2]
    batch = {"tokens": torch.zeros(2, 4, dtype=torch.long), "experts": given}
    found = route(x, {"w": w}, 1, arch, SINGLE, DEFAULT, batch)
    scores = (x @ w).sigmoid() if score == "sigmoid" else (x @ w).softmax(-1)
    chosen = scores.gather(-1, given[:, :, 1])
    expected = chosen / chosen.sum(-1, keepdim=True)
    assert torch.equal(found.experts, given[:, :, 1])
    torch.testing.assert_close(found.weights, expected, **CLOSE)
    factors = torch.randn(found.weights.shape, generator=draw, dtype=torch.float64)
    mine, theirs = (torch.autograd.grad((each * factors).sum(), w)[0] for each in (found.weights, expected))
    torch.testing.assert_close(mine, theirs, **CLOSE)


@pytest.mark.parametrize("name", ["mixtral", "deepseek"])
def test_it_is_the_same_on_every_mesh(name: str) -> None:
    params, arch = model(name)
    batch, later = batch_of(groups_of(written(params, arch), arch), 24, rows=4), moved(params)
    loss = policy_loss(arch, Objective(clipped(), "token"), chunk=3)

    def outcome(mesh: Mesh, micro: int = 4) -> tuple[list[float], Params]:
        mine = {n: x.tensor_split(mesh.shares)[mesh.share] for n, x in batch.items()}
        layout = table(mesh.sequence_parallel)
        out, grads = accumulate(value_and_grad(loss), micro)(shard(later, layout, mesh), mine, mesh)
        grads = unshard(reduce_grads(grads, layout, mesh, None, 1 << 20), layout, mesh)
        sums = torch.stack([x.double() for x in (out.total, out.weight, *out.metrics.values())])
        return (sum_over_rows(sums, mesh) if mesh.shares > 1 else sums).tolist(), grads

    alone, expected = outcome(SINGLE)
    found = [outcome(SINGLE, 1)]
    for sizes in ({"dp": 2}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"ep": 2}):
        found += fake.run(lambda mesh: outcome(mesh), **sizes)  # type: ignore[arg-type]
    for values, grads in found:
        assert values == pytest.approx(alone, rel=1e-9)
        for path, leaf in tree.flatten(grads).items():
            torch.testing.assert_close(leaf, tree.flatten(expected)[path], **CLOSE, msg=lambda m, p=path: f"{p}: {m}")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=300, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=128,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    folder = prepared(tmp_path_factory.mktemp("routing"), config)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert driver.run(load("replayed", *SETS)) == 0
    return folder


SETS = ("grpo.replay_routing=true", "optim.lr=2e-2", "grpo.kl=k3", "report.eval_every=100", "grpo.tries=0")


def test_a_run_is_on_policy_and_goes_on_inside_of_a_replay(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    train = [row for row in rows("replayed") if row["kind"] == "train"]
    assert all(row["gap"] <= 1e-5 for row in train[::4])
    assert abs(train[0]["kl"]) <= 1e-5
    assert driver.run(load("cut", *SETS, "train.steps=6")) == 0
    assert driver.run(load("cut", *SETS)) == 0
    assert same(final("cut"), final("replayed"))
    assert texts("cut") == texts("replayed")
    assert driver.run(load("own", *SETS, "grpo.replay_routing=false")) == 0
    own = [row for row in rows("own") if row["kind"] == "train"]
    assert own[0]["grad_norm"] == pytest.approx(train[0]["grad_norm"], rel=1e-5), "the first update is the same"
    assert [row["loss"] for row in own[2:4]] != [row["loss"] for row in train[2:4]], "and later ones are not"


@pytest.mark.parametrize("mesh", ["mesh.dp=2", "mesh.tp=2", "mesh.ep=2"])
def test_two_ranks_replay_what_one_process_does(mesh: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    name = mesh.replace(".", "-").replace("=", "-")
    sets = [word for each in (*SETS, mesh) for word in ("-s", each)]
    with Ranks(2, ["grpo", spec_file(name), *sets], Path(f"ranks-{name}").absolute()) as ranks:
        assert ranks.wait(120) == [0, 0], [rank.errors for rank in ranks.all]
    mine, alone = ([row for row in rows(name) if row["kind"] == "train"] for name in (name, "replayed"))
    for found, expected in zip(mine[:4], alone[:4], strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=2e-3, abs=1e-5)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-3, abs=1e-6)
