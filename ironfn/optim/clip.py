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
    if not max_norm > 0.0:
        raise ValueError(f"the norm to clip to is {max_norm}; it must be above 0 (no clipping is null)")
    factor = (max_norm / norm).clamp(max=1.0)
    if factor.device.type != "cpu" or factor != 1.0:  # on a GPU, asking costs more than a multiplication by 1
        torch._foreach_mul_(tree.leaves(grads), factor)
    return grads


def all_finite(grads: Params) -> Tensor:
    """Tell, as a 0-d bool tensor, whether no gradient holds an infinity or a NaN.

    Exact where the norm is not: squares of finite numbers above 1.8e19 overflow float32.
    """
    # The infinity norm passes a NaN on, and needs no tensor of the leaf's size.
    return torch.stack([torch.linalg.vector_norm(g, float("inf")).isfinite() for g in tree.leaves(grads)]).all()
