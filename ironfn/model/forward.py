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
from ironfn.types import Params


def keep(block: Callable[..., Any], *arguments: Any) -> Any:
    """Run a block and keep what its backward needs: the default. `ironfn.grad.remat.recompute` is the other choice."""
    return block(*arguments)


def here(path: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a leaf that is already whole (but for its tp and ep shares) on this rank, in the dtype asked for."""
    return x.to(dtype)


@frozen
class Forward:
    """Choose how to compute, not what: none of this changes the mathematics.

    compute: dtype of the matrix products; None takes the parameters'. float32: leaves (path regex) kept in float32.
    attention: how documents are kept apart. run: how a block is called. dropout: None when evaluating.
    fetch: (path, leaf, dtype) -> the leaf as the products want it; `layout.fsdp.fetch` gathers its shares here.
    jitter: the seed of the router's noise; None, as when evaluating, adds none.
    experts: how tokens go through their experts; `experts.written_out` is the form for `torch.func`.
    """

    compute: torch.dtype | None = None
    float32: tuple[str, ...] = ("norm",)
    attention: Attention = by_span
    run: Callable[..., Any] = keep
    dropout: Dropout | None = None
    fetch: Callable[[str, Tensor, torch.dtype], Tensor] = here
    jitter: int | None = None
    experts: Callable[[Tensor, Choice, Params, Activation, Axis], Tensor] = grouped


DEFAULT = Forward()


def ready(params: Params, how: Forward, prefix: str = "") -> Params:
    """Return the leaves below ``prefix`` whole and in the dtypes that ``how`` asks for.

    Their gradients come back in the leaves' own dtype and, where they were gathered, as shares. A router always works
    in float32 or better: half a percent of a logit would choose other experts.
    """

    def to(path: str, x: Tensor) -> Tensor:
        if how.compute is None:
            return how.fetch(path, x, x.dtype)
        high = "/router/" in path or any(re.search(pattern, path) for pattern in how.float32)
        return how.fetch(path, x, torch.float32 if high and how.compute != torch.float64 else how.compute)

    return tree.map_path(to, params, prefix)


def share(x: Tensor, mesh: Mesh) -> Tensor:
    """Return the positions of x [rows, length, ...] that this rank holds between the tensor-parallel regions."""
    return x.chunk(mesh.tp.size, LENGTH)[mesh.tp.index] if mesh.sequence_parallel else x
