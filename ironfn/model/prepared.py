"""Prepare matrices for products alone, as `skinny` wants them, plain or in 8 bits. There is no derivative of these."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from ironfn.model import skinny
from ironfn.model.arch import Arch
from ironfn.model.norms import fixed_rms_norm
from ironfn.model.weights import Times, Weight
from ironfn.tree import branch, leaf
from ironfn.types import Params

_TOGETHER = (("wq", "wk", "wv"), ("w_gate", "w_up"), ("wo",), ("w_up",), ("w_down",))
"""The leaves of a block that become one matrix: their products are of the same rows."""
_BIASES = ("bq", "bk", "bv")


def packed(params: Params, arch: Arch, make: Callable[[Tensor], Times] = skinny.float32) -> tuple[Params, Arch]:
    """Return the model with its matrices laid out for decoding, as suits each number of rows.

    Float32 on a CPU that has fbgemm and oneDNN; anything else is returned as it is. Large matrices are kept twice, for
    one row and for more, or once where ``make`` is `skinny.blocked`; a tied head becomes a leaf of its own. Experts
    stay as they are.
    """
    table = leaf(branch(params, "embed"), "tokens")
    suits = table.dtype == torch.float32 and skinny.suits(table)
    return _prepared(params, arch, make) if suits else (params, arch)


def int8(params: Params, arch: Arch) -> tuple[Params, Arch]:
    """Return the model with its matrices in 8 bits, one scale an output column (`quantization_error` says how near).

    Embeddings, norms, biases, routers and experts stay as they are, and so do the activations of up to two rows. Of
    those of more, 13 bits are taken: no other row changes what a row becomes, only how many they are does, by 1e-4.
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
    done = _with_norms(_with_weights(params, make), arch)
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
    biases = [done.pop(name) for name in _BIASES if name in done and "wq+wk+wv" in done]
    return done | ({"+".join(_BIASES): torch.cat(biases)} if biases else {})


def _with_norms(node: Params, arch: Arch) -> Params:
    """Return the tree with the norms of the residual stream ready to be called."""
    done: Params = {}
    for name, child in node.items():
        if not isinstance(child, dict):
            done[name] = child
        elif "scale" in child and arch.norm == "rms" and name not in ("q_norm", "k_norm"):
            scale = leaf(child, "scale")
            norm = fixed_rms_norm(scale + 1 if arch.norm_offset else scale, arch.norm_eps)
            done[name] = {"scale": Weight(norm, (len(scale),))}  # pyright: ignore[reportArgumentType]
        else:
            done[name] = _with_norms(child, arch)
    return done


def _int8(w: Tensor) -> Times:
    whole, scale = quantized(w)
    return skinny.bytes_of(whole, scale) if skinny.suits(w) else partial(_times_widened, whole, scale)


def _times_widened(whole: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    return (x @ whole.to(x.dtype)) * scale.to(x.dtype)
