"""Windows, soft caps and ALiBi equal their formula on texts of many blocks; angles and scales their closed forms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ironfn import tree
from ironfn.mesh.axis import SINGLE
from ironfn.model.arch import Arch, complete
from ironfn.model.attention import Attention, by_mask, by_span, written_out
from ironfn.model.causal import Look, alibi_slopes
from ironfn.model.families import model_spec
from ironfn.model.forward import Forward
from ironfn.model.init import init
from ironfn.model.rope import angles, attention_factor, lengths
from ironfn.model.tables import table
from ironfn.model.transformer import hidden
from ironfn.spec.records import RopeSpec

SLOPES = torch.tensor(alibi_slopes(4), dtype=torch.float64)
LOOKS = {
    "scale": Look(scale=0.7),
    "window of 1": Look(window=1),
    "window of 5": Look(window=5),
    "window of 65": Look(window=65),
    "window of 150, scale": Look(scale=0.7, window=150),
    "window beyond the text": Look(window=10_000),
    "cap": Look(softcap=1.5),
    "cap, window of 70": Look(softcap=1.5, window=70, scale=0.9),
    "slopes": Look(slopes=SLOPES),
    "slopes, window of 130": Look(slopes=SLOPES, window=130, scale=0.3),
}
WAYS: tuple[Attention, ...] = (by_span, by_mask, written_out)


def formula(q: Tensor, k: Tensor, v: Tensor, segment: Tensor, look: Look) -> Tensor:
    """Weigh all by all, position by position as the papers write it, and let the softmax see what may be seen."""
    length = q.shape[1]
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bihc,bjhc->bhij", q, k) * (look.scale or 1 / math.sqrt(q.shape[-1]))
    if look.softcap:
        scores = look.softcap * torch.tanh(scores / look.softcap)
    ago = torch.arange(length)[:, None] - torch.arange(length)
    if look.slopes is not None:
        scores = scores - look.slopes[:, None, None] * ago
    seen = (ago >= 0) & (ago < (look.window or length)) & (segment[:, :, None] == segment[:, None, :])
    return torch.einsum("bhij,bjhc->bihc", scores.masked_fill(~seen[:, None], -math.inf).softmax(-1), v)


@pytest.mark.parametrize("look", LOOKS.values(), ids=list(LOOKS))
def test_every_way_is_the_formula(look: Look) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(2, 300, n, 4, generator=generator, dtype=torch.float64, requires_grad=True) for n in (4, 2, 2)
    )
    segment = torch.zeros(2, 300, dtype=torch.long)
    segment[1, 40:] = 1
    direction = torch.randn(q.shape, generator=generator, dtype=torch.float64)
    expected = formula(q, k, v, segment, look)
    theirs = torch.autograd.grad(expected, (q, k, v), direction)
    for way in WAYS:
        found = way(segment)(q, k, v, look)
        torch.testing.assert_close(found, expected)
        for mine, other in zip(torch.autograd.grad(found, (q, k, v), direction), theirs, strict=True):
            torch.testing.assert_close(mine, other)
        torch.testing.assert_close(way(None)(q, k, v, look)[:1], expected[:1])


@pytest.mark.parametrize("name", ["window of 65", "cap, window of 70", "slopes", "slopes, window of 130", "cap"])
def test_no_square_of_a_long_text_is_made(name: str) -> None:
    sizes: list[int] = []

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, Tensor))
            return out

    q, k, v = (torch.randn(1, 2048, n, 4, requires_grad=True) for n in (4, 2, 2))
    with Largest():
        torch.autograd.grad(by_span(None)(q, k, v, LOOKS[name]).sum(), (q, k, v))
    whole = 4 * 2048 * 2048
    # without a window a block of 128 queries sees all keys at most
    assert max(sizes) <= (whole // 16 if name == "cap" else whole // 50)


def test_llama_3_stretches_as_its_authors_say() -> None:
    """Worked out by hand: head_dim 64 as in Llama 3.2 (pairs 15 to 17 lie between), and a tiny one."""
    arch = complete(model_spec("llama3.2", head_dim=64), 10)
    plain = complete(model_spec("llama3.2", head_dim=64, rope={"kind": "none"}), 10)
    one = torch.ones(1, 1, dtype=torch.long)
    found, before = (torch.asin(angles(one, None, a)[1][0, 0, 0, 32:]) for a in (arch, plain))
    torch.testing.assert_close(found[:15], before[:15])
    torch.testing.assert_close(found[15:18], torch.tensor([0.00129055, 0.00042956, 0.0000970829]), rtol=1e-5, atol=0)
    torch.testing.assert_close(found[18:], before[18:] / 32, rtol=1e-5, atol=0)
    rope = {"kind": "llama3", "factor": 8.0, "original_context": 64}
    tiny = complete(model_spec("llama", head_dim=8, rope=rope), 10)
    expected = torch.tensor([1.0, 0.01304226, 0.00125, 0.000125])
    torch.testing.assert_close(torch.asin(angles(one, None, tiny)[1][0, 0, 0, 4:])[1:], expected[1:], rtol=1e-5, atol=0)


def test_a_half_turned_head_keeps_its_other_half() -> None:
    """Exponents run over the turned width (i / 4, not i / 8), and the pairs are (i, i + 2)."""
    arch = complete(model_spec("phi", width=32, heads=4), 10)
    cos, sin = angles(torch.tensor([[3]]), None, arch)
    assert cos.shape == (1, 1, 1, 4)
    torch.testing.assert_close(sin[0, 0, 0, 2:], torch.tensor([3.0, 0.03]).sin())
    torch.testing.assert_close(sin[0, 0, 0, :2], -sin[0, 0, 0, 2:])


def test_yarn_recommends_what_its_paper_does() -> None:
    assert attention_factor(RopeSpec("yarn", factor=4.0), 16) == pytest.approx(0.1 * math.log(4) + 1)
    assert attention_factor(RopeSpec("yarn", factor=4.0, mscale=1.0, mscale_all_dim=1.0), 16) == 1.0
    assert attention_factor(RopeSpec("longrope", factor=32.0), 4096) == pytest.approx(1.1902380714)
    assert attention_factor(RopeSpec("linear", factor=4.0), 16) == 1.0


def test_lengths_are_those_of_documents() -> None:
    position = torch.tensor([[0, 1, 2, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5, 6]])
    segment = torch.tensor([[0, 0, 0, 1, 1, -1, -1], [0, 0, 0, 0, 0, 0, 0]])
    assert lengths(position, segment).tolist() == [[3, 3, 3, 2, 2, 1, 1], [7] * 7]
    assert lengths(position[1:], None).tolist() == [[7] * 7]


def embedded(arch: Arch, value: float, dtype: torch.dtype) -> Tensor:
    """Return what enters the first block where all embeddings are ``value``."""
    params = init(arch, 0, table(False), SINGLE)
    tree.flatten(params)["embed/tokens"].fill_(value)
    seen: list[Tensor] = []

    def look(block: Any, x: Tensor, *rest: Any) -> tuple[Tensor, dict[str, Tensor]]:
        seen.append(x)
        return x, {}

    hidden(params, {"tokens": torch.arange(4)[None]}, arch, SINGLE, Forward(dtype, run=look))
    return seen[0]


@pytest.mark.parametrize(("width", "scale"), [(3072, 55.5), (2048, 45.25), (3584, 59.75)])
def test_gemma_rounds_the_scale_of_its_embeddings(width: int, scale: float) -> None:
    """In bfloat16 sqrt(3072) is 55.5 before it multiplies; in float32 it stays as it is."""
    arch = complete(model_spec("gemma", width=width, layers=1, heads=1, head_dim=2, ffn=2, context=8), 8)
    values = [1 + i / 128 for i in range(8)]
    found = torch.stack([embedded(arch, value, torch.bfloat16)[0, 0, 0] for value in values])
    assert torch.equal(found, torch.tensor(values, dtype=torch.bfloat16) * torch.tensor(scale, dtype=torch.bfloat16))
    rounded_later = (torch.tensor(values) * math.sqrt(width)).bfloat16()
    assert not torch.equal(found, rounded_later), "the values tell the two apart"
    torch.testing.assert_close(embedded(arch, 1.0, torch.float32)[0, 0, 0], torch.tensor(math.sqrt(width)))


def test_gemma_begins_with_a_plain_norm() -> None:
    """Scales of 0 multiply by 1: what is learned, kept and decayed is the distance from that."""
    arch = complete(model_spec("gemma", width=16, layers=1, heads=2, head_dim=8), 8)
    params = init(arch, 0, table(False), SINGLE)
    assert all(not leaf.any() for path, leaf in tree.flatten(params).items() if path.endswith("scale"))
    found = hidden(params, {"tokens": torch.arange(4)[None]}, arch, SINGLE)[0]
    torch.testing.assert_close(found.square().mean(-1), torch.ones(1, 4), rtol=1e-3, atol=0)
