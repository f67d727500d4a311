"""Laws 1, 2, 10 and 11: the same step on every mesh, for every split, with or without donation."""

from __future__ import annotations

from random import Random

import pytest
import torch
from attrs import evolve
from hypothesis import assume, find, given, settings
from hypothesis import strategies as st

from ironfn import tree
from ironfn.layout import reduce as reduction
from ironfn.layout.table import unshard
from ironfn.mesh import fake
from ironfn.mesh.axis import SINGLE
from ironfn.model.arch import complete
from ironfn.model.init import init
from ironfn.model.tables import table
from property_tests.scenario import Scenario, compare, holds, outcome, scenarios
from tests.gloo import world


@settings(max_examples=100)
@given(scenario=scenarios())
def test_a_step_is_the_same_on_every_mesh(scenario: Scenario) -> None:
    """unshard(step(shard(state), shard(batch), mesh)) == step(state, batch, single), in float64, rel. 1e-9."""
    holds(scenario)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@settings(max_examples=6)
@given(data=st.data())
def test_a_step_is_the_same_on_real_processes(ranks: int, data: st.DataObject) -> None:
    scenario = data.draw(scenarios(ranks))
    alone = outcome(scenario, SINGLE)
    for found in world(ranks, lambda mesh: outcome(scenario, mesh), timeout=60, **scenario.sizes):
        compare(found, alone)


def test_a_broken_law_shrinks_to_a_counter_example_that_one_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget that dp splits the tokens: what is left is one line, the smallest mesh and the plainest model."""
    monkeypatch.setattr(reduction, "summed_axes", lambda place, mesh: [])

    def broken(scenario: Scenario) -> bool:
        try:
            holds(scenario)
        except AssertionError:
            return True
        return False

    found = repr(find(scenarios(), broken, settings=settings(max_examples=200, database=None), random=Random(0)))
    assert found.startswith("Scenario(dp=2, model=ModelSpec("), found
    assert not any(word in found for word in ("tp=", " ep=", "moe=", "zero1", "fsdp", "optimizer", "remat")), found
    assert len(found) < 250, found


@settings(max_examples=40)
@given(scenario=scenarios(ranks=1), micro=st.integers(1, 4), rows=st.integers(2, 5), idle=st.integers(0, 4))
def test_no_split_of_a_batch_changes_a_step(scenario: Scenario, micro: int, rows: int, idle: int) -> None:
    whole = evolve(scenario, rows=rows, micro=99, idle=idle)  # a micro-batch with nothing to learn
    assume(whole.model.moe.experts == 0 or whole.model.moe.balance != "batch")
    compare(outcome(evolve(whole, micro=micro), SINGLE), outcome(whole, SINGLE))


@settings(max_examples=20)
@given(scenario=scenarios(ranks=1))
def test_donation_changes_no_bit(scenario: Scenario) -> None:
    given_away, seen = outcome(scenario, SINGLE)
    kept, same = outcome(evolve(scenario, donate=False), SINGLE)
    assert seen == same
    for path, leaf in tree.flatten(kept).items():
        assert torch.equal(leaf, tree.flatten(given_away)[path]), path


@settings(max_examples=20)
@given(scenario=scenarios())
def test_first_weights_are_the_same_on_every_mesh(scenario: Scenario) -> None:
    arch, layout = complete(scenario.model, scenario.vocab), table(scenario.sequence_parallel)
    whole = tree.flatten(init(arch, 3, layout, SINGLE))
    for found in fake.run(lambda mesh: unshard(init(arch, 3, layout, mesh), layout, mesh), **scenario.sizes):
        for path, leaf in tree.flatten(found).items():
            assert torch.equal(leaf, whole[path]), path
