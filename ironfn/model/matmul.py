"""Multiply activations by weights with the fastest kernel that gives the same number.

On x86, torch hands float32 products to MKL, whose code for AMD processors stays on AVX2; oneDNN's AVX-512 kernels
do the same work in about nine tenths of the time (docs/decisions.md). Everything else goes to `torch.matmul`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor  # pyright: ignore[reportMissingImports]

_WORTH_IT = 1 << 22  # multiplications below which the call costs more than the better kernel saves


def plain(x: Tensor) -> bool:
    """Tell whether ``x`` is a bare tensor that no transform of `torch.func` and no compiler looks at."""
    return not (torch.compiler.is_compiling() or is_functorch_wrapped_tensor(x))


def _suits_onednn(x: Tensor, w: Tensor) -> bool:
    return (
        x.dtype == w.dtype == torch.float32
        and x.device.type == w.device.type == "cpu"
        and x.numel() * w.shape[1] > _WORTH_IT
        and torch.backends.mkldnn.is_available()
        and plain(x)
        and plain(w)
    )


def product(x: Tensor, w: Tensor) -> Tensor:
    """Return x w for x [..., in] and w [in, out]. It has no derivative: call it inside an `autograd.Function`."""
    if _suits_onednn(x, w):
        out = torch.ops.mkldnn._linear_pointwise(x.flatten(0, -2), w.t(), None, "none", [], "")
        return torch.ops.aten._unsafe_view(out, [*x.shape[:-1], w.shape[1]])  # no view, so that one may add to it
    return x @ w


def weight_grad(x: Tensor, grad: Tensor, total: Tensor | None = None) -> Tensor:
    """Return the gradient of w in y = x w: xᵀ grad, summed over all leading dimensions, and added to ``total``.

    The better kernel would want a transposed copy of ``x`` first, which costs what it saves.
    """
    x, grad = x.flatten(0, -2).t(), grad.flatten(0, -2)
    return x @ grad if total is None else total.addmm_(x, grad)
