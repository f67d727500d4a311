"""Orthogonalise matrices by Newton-Schulz iteration (Jordan 2024, kellerjordan.github.io/posts/muon)."""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c of x <- a x + b x³ + c x⁵ on the singular values: chosen for its slope at 0 and not for converging to 1."""


def orthogonalize(x: Tensor, steps: int = 5, eps: float = 1e-7) -> Tensor:
    """Return U f(S) Vᵀ for every matrix U S Vᵀ of ``x`` [..., rows, columns], in the dtype of ``x``.

    f drives each singular value that is not tiny towards 1, into about 0.7 to 1.2 after 5 steps. A zero matrix stays 0.

    One step is x <- P x with P = a + b A + c A² and A = x xᵀ, over the smaller side. Where the other side is much
    longer, the products with x cost most, and two steps take two of them instead of four: x <- P' P x, where P' comes
    from A' = P A P. More steps without x would be cheaper still, and wrong (docs/decisions.md).
    """
    shape, tall = x.shape, x.shape[-2] > x.shape[-1]
    x = x.reshape(-1, *shape[-2:])
    x = x.mT if tall else x
    # The Frobenius norm is at least the largest singular value, and the iteration needs that to be at most 1.
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=eps)
    pairs = steps // 2 if x.shape[-1] >= 1.5 * x.shape[-2] else 0
    for _ in range(pairs):
        x = _two_steps(x)
    for _ in range(steps - 2 * pairs):
        x = _step(x)
    return (x.mT if tall else x).reshape(shape)


def operations(rows: int, columns: int, steps: int = 5) -> int:
    """Return about how many operations it takes to orthogonalise one matrix: what to balance ranks by.

    >>> operations(100, 100, 1)
    6000000
    """
    small, large = sorted((rows, columns))
    return steps * (4 * small * small * large + 2 * small**3)


def _step(x: Tensor) -> Tensor:
    return torch.baddbmm(x, _polynomial(_symmetric(x, x.mT)), x, beta=COEFFICIENTS[0])


def _two_steps(x: Tensor) -> Tensor:
    """Take two steps. The square matrices are polynomials of one: they commute, and their products are symmetric."""
    a = COEFFICIENTS[0]
    gram = _symmetric(x, x.mT)
    p = _polynomial(gram)  # without its a times the identity, which would cost it digits
    half = _symmetric(p, gram, gram, beta=a)
    next_p = _polynomial(_symmetric(p, half, half, beta=a))
    p.diagonal(dim1=-2, dim2=-1).add_(a)
    return torch.bmm(_symmetric(next_p, p, p, beta=a), x)


def _polynomial(gram: Tensor) -> Tensor:
    """Return b A + c A²."""
    _, b, c = COEFFICIENTS
    return _symmetric(gram, gram, gram, beta=b, alpha=c)


def _symmetric(p: Tensor, q: Tensor, plus: Tensor | None = None, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    """Return beta plus + alpha p q [batch, rows, rows], of which the caller knows that it is symmetric.

    On the CPU, where a product in float32 costs its operations, only the blocks up to the diagonal are computed: 5/8 of
    them with four strips. Bfloat16 products and GPUs gain nothing by it.
    """
    batch, rows, _ = p.shape
    strips = min(4, rows // _STRIP) if p.device.type == "cpu" and p.dtype.itemsize >= 4 else 1
    if strips < 2:
        return torch.bmm(p, q) if plus is None else torch.baddbmm(plus, p, q, beta=beta, alpha=alpha)
    out = p.new_empty(batch, rows, rows)
    for strip in range(strips):
        start, end = rows * strip // strips, rows * (strip + 1) // strips
        p_strip, q_upto = p[:, start:end], q[:, :, :end]
        if plus is None:
            out[:, start:end, :end] = torch.bmm(p_strip, q_upto)
        else:
            known = plus[:, start:end, :end]
            out[:, start:end, :end] = torch.baddbmm(known, p_strip, q_upto, beta=beta, alpha=alpha)
        out[:, :start, start:end] = out[:, start:end, :start].mT
    return out


_STRIP = 48
"""Rows that make a strip worth a product of its own."""
