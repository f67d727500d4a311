"""Turn positions into rotary angles, stretched or not, as `transformers/modeling_rope_utils.py` computes them.

Legend of shapes: B rows (1 where all are alike), T length, R the numbers of a head that are turned, R/2 pairs.
"""

from __future__ import annotations

import math
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from ironfn.model.arch import Arch
from ironfn.spec.records import RopeSpec

Angles: TypeAlias = "tuple[Tensor, Tensor]"
"""cos and (negated, plain) sin, [B, T, 1, R], as `fused.rotate` takes them."""


def angles(
    position_BT: Tensor,
    segment_BT: Tensor | None,
    arch: Arch,
    *,
    local: bool = False,
    lengths_BT: Tensor | None = None,
) -> Angles:
    """Return the rotary angles of these positions, in float32 whatever the model's dtype.

    Su et al. 2021, arXiv 2104.09864; the pairs are (i, i + R/2) as in `transformers`.
    segment, lengths: as in `types.Batch`; kinds that depend on the length look at each document's. local: of the layers
    with a window, where ``rope_local_theta`` is given.
    """
    if local and arch.rope_local_theta is not None:
        frequency = 1.0 / arch.rope_local_theta ** _exponents(arch, position_BT.device)
        stretch = 1.0
    else:
        frequency = _frequencies(position_BT, segment_BT, lengths_BT, arch)
        stretch = attention_factor(arch.rope, _original(arch))
    angle = position_BT[..., None].float() * frequency
    angle = torch.cat([-angle, angle], -1)[:, :, None]  # cos is even, sin is odd
    cos, sin = angle.cos(), angle.sin()
    return (cos, sin) if stretch == 1.0 else (cos * stretch, sin * stretch)


class Turning(Protocol):
    """Give `angles`, or what is as good."""

    def __call__(
        self,
        position_BT: Tensor,
        segment_BT: Tensor | None,
        arch: Arch,
        *,
        local: bool = False,
        lengths_BT: Tensor | None = None,
    ) -> Angles:
        """Return the rotary angles of these positions."""
        ...


def tabled(arch: Arch, count: int, device: torch.device) -> Turning:
    """Return `angles` that are looked up for places below ``count``, if they depend on nothing but the place."""
    if arch.positions != "rotary" or arch.rope.kind in ("dynamic", "longrope"):
        return angles
    places = torch.arange(count, device=device)[None]
    far, near = (torch.cat(angles(places, None, arch, local=local), -1)[0, :, 0] for local in (False, True))

    def looked_up(
        position_BT: Tensor,
        segment_BT: Tensor | None,
        arch: Arch,
        *,
        local: bool = False,
        lengths_BT: Tensor | None = None,
    ) -> Angles:
        both = torch.embedding(near if local else far, position_BT)[:, :, None]
        cos, sin = both.chunk(2, -1)
        return cos, sin

    return looked_up


def _original(arch: Arch) -> int:
    return arch.rope.original_context or arch.context


def regime(arch: Arch, length: int) -> int:
    """Return what texts must have in common for the keys of one to be those of the other where they begin alike.

    >>> from ironfn.model.arch import complete
    >>> from ironfn.model.families import model_spec
    >>> rope = RopeSpec(kind="dynamic", factor=2.0, original_context=8)
    >>> [regime(complete(model_spec("llama", rope=rope), 10), length) for length in (5, 8, 9)]
    [8, 8, 9]
    """
    if arch.positions != "rotary" or arch.rope.kind not in ("dynamic", "longrope"):
        return 0
    return int(length > _original(arch)) if arch.rope.kind == "longrope" else max(length, _original(arch))


def attention_factor(rope: RopeSpec, original: int) -> float:
    """Return what cos and sin are multiplied by: the spec's, or what the kind's authors recommend.

    yarn: Peng et al. 2023, arXiv 2309.00071, eq. 22; longrope: Ding et al. 2024, arXiv 2402.13753.
    """
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1.0:
        return 1.0
    if rope.kind == "longrope":
        return math.sqrt(1 + math.log(rope.factor) / math.log(original))
    if rope.kind != "yarn":
        return 1.0
    by, over = (0.1 * scale * math.log(rope.factor) + 1.0 for scale in (rope.mscale or 1.0, rope.mscale_all_dim or 0.0))
    return by / over if rope.mscale and rope.mscale_all_dim else 0.1 * math.log(rope.factor) + 1.0


def _exponents(arch: Arch, device: torch.device) -> Tensor:
    return torch.arange(0, arch.rotary_dim, 2, dtype=torch.float32, device=device) / arch.rotary_dim


def _frequencies(position: Tensor, segment: Tensor | None, known: Tensor | None, arch: Arch) -> Tensor:
    """Return what one step turns each pair by: [R/2], or [B, T, R/2] where it depends on the document."""
    rope, original = arch.rope, _original(arch)
    exponents = _exponents(arch, position.device)
    if rope.kind == "dynamic":
        # as if trained on longer texts from the first: bloc97's NTK-aware base, for the length that there is
        times = rope.factor * lengths(position, segment, known).clamp(min=original) / original - (rope.factor - 1)
        theta = arch.rope_theta * times ** (arch.rotary_dim / (arch.rotary_dim - 2))
        return 1.0 / theta[..., None] ** exponents
    powers = arch.rope_theta**exponents
    if rope.kind == "longrope":
        short, long = (powers.new_tensor(factors) * powers for factors in (rope.short_factor, rope.long_factor))
        return 1.0 / torch.where(lengths(position, segment, known)[..., None] > original, long, short)
    plain = 1.0 / powers
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope, original)
    return _yarn(plain, rope, original, arch) if rope.kind == "yarn" else plain


def _llama3(plain: Tensor, rope: RopeSpec, original: int) -> Tensor:
    """Stretch long waves whole, short ones not, and those between by their place (Llama 3.1's reference code)."""
    turns = original * plain / (2 * math.pi)
    part = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    part = part.clamp(0.0, 1.0)
    return (1 - part) * plain / rope.factor + part * plain


def _yarn(plain: Tensor, rope: RopeSpec, original: int, arch: Arch) -> Tensor:
    """Stretch by how often a pair turns over the original context (arXiv 2309.00071, section 3.2)."""

    def pair_of(turns: float) -> float:
        return arch.rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(arch.rope_theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, arch.rotary_dim - 1)
    place = torch.arange(len(plain), dtype=torch.float32, device=plain.device)
    stretched = ((place - low) / (high - low if high != low else 0.001)).clamp(0.0, 1.0)
    return plain / rope.factor * stretched + plain * (1 - stretched)


def lengths(position: Tensor, segment: Tensor | None, known: Tensor | None = None) -> Tensor:
    """Return for every token the length of its document: what is known of it, or the last position in it and 1."""
    if known is not None:
        return known.to(position.device)
    if segment is None:
        return (position.amax(1, keepdim=True) + 1).expand_as(position)
    segment, length = segment.to(position.device), position.shape[1]
    places = torch.arange(length, device=position.device)
    last = torch.cat([segment[:, 1:] != segment[:, :-1], torch.ones_like(segment[:, :1], dtype=torch.bool)], 1)
    ends = torch.where(last, places, length).flip(1).cummin(1).values.flip(1)
    return position.expand_as(segment).gather(1, ends) + 1
