"""Law 7, on the whole: what an engine tells of a text is what one forward pass over that text gives.

Whatever its neighbours, what they begin with alike, how many tokens a pass takes, how large a block is, and however
often a text has to give way for want of memory; and all blocks come back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import cache

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from ironfn import tree
from ironfn.generate import engine as engines
from ironfn.generate.blocks import free_count, idle_count
from ironfn.generate.engine import End, Event, Generator, Limits, Request, Token, advance
from ironfn.generate.sampling import Ask, Sampling, draw
from ironfn.layout.table import shard
from ironfn.mesh import fake
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.model.arch import Arch
from ironfn.model.tables import table
from ironfn.model.transformer import logits
from ironfn.spec.records import MoeSpec, RopeSpec
from ironfn.types import Params
from property_tests.strategies import archs, params_of

NEVER = 999
Continuation = tuple[Hashable, int]
FORMS = (MoeSpec(), MoeSpec(experts=4, top_k=2, capacity=1.0))


@frozen
class Course:
    """Say which requests come, before which pass each; which are cancelled, before which; and how large all is.

    change: the pass from which on the parameters are others.
    """

    requests: tuple[tuple[int, Request], ...]
    cancels: tuple[tuple[int, Hashable, int | None], ...]
    blocks: int
    size: int
    limits: Limits
    change: int = NEVER


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
        sampling = Sampling(
            temperature=draw(st.sampled_from([0.0, 0.7, 1.0])),
            top_k=draw(st.sampled_from([None, 4])),
            top_p=draw(st.sampled_from([1.0, 0.8])),
            repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
            seed=draw(st.integers(0, 1)),
        )
        request = Request(
            key=key,
            prompt=tuple(prompts[-1]),
            limit=draw(st.integers(1, 7)),
            sampling=sampling,
            stop=frozenset(draw(st.lists(st.integers(0, arch.vocab - 1), max_size=1))),
            n=draw(st.sampled_from([1, 1, 2, 3])),
            stream=("text", key),
        )
        requests.append((draw(st.sampled_from([0, 0, 0, 1, 3])), request))
    size = draw(st.integers(1, 5))
    least = max(-(-len(prompt) // size) for prompt in prompts)
    keys = st.integers(0, len(requests) - 1)
    cancels = draw(st.lists(st.tuples(st.integers(1, 9), keys, st.sampled_from([None, 0, 1])), max_size=2))
    return Course(
        tuple(requests), tuple(cancels), least + draw(st.integers(0, 12)), size,
        Limits(draw(st.integers(1, 6)), draw(st.sampled_from([1, 3, 8, 99]))),
        draw(st.sampled_from([NEVER, 1, 2, 4, 7])),
    )  # fmt: skip


def follow(course: Course, arch: Arch, versions: Sequence[Params], mesh: Mesh = SINGLE) -> list[tuple[Event, ...]]:
    """Let a course take its way; return what each pass tells. In the end all blocks are back."""
    first, other = (
        Generator(params=shard(params, table(False), mesh), arch=arch, mesh=mesh, version=version)
        for version, params in enumerate(versions)
    )
    engine = engines.start(first, course.blocks, size=course.size, limits=course.limits)
    told: list[tuple[Event, ...]] = []
    while engine.busy or len(told) < 10:
        for when, request in course.requests:
            engine = engines.submit(engine, request) if when == len(told) else engine
        for when, key, number in course.cancels:
            engine = engines.cancel(engine, key, number) if when == len(told) else engine
        if len(told) == course.change:
            engine = evolve(engine, generator=evolve(engine.generator, params=other.params, version=other.version))
        engine, events = advance(engine)
        told.append(events)
        assert len(told) < 300, "it goes on for ever"
    assert not engine.queue.blocks.references
    assert free_count(engine.queue.blocks) + idle_count(engine.queue.blocks) == course.blocks
    return told


def silenced(course: Course, told: list[tuple[Event, ...]]) -> dict[Continuation, int]:
    """Return from which pass on the continuations that were cancelled say nothing more.

    One of several that have not begun cannot be cancelled alone.
    """
    found: dict[Continuation, int] = {}
    came = {request.key: (when, request.n) for when, request in course.requests}
    for when, key, number in course.cancels:
        for each in range(came[key][1] if came[key][0] <= when else 0):
            begun = any((e.key, e.number) == (key, each) for events in told[:when] for e in events)
            if number is None or (number == each and (begun or came[key][1] == 1)):
                found[key, each] = min(when, found.get((key, each), NEVER))
    return found


def in_turn(course: Course, context: int, told: list[tuple[Event, ...]]) -> dict[Continuation, list[tuple[int, Token]]]:
    """Return what each continuation said, and in which pass: to its one end, or until it was cancelled."""
    silent = silenced(course, told)
    said: dict[Continuation, list[tuple[int, Token]]] = defaultdict(list)
    ends: dict[Continuation, End] = {}
    for when, event in ((when, event) for when, events in enumerate(told) for event in events):
        who = event.key, event.number
        assert who not in ends, "it went on after its end"
        assert when < silent.get(who, NEVER), "it went on after it was cancelled"
        if isinstance(event, Token):
            said[who].append((when, event))
        else:
            ends[who] = event
    for request in (request for _, request in course.requests):
        for who in ((request.key, number) for number in range(request.n)):
            if who in ends or who not in silent:
                assert ends[who].reason == reason(request, [token.id for _, token in said[who]], course, context)
    return said


def reason(request: Request, new: Sequence[int], course: Course, context: int) -> str:
    """Return why a continuation ends with these new ids."""
    if request.stop.intersection(new):
        return "stop" if request.stop.isdisjoint(new[:-1]) else "it went on"
    if len(new) == request.limit:
        return "length"
    ids = len(request.prompt) + len(new)
    return "context" if ids > context else "memory" if ids > course.blocks * course.size else "it was too early"


def hold(
    versions: Sequence[Params], arch: Arch, course: Course, told: list[tuple[Event, ...]], within: float = 1e-9
) -> None:
    """Hold every token to the whole forward pass over the text up to it, and to one choice alone."""
    said, arch = in_turn(course, arch.context, told), arch.without_capacity()

    @cache
    def whole(version: int, ids: tuple[int, ...]) -> torch.Tensor:
        return logits(versions[version], {"tokens": torch.tensor([ids])}, arch, SINGLE)[0]

    for _, request in course.requests:
        for who in ((request.key, number) for number in range(request.n)):
            ids = (*request.prompt, *(token.id for _, token in said[who]))
            for number, (when, token) in enumerate(said[who]):
                before = ids[: len(request.prompt) + number]
                text = before if arch.rope.kind in ("dynamic", "longrope") else ids[:-1]  # its length tells, or not
                row = whole(int(when >= course.change), text)[len(before) - 1]
                likely = (row / (request.sampling.temperature or 1.0)).log_softmax(-1)
                assert token.log_prob == pytest.approx(float(likely[token.id]), abs=within, rel=within / 10)
                if row.dtype == torch.float64:  # in float32 a choice may hang on a rounding
                    alone = draw(row[None], [Ask(request.sampling, (*request.stream, who[1]), number, before)])
                    assert alone.ids == [token.id]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_an_engine_tells_what_the_whole_forward_gives(data: st.DataObject) -> None:
    arch = data.draw(models())
    versions, course = [params_of(arch, seed) for seed in (0, 1)], data.draw(courses(arch))
    hold(versions, arch, course, follow(course, arch, versions))


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_in_float32_too(data: st.DataObject) -> None:
    arch = data.draw(models().filter(lambda arch: arch.moe is None))  # a rounding would choose other experts
    versions = [tree.map(torch.Tensor.float, params_of(arch, seed)) for seed in (0, 1)]
    course = data.draw(courses(arch))
    hold(versions, arch, course, follow(course, arch, versions), within=1e-5)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_text_is_the_same_in_any_company(data: st.DataObject) -> None:
    arch = data.draw(models())
    params, course = params_of(arch), evolve(data.draw(courses(arch)), change=NEVER)
    said = in_turn(course, arch.context, follow(course, arch, [params, params]))
    for _, request in course.requests:
        alone = list(engines.complete(Generator(params=params, arch=arch), [request]))
        for number in range(request.n):
            mine = [token.id for _, token in said[request.key, number]]
            theirs = [event.id for event in alone if isinstance(event, Token) and event.number == number]
            assert mine == theirs[: len(mine)]


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_two_ranks_tell_what_one_tells(data: st.DataObject) -> None:
    arch = data.draw(models(tp=2))
    versions, course = [params_of(arch, seed) for seed in (0, 1)], data.draw(courses(arch))
    for told in fake.run(lambda mesh: follow(course, arch, versions, mesh), tp=2):
        hold(versions, arch, course, told)
