"""Law 7: what is computed out of a cache equals what one forward pass over the whole text gives.

Whatever the family, the texts that share a beginning, the slots that they lie in, and how many tokens of which of them
each pass computes.
"""

from __future__ import annotations

from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ironfn.generate import pieces
from ironfn.generate.paged import in_place, padded
from ironfn.model.arch import Arch
from ironfn.model.rope import regime
from property_tests.strategies import archs, params_of
from tests.paging import Laid, Pass, at_once, in_passes


@st.composite
def schedules(draw: st.DrawFn, arch: Arch) -> tuple[Laid, list[Pass]]:
    """Draw texts, some of which go on from an earlier one's beginning; their slots; and passes that compute them."""
    ids = st.lists(st.integers(0, arch.vocab - 1), min_size=1, max_size=8)
    free = draw(st.permutations(range(40)))  # runs of two slots: some adjacent, most not
    slots = iter([2 * run + i for run in free for i in (0, 1)])
    texts, places, shared, origins = [], [], [], []
    for number in range(draw(st.integers(1, 4))):
        of, new = draw(st.integers(0, number)), draw(ids)
        trunk = draw(st.integers(0, min(8, len(texts[of])))) if of < number else 0
        text = texts[of][:trunk] + new if trunk else new
        if trunk and regime(arch, len(text)) != regime(arch, len(texts[of])):
            trunk = 0  # its keys are turned by other angles
        texts.append(text)
        places.append((places[of][:trunk] if trunk else []) + [next(slots) for _ in text[trunk:]])
        shared.append(trunk)
        origins.append(of)
    passes: list[Pass] = []
    done = list(shared)
    while any(done[n] < len(text) for n, text in enumerate(texts)):
        open_ = [n for n, text in enumerate(texts) if done[n] < len(text)]
        ready = [n for n in open_ if not shared[n] or done[origins[n]] >= shared[n]]
        chosen = draw(st.lists(st.sampled_from(ready), min_size=1, unique=True))
        passes.append([(n, draw(st.integers(1, len(texts[n]) - done[n]))) for n in chosen])
        for n, new in passes[-1]:
            done[n] += new
    return Laid(texts, places, shared), passes


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_out_of_the_cache_or_at_once_is_one_model(data: st.DataObject) -> None:
    arch = data.draw(archs())
    params = params_of(arch)
    laid, passes = data.draw(schedules(arch))
    form = data.draw(st.sampled_from([in_place, padded]))
    with mock.patch.object(pieces, "_LONG", data.draw(st.integers(1, 4))):
        found = in_passes(params, arch, laid, passes, form)
    for text, shared, mine in zip(laid.texts, laid.shared, found, strict=True):
        torch.testing.assert_close(mine, at_once(params, arch, text)[shared:], rtol=0, atol=1e-9)
