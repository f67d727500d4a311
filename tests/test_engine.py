"""Continuous batching says what one text alone says: the same ids and log-probabilities as the whole forward pass."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from attrs import evolve

from ironfn.generate import engine as engines
from ironfn.generate.engine import End, Engine, Event, Generator, Limits, Request, Token, advance, complete
from ironfn.generate.paged import paged
from ironfn.generate.sampling import Sampling
from ironfn.mesh.axis import SINGLE
from ironfn.model.transformer import logits
from tests import family_peers

GREEDY = Sampling(temperature=0)
PROMPT = (5, 17, 3, 64)


def llama(**changes: Any) -> tuple[Any, Generator]:
    """Return a small random Llama of `transformers`, and the same as a generator."""
    peer = family_peers.PEERS["llama"]
    arch = peer.arch(**changes)
    model = peer.build(arch)
    return model, Generator(params=peer.tree(model, arch), arch=arch)


def ids_of(events: list[Event], key: Any = 0, number: int = 0) -> list[int]:
    return [e.id for e in events if isinstance(e, Token) and (e.key, e.number) == (key, number)]


def run(engine: Engine, requests: list[Request]) -> tuple[Engine, list[Event]]:
    for request in requests:
        engine = engines.submit(engine, request)
    events: list[Event] = []
    while engine.busy:
        engine, more = advance(engine)
        events += more
    return engine, events


def check(generator: Generator, requests: list[Request], events: list[Event], within: float = 1e-5) -> None:
    """Hold every log-probability to the whole forward pass over the text."""
    for request in requests:
        for number in range(request.n):
            told = [e for e in events if isinstance(e, Token) and (e.key, e.number) == (request.key, number)]
            ids = [*request.prompt, *(e.id for e in told)]
            whole = logits(generator.params, {"tokens": torch.tensor([ids])}, generator.arch, SINGLE)[0].double()
            scores = (whole / (request.sampling.temperature or 1.0)).log_softmax(-1)
            start = len(request.prompt)
            want = [scores[start - 1 + n, id].item() for n, id in enumerate(ids[start:])]
            assert [e.log_prob for e in told] == pytest.approx(want, abs=within)


def some(count: int, **more: Any) -> list[Request]:
    """Return requests of many lengths, the first halves of some alike."""
    draw = torch.Generator().manual_seed(count)
    common = torch.randint(0, 101, (23,), generator=draw).tolist()
    requests = []
    for key in range(count):
        own = torch.randint(0, 101, (1 + 7 * key % 19,), generator=draw).tolist()
        prompt = (*common[: (0, 9, 16, 23)[key % 4]], *own)
        requests.append(Request(key=key, prompt=prompt, limit=3 + 5 * key % 11, sampling=Sampling(seed=key), **more))
    return requests


@pytest.mark.parametrize("name", family_peers.PEERS)
def test_greedy_is_transformers(name: str) -> None:
    """Also where the text grows beyond the window, with three texts of different length at a time."""
    peer = family_peers.PEERS[name]
    arch = peer.arch()
    model: Any = peer.build(arch)
    prompts = [PROMPT, (7,), tuple(range(30, 51))]
    generator = Generator(params=peer.tree(model, arch), arch=arch)
    requests = [Request(key=n, prompt=p, limit=20, sampling=GREEDY) for n, p in enumerate(prompts)]
    events = list(complete(generator, requests, limits=Limits(tokens=8), size=4))
    for n, prompt in enumerate(prompts):
        theirs = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), max_new_tokens=20,
            do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=False,
        )  # fmt: skip
        assert ids_of(events, n) == theirs[0, len(prompt) :].tolist()
    check(generator, requests, events)


@pytest.mark.parametrize("tokens", [1, 5, 64])
@pytest.mark.parametrize("blocks", [12, 200])
def test_neighbours_chunks_and_want_of_memory_change_nothing(tokens: int, blocks: int) -> None:
    """Twelve blocks of four tokens are too few for more than two of the texts: they give way to each other."""
    _, generator = llama()
    requests = some(9)
    alone = {r.key: ids_of(list(complete(generator, [r])), r.key) for r in requests}
    engine, events = run(engines.start(generator, blocks, size=4, limits=Limits(5, tokens)), requests)
    assert {r.key: ids_of(events, r.key) for r in requests} == alone
    check(generator, requests, events)
    ends = Counter(e.key for e in events if isinstance(e, End))
    assert ends == Counter(range(9))
    again, more = run(engine, requests)
    assert {r.key: ids_of(more, r.key) for r in requests} == alone, "all of it from the cache"
    assert again.queue.blocks.count == blocks


def test_a_prompt_is_read_once_for_all_its_continuations(monkeypatch: pytest.MonkeyPatch) -> None:
    _, generator = llama()
    seen: list[int] = []
    whole = engines.hidden

    def counted(params: Any, batch: Any, *rest: Any) -> Any:
        seen.append(batch["tokens"].shape[1])
        return whole(params, batch, *rest)

    monkeypatch.setattr(engines, "hidden", counted)
    request = Request(key="a", prompt=tuple(range(2, 39)), limit=4, n=6)
    events = list(complete(generator, [request], size=4))
    assert seen == [37, 6, 6, 6]
    check(generator, [request], events)
    texts = {tuple(ids_of(events, "a", number)) for number in range(6)}
    assert len(texts) > 1
    seen.clear()
    requests = [Request(key=n, prompt=(*range(2, 34), n), limit=3) for n in range(5)]
    check(generator, requests, list(complete(generator, requests, size=4)))
    assert seen == [33 + 4, 5, 5], "and what prompts begin with alike, in the very pass that computes it"


def test_a_continuation_ends_where_it_should() -> None:
    _, generator = llama(context=16)
    free = list(complete(generator, [Request(key=0, prompt=PROMPT, limit=99, sampling=GREEDY)]))
    assert free[-1] == End(0, 0, "context")
    whole = ids_of(free)
    assert len(whole) == 16 - len(PROMPT) + 1
    stop = whole[3]
    ended = list(complete(generator, [Request(key=0, prompt=PROMPT, limit=9, sampling=GREEDY, stop=frozenset([stop]))]))
    assert ids_of(ended) == whole[: whole.index(stop) + 1]
    assert ended[-1] == End(0, 0, "stop")
    assert list(complete(generator, [])) == []
    short = list(complete(generator, [Request(key=0, prompt=PROMPT, limit=2, sampling=GREEDY)]))
    assert (ids_of(short), short[-1]) == (whole[:2], End(0, 0, "length"))


def test_what_is_cancelled_says_no_more_and_gives_its_blocks_back() -> None:
    _, generator = llama()
    engine = engines.start(generator, 40, size=4)
    requests = some(4, n=2)
    for request in requests:
        engine = engines.submit(engine, request)
    engine, _ = advance(engine)
    engine = engines.cancel(engines.cancel(engine, 0), 1, 1)
    engine, rest = run(engine, [])
    assert {(e.key, e.number) for e in rest} == {(1, 0), (2, 0), (2, 1), (3, 0), (3, 1)}
    assert not engine.queue.blocks.references


def test_a_text_that_outgrows_the_cache_ends_there() -> None:
    _, generator = llama()
    engine = engines.start(generator, 3, size=4)
    requests = [Request(key=n, prompt=PROMPT, limit=40, sampling=GREEDY) for n in range(3)]
    engine, events = run(engine, requests)
    for n in range(3):
        assert len(ids_of(events, n)) == 12 - len(PROMPT) + 1
        assert End(n, 0, "memory") in events
    with pytest.raises(ValueError, match="13 tokens does not fit the cache of 12"):
        engines.submit(engine, Request(key=9, prompt=tuple(range(13)), limit=1))


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"prompt": ()}, "empty prompt"),
        ({"prompt": (101,)}, "vocabulary of 101"),
        ({"prompt": (-1,)}, "vocabulary"),
        ({"prompt": (1,) * 65}, "65 tokens does not fit the model's context of 64"),
        ({"limit": 0}, "limit 0 must be at least 1"),
        ({"n": 0}, "n 0 must be at least 1"),
        ({"top": -1}, "top -1"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(fields: dict[str, Any], what: str) -> None:
    _, generator = llama()
    with pytest.raises(ValueError, match=what):
        engines.submit(engines.start(generator, 99), Request(**({"key": 0, "prompt": PROMPT, "limit": 1} | fields)))


def test_new_parameters_never_read_the_old_ones_blocks() -> None:
    _, generator = llama()
    engine, _ = run(engines.start(generator, 40, size=4), [Request(key=0, prompt=tuple(range(20)), limit=2)])
    other = evolve(generator, params={**generator.params, "norm": {"scale": -generator.params["norm"]["scale"]}})  # pyright: ignore
    other = evolve(other, version=1)
    request = Request(key=0, prompt=tuple(range(20)), limit=5)
    _, events = run(evolve(engine, generator=other), [request])
    check(other, [request], events)


def test_prompts_that_part_within_a_block_of_the_same_pass_copy_nothing_unwritten() -> None:
    _, generator = llama()
    requests = [Request(key=n, prompt=(1, 2, 3, last, 5), limit=3, sampling=GREEDY) for n, last in enumerate((4, 9))]
    engine, events = run(engines.start(generator, 20, size=4), requests)
    check(generator, requests, events)
    again = Request(key=2, prompt=(1, 2, 3, 7), limit=3, sampling=GREEDY)
    check(generator, [again], run(engine, [again])[1])


@pytest.mark.parametrize("length", [31, 32, 33])
def test_texts_that_grow_lie_in_a_row(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their prompts leave free of a block: what lies in a row is read without a copy."""
    _, generator = llama()
    seen: list[int] = []

    def watched(pool: Any, parts: Any) -> Any:
        seen.extend(len(part.stretches) for part in parts)
        return paged(pool, parts)

    monkeypatch.setattr(engines, "paged", watched)
    requests = [Request(key=n, prompt=tuple([n + 1] * length), limit=30) for n in range(4)]
    list(complete(generator, requests))
    assert set(seen) == {1}
