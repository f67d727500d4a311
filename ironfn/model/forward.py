"""Say how a decoder is computed: what may differ between two runs that mean the same model."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from ironfn import tree
from ironfn.mesh.axis import Axis, Mesh
from ironfn.mesh.pairs import LENGTH
from ironfn.model.attention import Attention, Dropout, by_span
from ironfn.model.experts import Choice, grouped
from ironfn.model.fused import Activation
from ironfn.model.rope import Turning, angles
from ironfn.model.weights import Weight
from ironfn.types import Batch, Params


def keep(block: Callable[..., Any], *arguments: Any) -> Any:
    """Run a block and keep what its backward needs: the default. `ironfn.grad.remat.recompute` is the other choice."""
    return block(*arguments)


def here(path: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a leaf that is already whole (but for its tp and ep shares) on this rank, in the dtype asked for."""
    return x.to(dtype)


def unadapted(params: Params, prefix: str, batch: Batch) -> Params:
    """Return the leaves as they are: the default."""
    return params


@frozen
class Forward:
    """Choose how to compute, not what: none of this changes the mathematics.

    compute: dtype of the matrix products; None takes the parameters'. float32: leaves (path regex) kept in float32.
    attention: how documents are kept apart. run: how a block is called. dropout: None when evaluating.
    fetch: (path, leaf, dtype) -> the leaf as the products want it; `layout.fsdp.fetch` gathers its shares here.
    jitter: the seed of the router's noise; None, as when evaluating, adds none.
    experts: how tokens go through their experts; `experts.written_out` is the form for `torch.func`.
    adapt: (leaves of a block, the path before theirs, the batch) -> the leaves as the block calls them, after `fetch`;
    `adapters.Adapting` puts what is trained beside a frozen matrix here.
    angles: how rotary angles come to be; `rope.tabled` looks them up.
    """

    compute: torch.dtype | None = None
    float32: tuple[str, ...] = ("norm",)
    attention: Attention = by_span
    run: Callable[..., Any] = keep
    dropout: Dropout | None = None
    fetch: Callable[[str, Tensor, torch.dtype], Tensor] = here
    jitter: int | None = None
    experts: Callable[[Tensor, Choice, Params, Activation, Axis], Tensor] = grouped
    adapt: Callable[[Params, str, Batch], Params] = unadapted
    angles: Turning = angles


DEFAULT = Forward()


def ready(params: Params, how: Forward, batch: Batch, prefix: str = "") -> Params:
    """Return the leaves below ``prefix`` whole, in the dtypes that ``how`` asks for, and with their adapters.

    Their gradients come back in the leaves' own dtype and, where they were gathered, as shares. A router always works
    in float32 or better: half a percent of a logit would choose other experts. What stands for a matrix in 4 bits stays
    as it is, and the lengths of an adapter's columns are float32 or better.
    """

    if how.compute is None and how.fetch is here:
        return how.adapt(params, prefix, batch)

    def to(path: str, x: Tensor) -> Tensor:
        if isinstance(x, Weight):
            return x
        if how.compute is None or "_nf4/" in path:
            return how.fetch(path, x, x.dtype)
        high = (
            "/router/" in path or path.endswith("_lora/m") or any(re.search(pattern, path) for pattern in how.float32)
        )
        return how.fetch(path, x, torch.float32 if high and how.compute != torch.float64 else how.compute)

    return how.adapt(tree.map_path(to, params, prefix), prefix, batch)


def share(x: Tensor, mesh: Mesh) -> Tensor:
    """Return the positions of x [rows, length, ...] that this rank holds between the tensor-parallel regions."""
    return x.chunk(mesh.tp.size, LENGTH)[mesh.tp.index] if mesh.sequence_parallel else x
