"""Prepare matrices for products alone, laid out anew for few rows, or in 8 bits. There is no derivative of these.

A decoding step reads every matrix once, for a few rows. How fast depends on the layout: one row is as fast as memory
where the longer side of a plain matrix lies together; more rows are fastest in oneDNN's blocked layout
(docs/decisions.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from attrs import evolve
from torch import Tensor
from torch.nn import functional as F

from ironfn.model.arch import Arch
from ironfn.model.weights import Times, Weight
from ironfn.tree import branch, leaf
from ironfn.types import Params

mkldnn: Any = torch.ops.mkldnn

_TOGETHER = (("wq", "wk", "wv"), ("w_gate", "w_up"), ("wo",), ("w_up",), ("w_down",))
"""The leaves of a block that become one matrix: their products are of the same rows."""


_SMALL = 1 << 18
"""Numbers of a matrix below which a call of oneDNN costs what its layout saves, with caches that are always cold."""


def packed(params: Params, arch: Arch) -> tuple[Params, Arch]:
    """Return the model with its matrices laid out for decoding, in the layout that suits each number of rows.

    Float32 on a CPU that has oneDNN; anything else is returned as it is. Large matrices are kept twice, for one row and
    for more, and a tied head becomes a leaf of its own. Experts stay as they are.
    """
    table = leaf(branch(params, "embed"), "tokens")
    suits = table.dtype == torch.float32 and table.device.type == "cpu" and torch.backends.mkldnn.is_available()
    return _prepared(params, arch, _packed) if suits else (params, arch)


def int8(params: Params, arch: Arch) -> tuple[Params, Arch]:
    """Return the model with its matrices in 8 bits, one scale an output column (`quantization_error` says how near).

    Embeddings, norms, biases, routers and experts stay as they are, and so do the activations: where a product wants
    integers, it takes 14 bits of them, so that what a row becomes does not depend on its neighbours.
    """
    return _prepared(params, arch, _int8)


def quantized(w: Tensor) -> tuple[Tensor, Tensor]:
    """Return w [in, out] as int8 in -127 to 127, and the scale of each column.

    >>> whole, scale = quantized(torch.tensor([[1.0, 0.5], [-2.54, 0.0]]))
    >>> whole.tolist(), scale.tolist()[0]
    ([[50, 127], [-127, 0]], 0.019999999552965164)
    """
    scale = (w.abs().amax(0) / 127).clamp(min=torch.finfo(torch.float32).tiny).float()
    return (w / scale).round_().to(torch.int8), scale


def quantization_error(w: Tensor) -> float:
    """Return how far w [in, out] in 8 bits is from w: the norm of the difference over the norm."""
    whole, scale = quantized(w)
    return float(torch.linalg.vector_norm(whole * scale - w) / torch.linalg.vector_norm(w))


def _prepared(params: Params, arch: Arch, make: Callable[[Tensor], Times]) -> tuple[Params, Arch]:
    done = _with_weights(params, make)
    table = leaf(branch(params, "embed"), "tokens") if arch.tied else leaf(branch(params, "head"), "w")
    head = Weight(make(table.t()), (len(table),))
    done["head"] = (branch(done, "head") if "head" in done else {}) | {"w": head}  # pyright: ignore[reportArgumentType]
    return done, evolve(arch, tied=False)


def _with_weights(node: Params, make: Callable[[Tensor], Times]) -> Params:
    done: dict[str, Any] = {
        name: _with_weights(child, make) if isinstance(child, dict) else child for name, child in node.items()
    }
    for names in _TOGETHER:
        found = [w for name in names if isinstance(w := done.get(name), Tensor) and w.dim() == 2]  # of experts: 3
        if len(found) == len(names):
            for name in names:
                del done[name]
            done["+".join(names)] = Weight(make(torch.cat(found, 1)), tuple(w.shape[1] for w in found))
    return done


def _packed(w: Tensor) -> Times:
    """Keep a layout for one row, [in, out] where that is wide and [out, in] where it is not, and a blocked one."""
    if w.numel() < _SMALL:
        return partial(_times_plain, w.contiguous())
    turned = w.t().contiguous()
    one = w.contiguous() if w.shape[1] > w.shape[0] else turned.t()
    return partial(_times_packed, one, mkldnn._reorder_linear_weight(turned, 32))


def _times_plain(w: Tensor, x: Tensor) -> Tensor:
    return x @ w


def _times_packed(one: Tensor, blocked: Tensor, x: Tensor) -> Tensor:
    rows = x.flatten(0, -2)
    if len(rows) == 1:
        return x @ one
    rows = F.pad(rows, (0, 0, 0, _more(len(rows))))
    out = mkldnn._linear_pointwise.default(rows, blocked, None, "none", [], "")
    return out[: x.shape[:-1].numel()].view(*x.shape[:-1], one.shape[1])


def _more(rows: int) -> int:
    """Return how many rows of zeros to add, so that only a few numbers of rows ever come up.

    oneDNN compiles a kernel for each number and keeps a thousand of them, of more than half a megabyte each.
    """
    return -rows % (1 if rows <= 8 else 8 if rows <= 64 else 32)


def _int8(w: Tensor) -> Times:
    whole, scale = quantized(w)
    whole = whole.t().contiguous().t()  # columns lie together: each is one sum
    return partial(_times_int8, whole, scale / 127) if w.device.type == "cpu" else partial(_times_widened, whole, scale)


def _times_widened(whole: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    return (x @ whole.to(x.dtype)) * scale.to(x.dtype)


def _times_int8(whole: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    """Multiply bytes with bytes: a row of x is 127 parts of its largest number, and 127 parts of one of those.

    That is two rows of one product, which cost little more than one, and rounds less than bfloat16 would.
    """
    rows = x.flatten(0, -2)
    most = torch.linalg.vector_norm(rows, math.inf, -1, True)
    parts = (rows / most).mul_(127)
    first = parts.to(torch.int8)  # cuts off
    second = parts.sub_(first).mul_(127).to(torch.int8)
    both = torch.cat([first, second])
    sums = torch._int_mm(F.pad(both, (0, 0, 0, _more(len(both)))), whole)[: len(both)]
    coarse, fine = (sums.view(2, len(rows), len(scale)) * most).unbind()
    return coarse.add_(fine, alpha=1 / 127).mul_(scale).view(*x.shape[:-1], len(scale))
