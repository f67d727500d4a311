"""Count a decoder's parameters and floating-point operations from its description alone."""

from __future__ import annotations

import math

from ironfn.model.arch import Arch
from ironfn.model.init import shapes


def parameters(arch: Arch) -> int:
    """Count the numbers of the model; a tied table counts once."""
    return sum(math.prod(shape) for shape in shapes(arch).values())


def matmul_parameters(arch: Arch) -> int:
    """Count the numbers that every token is multiplied by: the matrices of the blocks and the head.

    Of a mixture's experts only as many count as a token chooses. The input embedding is looked up, not multiplied;
    norms and biases are no matrices.
    """
    active = arch.width if arch.score else arch.rows * arch.width
    for path, shape in shapes(arch).items():
        if "/experts/" in path:
            assert arch.moe is not None
            active += arch.moe.top_k * math.prod(shape[1:])
        elif path.startswith("blocks/") and len(shape) == 2:
            active += math.prod(shape)
    return active


def flops_per_token(arch: Arch, length: int) -> float:
    """Return the operations of forward and backward for one token in a row of ``length``.

    6 N + 12 layers heads head_dim length (Chowdhery et al. 2022, arXiv 2204.02311, appendix B): each matrix is used
    three times, at 2 operations a number, and so are the two products of attention, whose causal half is not deducted.
    A layer with a window counts no more than it.
    """
    seen = sum(min(length, arch.window(layer) or length) for layer in range(arch.layers))
    attention = 12 * arch.heads * arch.head_dim * seen
    return 6.0 * matmul_parameters(arch) + attention
