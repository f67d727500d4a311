"""Greedy decoding equals `transformers.generate`; draws follow the seed; the window is what the model looks at."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from ironfn import tree
from ironfn.generate.sampling import continuation, greedy, sampler
from ironfn.layout.table import shard
from ironfn.mesh import fake
from ironfn.mesh.axis import SINGLE
from ironfn.model.arch import Arch
from ironfn.model.tables import table
from ironfn.model.transformer import logits
from ironfn.types import Params
from tests import peers

CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {}),
    ("llama", {"kv_heads": 1, "tied": False, "pad_vocab_to": 16}),
    ("gpt2", {}),
)
PROMPT = [5, 17, 3, 64]


def a_model(preset: str = "llama", **fields: Any) -> tuple[Arch, Any, Params]:
    arch = peers.make_arch(preset, 101, **fields)
    model, params = getattr(peers, preset)(peers.make_arch(preset, 101, **(fields | {"pad_vocab_to": 1})))
    return arch, model, padded(params, arch)


def padded(params: Params, arch: Arch) -> Params:
    """Give the tables the rows that the padding of the vocabulary adds, filled with what must never be chosen."""
    extra = torch.full((arch.rows - arch.vocab, arch.width), 100.0)
    for branch, name in (("embed", "tokens"), ("head", "w")):
        if branch in params:
            params[branch][name] = torch.cat([params[branch][name], extra])  # pyright: ignore
    return params


@pytest.mark.parametrize(("preset", "fields"), CASES)
@pytest.mark.parametrize("prompt", [PROMPT, [0]])
def test_greedy_is_transformers(preset: str, fields: dict[str, Any], prompt: list[int]) -> None:
    arch, model, params = a_model(preset, **fields)
    theirs = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), max_new_tokens=24,
        do_sample=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    ours = list(continuation(params, arch, prompt, 24, greedy))
    assert ours == theirs[0, len(prompt) :].tolist()
    assert all(0 <= i < arch.vocab for i in ours)


def test_it_ends_after_a_stop_id_and_not_before() -> None:
    arch, _, params = a_model()
    whole = list(continuation(params, arch, PROMPT, 12, greedy))
    end = whole[5]
    first = whole.index(end)
    assert list(continuation(params, arch, PROMPT, 12, greedy, stop=frozenset([end]))) == whole[: first + 1]
    assert list(continuation(params, arch, PROMPT, 0, greedy)) == []


def test_it_is_lazy() -> None:
    arch, _, params = a_model()
    endless = continuation(params, arch, PROMPT, 10**9, greedy)
    assert [next(endless) for _ in range(3)] == list(continuation(params, arch, PROMPT, 3, greedy))


@pytest.mark.parametrize("preset", ["llama", "gpt2"])
def test_the_window_is_all_that_the_model_looks_at(preset: str) -> None:
    """Each id is the best one after the last ``window`` ids, alone in a forward pass; also past the context."""
    arch, _, params = a_model(preset, context=8)
    for window, wide in ((3, 3), (None, 8), (99, 8)):
        ids = list(PROMPT)
        for new in continuation(params, arch, PROMPT, 14, greedy, window=window):
            seen = torch.tensor([ids[-wide:]])
            assert new == int(logits(params, {"tokens": seen}, arch, SINGLE)[0, -1].argmax())
            ids.append(new)


def test_a_draw_depends_on_the_seed_the_stream_and_its_number_alone() -> None:
    arch, _, params = a_model()

    def drawn(*stream: int) -> list[int]:
        return list(continuation(params, arch, PROMPT, 20, sampler(1.0, 50, *stream)))

    torch.manual_seed(1)
    once = drawn(0, 1)
    torch.manual_seed(2)
    assert drawn(0, 1) == once
    assert drawn(0, 2) != once
    assert drawn(1, 1) != once
    choose = sampler(1.0, 50, 0)
    flat = torch.zeros(100)
    assert [choose(flat, n) for n in (2, 0, 1)] == [choose(flat, n) for n in (2, 0, 1)]
    assert len({choose(flat, n) for n in range(50)}) > 10


def test_sampling_takes_each_id_as_often_as_its_probability_says() -> None:
    """Logits ln(4, 3, 2, 1): at temperature 1 the shares are 0.4, 0.3, 0.2, 0.1; at 0.5 squares, at 2 roots."""
    scores = torch.tensor([4.0, 3.0, 2.0, 1.0]).log()
    for temperature in (1.0, 0.5, 2.0):
        choose = sampler(temperature, 4, 3)
        counts = Counter(choose(scores, number) for number in range(4000))
        weights = [n ** (1 / temperature) for n in (4, 3, 2, 1)]
        for i, weight in enumerate(weights):
            share = weight / sum(weights)
            assert counts[i] / 4000 == pytest.approx(share, abs=4.5 * (share * (1 - share) / 4000) ** 0.5)


def test_top_k_cuts_the_rest_off() -> None:
    scores = torch.tensor([0.0, 5.0, 4.9, 1.0])
    assert {sampler(1.0, 2, 0)(scores, n) for n in range(200)} == {1, 2}
    assert {sampler(1.0, 1, 0)(scores, n) for n in range(50)} == {1}
    assert {sampler(9.0, 1000, 0)(scores, n) for n in range(200)} == {0, 1, 2, 3}
    assert {sampler(1e-6, 4, 0)(scores, n) for n in range(50)} == {1}, "no overflow near 0"


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: sampler(0.0, 5, 0), "temperature 0.0 must be above 0"),
        (lambda: sampler(float("nan"), 5, 0), "temperature nan"),
        (lambda: sampler(1.0, 0, 0), "top_k 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(call: Any, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        call()


@pytest.mark.parametrize(("prompt", "what"), [([], "empty prompt"), ([101], "vocabulary of 101"), ([-1], "vocabulary")])
def test_prompts_that_the_model_cannot_read_are_refused(prompt: list[int], what: str) -> None:
    arch, _, params = a_model()
    with pytest.raises(ValueError, match=what):
        next(continuation(params, arch, prompt, 1, greedy))


def test_no_graph_is_kept() -> None:
    arch, _, params = a_model()
    seen: list[bool] = []

    def look(scores: torch.Tensor, number: int) -> int:
        seen.append(scores.requires_grad)
        return 0

    for leaf in params["embed"].values():  # pyright: ignore
        leaf.requires_grad_()
    list(continuation(params, arch, PROMPT, 2, look))
    assert seen == [False, False]


@pytest.mark.parametrize("sizes", ["tp 2", "tp 2 sp", "dp 2", "dp 2 tp 2", "ep 2"])
def test_every_mesh_writes_the_same_text_on_every_rank(sizes: str) -> None:
    """The parameters are cut over tp; sequence parallelism, for which one position is too few, is left off."""
    words = sizes.removesuffix(" sp").split()
    mesh: dict[str, Any] = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    arch, _, params = a_model("llama", kv_heads=2, tied=False, pad_vocab_to=16)
    params = tree.map(torch.Tensor.double, params)
    choose = sampler(1.0, 20, 4)
    alone = list(continuation(params, arch, PROMPT, 16, choose))
    ranks = fake.run(
        lambda mesh: list(continuation(shard(params, table(False), mesh), arch, PROMPT, 16, choose, mesh=mesh)),
        **mesh, sequence_parallel=sizes.endswith("sp"),
    )  # fmt: skip
    assert ranks == [alone] * len(ranks)


def test_ranks_that_round_differently_follow_rank_0() -> None:
    arch, _, params = a_model()
    ranks = fake.run(
        lambda mesh: list(continuation(params, arch, PROMPT, 8, lambda logits, n: n + mesh.dp.index, mesh=mesh)), dp=3
    )
    assert ranks == [list(range(8))] * 3
