"""Clip gradients by their global norm."""

from __future__ import annotations

import torch
from torch import Tensor

from ironfn import tree
from ironfn.types import Params


def clip_by_global_norm(grads: Params, max_norm: float) -> tuple[Params, Tensor]:
    """Scale the gradients so that their global 2-norm is at most ``max_norm``; return them and the norm before.

    Works in the gradients' buffers. Clip once a step, on the summed gradient. A norm that is not finite makes the
    gradients NaN: look at it before they are used. ValueError unless ``max_norm`` is above 0.
    """
    norm = tree.norm(grads)
    return scale_to_norm(grads, norm, max_norm), norm


def scale_to_norm(grads: Params, norm: Tensor, max_norm: float) -> Params:
    """Scale gradients whose global norm is ``norm``, a 0-d tensor, down to ``max_norm``; see `clip_by_global_norm`.

    The factor is exactly min(1, max_norm / norm), where torch's `clip_grad_norm_` divides by norm + 1e-6. A mesh adds
    the squares over its axes and passes the norm of the whole.
    """
    factor = clip_factor(float(norm), max_norm)
    if factor != 1.0:
        torch._foreach_mul_(tree.leaves(grads), factor)
    return grads


def clip_factor(norm: float, max_norm: float) -> float:
    """Return what gradients of global norm ``norm`` are multiplied by: min(1, max_norm / norm), NaN for a NaN.

    ValueError unless ``max_norm`` is above 0.
    """
    if not max_norm > 0.0:
        raise ValueError(f"the norm to clip to is {max_norm}; it must be above 0 (no clipping is null)")
    return max_norm / norm if not norm <= max_norm else 1.0
