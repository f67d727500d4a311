"""Every mesh writes what one process writes, on every rank, whatever its share of the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ironfn import tree
from ironfn.generate import engine as engines
from ironfn.generate.engine import Event, Generator, Limits, Request, Token, complete
from ironfn.generate.sampling import Sampling
from ironfn.layout.fsdp import fetch, shard_table
from ironfn.layout.table import shard
from ironfn.mesh import fake
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.model.arch import Arch
from ironfn.model.forward import Forward
from ironfn.model.init import shapes
from ironfn.model.tables import table
from ironfn.model.transformer import logits
from ironfn.spec.records import MoeSpec
from ironfn.types import Params
from property_tests.strategies import params_of
from tests import peers

PROMPT = (5, 17, 3, 64)


def a_model(**fields: Any) -> tuple[Arch, Params]:
    """Return a Llama in float64, whose vocabulary is padded with rows that would win every choice."""
    arch = peers.make_arch("llama", 101, **({"kv_heads": 2, "tied": False, "pad_vocab_to": 16} | fields))
    params = tree.map(torch.Tensor.double, params_of(arch))
    table = params["embed"]["tokens"] if arch.tied else params["head"]["w"]  # pyright: ignore
    table[arch.vocab :] = 100.0  # pyright: ignore
    return arch, params


def requests() -> list[Request]:
    """Greedy and by chance, two continuations of one prompt, a prompt that begins like another, the likeliest told."""
    by_chance = Sampling(temperature=1.0, top_k=20, seed=4)
    return [
        Request(key="greedy", prompt=PROMPT, limit=12, sampling=Sampling(temperature=0), top=3),
        Request(key="drawn", prompt=tuple(range(9)), limit=10, sampling=by_chance, n=2),
        Request(key="alike", prompt=(*range(8), 50), limit=10, sampling=by_chance, stream=("another",)),
    ]


def written(events: list[Event]) -> list[Any]:
    """Return all that was told, log-probabilities apart."""
    return [(e.key, e.number, e.id, *(i for i, _ in e.top)) if isinstance(e, Token) else e for e in events]


def log_probs(events: list[Event]) -> list[float]:
    """Return every log-probability that was told: of what was chosen, and of the likeliest."""
    return [x for e in events if isinstance(e, Token) for x in (e.log_prob, *(value for _, value in e.top))]


def told(generator: Generator, **limits: int) -> list[Event]:
    return list(complete(generator, requests(), limits=Limits(**limits), size=4))


EXPERTS = MoeSpec(experts=4, capacity=1.0)
MESHES: dict[str, dict[str, Any]] = {
    **{mesh: {} for mesh in ("tp 2", "tp 2 sp", "dp 2", "dp 2 tp 2", "dp 2 fsdp", "dp 2 tp 2 fsdp")},
    **{mesh: {"moe": EXPERTS} for mesh in ("ep 2", "ep 2 tp 2 sp", "dp 2 ep 2 fsdp")},
    "dp 4 fsdp": {"tied": True},
    "dp 2 tp 2 sp fsdp": {"tied": True, "moe": EXPERTS},
}


@pytest.mark.parametrize("sizes", MESHES)
def test_every_mesh_writes_the_same_on_every_rank(sizes: str) -> None:
    """The weights are cut over tp, ep and, under FSDP, dp; sequence parallelism is left off: tokens come one by one."""
    words = [word for word in sizes.split() if word not in ("sp", "fsdp")]
    mesh: dict[str, Any] = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    arch, params = a_model(**MESHES[sizes])
    alone = told(Generator(params=params, arch=arch), tokens=7)

    def rank(mesh: Mesh) -> list[Event]:
        places = table(False)
        how = Forward()
        if "fsdp" in sizes:
            places = shard_table(places, shapes(arch), mesh)
            how = Forward(fetch=fetch(places, mesh))
        return told(Generator(params=shard(params, places, mesh), arch=arch, how=how, mesh=mesh), tokens=7)

    for events in fake.run(rank, **mesh, sequence_parallel="sp" in sizes.split()):
        assert written(events) == written(alone)
        assert log_probs(events) == pytest.approx(log_probs(alone), abs=1e-9)


def test_the_likeliest_are_those_of_the_whole_forward_pass() -> None:
    """Padding is none of them; the first is the greedy choice, and its log-probability the one that is told."""
    arch, params = a_model()
    ids = list(PROMPT)
    events = [e for e in told(Generator(params=params, arch=arch)) if isinstance(e, Token) and e.key == "greedy"]
    assert len(events) == 12
    for event in events:
        exact = logits(params, {"tokens": torch.tensor([ids])}, arch, SINGLE)[0, -1].log_softmax(-1).topk(3)
        assert [i for i, _ in event.top] == exact.indices.tolist()
        assert [value for _, value in event.top] == pytest.approx(exact.values.tolist(), abs=1e-9)
        assert (event.id, event.log_prob) == event.top[0]
        ids.append(event.id)


def test_ranks_that_compute_otherwise_follow_rank_0() -> None:
    """Each rank has weights of its own here, where in a run they differ by a rounding."""
    arch, _ = a_model()

    def rank(mesh: Mesh) -> list[Any]:
        events = told(Generator(params=params_of(arch, mesh.dp.index), arch=arch, mesh=mesh))
        return [(e.key, e.number, e.id, e.log_prob) if isinstance(e, Token) else e for e in events]

    ranks = fake.run(rank, dp=3)
    assert ranks == [rank(SINGLE)] * 3


def test_no_graph_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    arch, params = a_model()
    for leaf in tree.leaves(params):
        leaf.requires_grad_()
    seen: list[bool] = []
    whole = engines.draw

    def look(scores: torch.Tensor, asks: Any) -> Any:
        seen.append(scores.requires_grad)
        return whole(scores, asks)

    monkeypatch.setattr(engines, "draw", look)
    told(Generator(params=params, arch=arch))
    assert seen
    assert not any(seen)
