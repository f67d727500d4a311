"""Several adapters on one base in one engine: each text is continued as its own model would, from no other's cache."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from ironfn import tree
from ironfn.generate import engine as engines
from ironfn.generate.engine import Generator, Request
from ironfn.mesh.axis import SINGLE
from ironfn.model.adapters import adapting, first_adapter, merge
from ironfn.model.forward import Forward
from ironfn.model.tables import table
from ironfn.model.transformer import logits
from ironfn.model.virtual import with_virtual
from ironfn.spec.adapter_records import AdapterSpec
from tests.test_engine import GREEDY, check, ids_of, llama, run

PROMPT = tuple(range(3, 24))
SPEC = AdapterSpec("lora", 4, 8.0, targets=["all-linear"])


def adapted(base: Generator, spec: AdapterSpec, seed: int) -> Generator:
    """Return a generator of the base's own tensors and an adapter beside them."""
    first = first_adapter(spec, base.arch, base.params, seed, table(False))
    torch.manual_seed(seed)
    adapter = tree.map(lambda x: x + torch.randn_like(x) * 0.2, first)
    both = tree.merge(base.params, adapter)
    return evolve(base, params=both, how=Forward(adapt=adapting(spec)), version=("adapter", seed))


def test_adapters_take_turns_in_one_engine_and_share_the_base() -> None:
    _, base = llama()
    generators = [base, adapted(base, SPEC, 1), adapted(base, SPEC, 2)]
    held = {leaf.data_ptr() for leaf in tree.leaves(base.params)}
    for generator in generators:
        assert held <= {leaf.data_ptr() for leaf in tree.leaves(generator.params)}
    engine, said = engines.start(base, 80, size=4), []
    for turn, generator in enumerate((*generators, *generators)):
        request = Request(key=turn, prompt=PROMPT, limit=6, sampling=GREEDY)
        engine, events = run(evolve(engine, generator=generator), [request])
        own = tree.select(generator.params, lambda path: "_lora/" in path)
        whole = merge(SPEC, base.arch, base.params, own)[0] if own else base.params
        check(evolve(generator, params=whole, how=Forward()), [request], events, within=1e-4)
        said.append(ids_of(events, turn))
    assert said[:3] == said[3:]
    assert len({tuple(ids) for ids in said}) == 3


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_vectors_before_the_texts_are_places_of_the_prompt(kind: str) -> None:
    _, base = llama()
    spec = AdapterSpec("prompt" if kind == "prompt" else "prefix", tokens=3)
    generator = adapted(base, spec, 1)
    request = Request(key=0, prompt=(0,) * spec.tokens + PROMPT, limit=5, sampling=GREEDY)
    _, events = run(engines.start(generator, 40, size=4), [request])
    said = ids_of(events)
    batch = with_virtual({"tokens": torch.tensor([[*PROMPT, *said]])}, spec.tokens)
    whole = logits(generator.params, batch, base.arch, SINGLE, generator.how)[0]
    assert whole[spec.tokens + len(PROMPT) - 1 : -1].argmax(-1).tolist() == said
