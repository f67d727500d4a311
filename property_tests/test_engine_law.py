"""Law 7, on the whole: what an engine tells of a text is what one forward pass over that text gives.

Whatever its neighbours, what they begin with alike, how many tokens a pass takes, how large a block is, and however
often a text has to give way for want of memory; and all blocks come back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from ironfn.generate import engine as engines
from ironfn.generate.engine import End, Engine, Event, Generator, Limits, Request, Token, advance
from ironfn.generate.sampling import Sampling
from ironfn.layout.table import shard
from ironfn.mesh import fake
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.model.arch import Arch
from ironfn.model.tables import table
from ironfn.model.transformer import logits
from ironfn.spec.records import MoeSpec, RopeSpec
from ironfn.types import Params
from property_tests.strategies import archs, params_of

FORMS = (MoeSpec(), MoeSpec(experts=4, top_k=2, capacity=1.0))


@frozen
class Course:
    """Say which requests come, before which pass each; which are cancelled, before which; and how large all is."""

    requests: tuple[tuple[int, Request], ...]
    cancels: tuple[tuple[int, Hashable, int | None], ...]
    blocks: int
    size: int
    limits: Limits


@st.composite
def models(draw: st.DrawFn, tp: int = 1) -> Arch:
    """Draw a decoder; of those that turn their keys, many by angles that depend on the text's length."""
    arch = draw(archs(tp, draw(st.sampled_from(FORMS)) if tp == 1 else FORMS[0]))
    if arch.positions != "rotary" or arch.rotary_dim < 4 or draw(st.booleans()):
        return arch
    factors = [1.0, 3.0, 9.0, 27.0][: arch.rotary_dim // 2]
    kind = draw(st.sampled_from(["dynamic", "longrope"]))
    rope = RopeSpec(kind=kind, factor=4.0, original_context=6, short_factor=factors[::-1], long_factor=factors)
    return evolve(arch, rope=rope)


@st.composite
def courses(draw: st.DrawFn, arch: Arch) -> Course:
    """Draw requests of which many begin alike, and an engine that is often too small for all of them."""
    ids = st.lists(st.integers(0, arch.vocab - 1), min_size=1, max_size=8)
    prompts: list[list[int]] = []
    requests: list[tuple[int, Request]] = []
    for key in range(draw(st.integers(1, 5))):
        before = draw(st.sampled_from([[], *prompts]))
        shared = before[: max(0, len(before) - draw(st.integers(0, 3)))]
        prompts.append((shared + draw(ids))[: arch.context - 2])
        chance = draw(st.booleans())
        request = Request(
            key=key,
            prompt=tuple(prompts[-1]),
            limit=draw(st.integers(1, 7)),
            sampling=Sampling(temperature=draw(st.sampled_from([0.7, 1.0])) if chance else 0.0, seed=key),
            stop=frozenset(draw(st.lists(st.integers(0, arch.vocab - 1), max_size=1))),
            n=draw(st.sampled_from([1, 1, 2, 3])),
        )
        requests.append((draw(st.sampled_from([0, 0, 0, 1, 3])), request))
    size = draw(st.integers(1, 5))
    least = max(-(-len(prompt) // size) for prompt in prompts)
    keys = st.integers(0, len(requests) - 1)
    cancels = draw(st.lists(st.tuples(st.integers(1, 9), keys, st.sampled_from([None, 0, 1])), max_size=2))
    return Course(
        tuple(requests), tuple(cancels), least + draw(st.integers(0, 12)), size,
        Limits(draw(st.integers(1, 6)), draw(st.sampled_from([1, 3, 8, 99]))),
    )  # fmt: skip


def follow(engine: Engine, course: Course) -> tuple[Engine, list[Event]]:
    """Let a course take its way, and return what was told."""
    events: list[Event] = []
    for passed in range(200):
        for when, request in course.requests:
            engine = engines.submit(engine, request) if when == passed else engine
        for when, key, number in course.cancels:
            engine = engines.cancel(engine, key, number) if when == passed else engine
        if passed > 9 and not engine.busy:
            return engine, events
        engine, more = advance(engine)
        events += more
    raise AssertionError("it goes on for ever")


def told(events: list[Event]) -> dict[tuple[Hashable, int], list[Token]]:
    found: dict[tuple[Hashable, int], list[Token]] = defaultdict(list)
    for event in events:
        if isinstance(event, Token):
            found[event.key, event.number].append(event)
    return found


def hold(params: Params, arch: Arch, course: Course, engine: Engine, events: list[Event]) -> None:
    """Hold every token to the whole forward pass, and the blocks to their number."""
    asked = {request.key: request for _, request in course.requests}
    texts = told(events)
    for (key, number), tokens in texts.items():
        request = asked[key]
        ids = [*request.prompt, *(token.id for token in tokens)]
        for n, token in enumerate(tokens):  # each by the text up to it: angles may depend on the length
            seen = torch.tensor([ids[: len(request.prompt) + n]])
            scores = logits(params, {"tokens": seen}, arch.without_capacity(), SINGLE)[0, -1]
            likely = (scores / (request.sampling.temperature or 1.0)).log_softmax(-1)
            assert token.log_prob == pytest.approx(float(likely[token.id]), abs=1e-9)
            if request.sampling.temperature == 0:
                assert float(likely.max()) == pytest.approx(token.log_prob, abs=1e-9)
        ends = [
            event.reason for event in events if isinstance(event, End) and (event.key, event.number) == (key, number)
        ]
        gone = any(cancelled == key and which in (None, number) for _, cancelled, which in course.cancels)
        assert len(ends) == 1 or (gone and not ends)
        stops = [n for n, token in enumerate(tokens, 1) if token.id in request.stop]
        assert stops == ([len(tokens)] if ends == ["stop"] else [])
        if ends == ["length"]:
            assert len(tokens) == request.limit
        if ends == ["memory"]:
            assert len(ids) > course.blocks * course.size - 1
    cancelled = {key for _, key, _ in course.cancels}
    assert {(k, n) for k, r in asked.items() if k not in cancelled for n in range(r.n)} <= texts.keys()
    assert not engine.queue.blocks.references


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_an_engine_tells_what_the_whole_forward_gives(data: st.DataObject) -> None:
    arch = data.draw(models())
    params, course = params_of(arch), data.draw(courses(arch))
    start = engines.start(Generator(params=params, arch=arch), course.blocks, size=course.size, limits=course.limits)
    engine, events = follow(start, course)
    hold(params, arch, course, engine, events)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_text_is_the_same_in_any_company(data: st.DataObject) -> None:
    arch = data.draw(models())
    params, course = params_of(arch), data.draw(courses(arch))
    generator = Generator(params=params, arch=arch)
    start = engines.start(generator, course.blocks, size=course.size, limits=course.limits)
    texts = told(follow(start, course)[1])
    for _, request in course.requests:
        alone = told(list(engines.complete(generator, [request])))
        for number in range(request.n):
            mine = [token.id for token in texts[request.key, number]]
            assert mine == [token.id for token in alone[request.key, number]][: len(mine)]


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_two_ranks_tell_what_one_tells(data: st.DataObject) -> None:
    arch = data.draw(models(tp=2))
    params, course = params_of(arch), data.draw(courses(arch))

    def on(mesh: Mesh) -> tuple[Engine, list[Event]]:
        mine = Generator(params=shard(params, table(False), mesh), arch=arch, mesh=mesh)
        return follow(engines.start(mine, course.blocks, size=course.size, limits=course.limits), course)

    for engine, events in fake.run(on, tp=2):
        hold(params, arch, course, engine, events)
