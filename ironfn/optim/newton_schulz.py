"""Orthogonalise matrices by Newton-Schulz iteration (Jordan 2024, kellerjordan.github.io/posts/muon)."""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c of x <- a x + b x³ + c x⁵ on the singular values: chosen for its slope at 0 and not for converging to 1."""


def orthogonalize(x: Tensor, steps: int = 5, eps: float = 1e-7) -> Tensor:
    """Return U f(S) Vᵀ for every matrix U S Vᵀ of ``x`` [..., rows, columns], in the dtype of ``x``.

    f drives each singular value that is not tiny towards 1, into about 0.7 to 1.2 after 5 steps. A zero matrix stays 0.
    Only the products of the smaller side are formed.
    """
    a, b, c = COEFFICIENTS
    shape, tall = x.shape, x.shape[-2] > x.shape[-1]
    x = x.reshape(-1, *shape[-2:])
    x = x.mT if tall else x
    # The Frobenius norm is at least the largest singular value, and the iteration needs that to be at most 1.
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(shape)
