"""Keep matrices in 4 bits a number: NF4 with double quantization (Dettmers et al. 2023, arXiv 2305.14314).

The numbers, their rounding and their order are those of bitsandbytes (`functional.py`, `backends/default/ops.py`).
64 numbers that one output reads share their largest magnitude; of those magnitudes, less their mean, 256 share one
float32, and each is 8 bits: 4 + 8/64 + 32/(64 256) = 4.127 bits a number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from attrs import frozen
from torch import Tensor

from ironfn import tree
from ironfn.layout.table import Table, placement, shard_leaf, unshard_leaf
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.types import Flat, Params

BLOCK, GROUP = 64, 256
_PIECE = 4096  # outputs of a table that are there at one time
SUFFIX = "_nf4"
"""What the branch that stands for a matrix is called, after its name."""

NAMES = ("codes", "absmax", "scale", "mean")
"""The leaves of that branch."""

LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The quantiles of a normal distribution (appendix E of the paper)."""

_ACROSS = re.compile(r"(^|/)(wo|w_down)$")
"""The matrices whose inputs tp shares out."""


def magnitude_levels() -> Tensor:
    """Return the 256 levels of the magnitudes, ascending: dynamic tree quantization (Dettmers 2016, arXiv 1511.04561).

    For each power of ten from 1e-6 to 1, twice as many levels as for the one below, evenly spread; 0; and 1.
    """
    found = [0.0, 1.0]
    for bits in range(7):
        edges = torch.linspace(0.1, 1, 2**bits + 1, dtype=torch.float32).tolist()
        centres = torch.tensor([(a + b) / 2 for a, b in pairwise(edges)], dtype=torch.float32)
        steps: list[float] = (10 ** (bits - 6) * centres).tolist()
        found += steps + [-x for x in steps]
    return torch.tensor(sorted(found), dtype=torch.float32)


def _nearest(x: Tensor, levels: Tensor) -> Tensor:
    """Return the number of the nearest level, the lower one half-way between two."""
    return torch.bucketize(x.contiguous(), (levels[:-1] + levels[1:]) / 2, out_int32=True).to(torch.uint8)


def _scaled(x: Tensor, most: Tensor) -> Tensor:
    return (x * (1.0 / most.clamp(min=1e-38)).unsqueeze(-1)).clamp_(-1, 1)


def quantized(rows: Tensor) -> Flat:
    """Return what is kept of a matrix [outputs, inputs]. ValueError where its inputs are no multiple of 64.

    ``codes`` uint8 [outputs, inputs / 2], two numbers each, the first in the high half; ``absmax`` uint8 [outputs,
    inputs / 64]; ``scale`` float32 [their number / 256]; ``mean`` float32 [].
    """
    if rows.shape[1] % BLOCK:
        raise ValueError(f"NF4 takes {BLOCK} inputs at a time, and {rows.shape[1]} are no multiple of that")
    blocks = rows.float().unflatten(1, (-1, BLOCK))
    absmax = blocks.abs().amax(-1)
    codes = _nearest(_scaled(blocks, absmax), torch.tensor(LEVELS, device=rows.device)).flatten(1)
    mean = absmax.mean()
    rest = (absmax - mean).flatten()
    groups = torch.nn.functional.pad(rest, (0, -len(rest) % GROUP)).view(-1, GROUP)
    scale = groups.abs().amax(-1)
    small = _nearest(_scaled(groups, scale), magnitude_levels().to(rows.device)).flatten()[: len(rest)]
    return {
        "codes": codes[:, ::2] << 4 | codes[:, 1::2],
        "absmax": small.view_as(absmax),
        "scale": scale,
        "mean": mean,
    }


@frozen(eq=False)
class Nf4:
    """Hold a rank's part of a matrix of `quantized`. first: the output and the block of inputs that it begins with.

    across: the blocks of inputs that the whole matrix has.
    """

    codes: Tensor
    absmax: Tensor
    scale: Tensor
    mean: Tensor
    first: tuple[int, int]
    across: int

    def rows(self, dtype: torch.dtype, at: Tensor | None = None) -> Tensor:
        """Return the outputs ``at`` (None: all) as the matrix has them, [outputs, inputs]."""
        device = self.codes.device
        codes, absmax = (self.codes, self.absmax) if at is None else (self.codes[at], self.absmax[at])
        output = torch.arange(len(self.codes), device=device) if at is None else at
        block = torch.arange(self.absmax.shape[1], device=device) + self.first[1]
        group = ((output[:, None] + self.first[0]) * self.across + block) // GROUP
        most = magnitude_levels().to(device)[absmax.int()] * self.scale[group] + self.mean
        levels = torch.tensor(LEVELS, device=device)
        pairs = torch.stack(torch.meshgrid(levels, levels, indexing="ij"), -1).view(256, 2)
        # two float32 side by side are looked up as one number of 8 bytes: four times as fast as rows of two
        both = pairs.flatten().view(torch.float64).index_select(0, codes.flatten().int())
        numbers = both.view(torch.float32).view(*absmax.shape, BLOCK)
        return numbers.mul_(most.unsqueeze(-1)).flatten(1).to(dtype)

    def pieces(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield the outputs as `rows` does, some at a time."""
        for at in torch.arange(len(self.codes), device=self.codes.device).split(_PIECE):
            yield self.rows(dtype, at)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix [inputs, outputs]."""
        return self.rows(dtype).t()


def held(path: str, parts: Params, mesh: Mesh) -> Nf4:
    """Return this rank's part of the matrix of that path, from the leaves of its branch."""
    codes, absmax, scale, mean = (tree.leaf(parts, name) for name in NAMES)
    index, size = mesh.tp.index, mesh.tp.size
    if _ACROSS.search(path):
        return Nf4(codes, absmax, scale, mean, (0, index * absmax.shape[1]), absmax.shape[1] * size)
    return Nf4(codes, absmax, scale, mean, (index * len(codes), 0), absmax.shape[1])


def quantize(params: Params, chosen: Callable[[str], bool], layout: Table, mesh: Mesh = SINGLE) -> Params:
    """Return this rank's part of a model whose chosen matrices are in NF4: the numbers are the same on every mesh.

    Tables of the vocabulary are [rows, width], and so are their blocks. layout: of the leaves before and after. Every
    rank calls this together. ValueError as `quantized`, with the path.
    """
    done: Flat = {}
    for path, leaf in tree.flatten(params).items():
        if not chosen(path):
            done[path] = leaf
            continue
        whole = unshard_leaf(leaf, placement(layout, path), mesh)
        try:
            parts = quantized(whole if path in ("embed/tokens", "head/w") else whole.t())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        for name, part in parts.items():
            at = f"{path}{SUFFIX}/{name}"
            done[at] = shard_leaf(part, placement(layout, at), mesh, at)
    return tree.unflatten(done)


def bits(parts: Params) -> float:
    """Return the bits that a number of this matrix takes."""
    return 8 * tree.nbytes(parts) / (2 * tree.leaf(parts, "codes").numel())
