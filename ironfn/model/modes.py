"""Ask which of torch's modes is at work, and call fused functions as it wants."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad


def forward_ad_is_on() -> bool:
    """Tell whether somebody may ask for forward derivatives: only then is anything kept for them."""
    return forward_ad._current_level >= 0


def underived() -> bool:
    """Tell whether nobody asks for a derivative of what is computed now."""
    return not (torch.is_grad_enabled() or forward_ad_is_on() or torch._C._are_functorch_transforms_active())


def call(function: Any, *arguments: Any) -> Any:
    """Apply a function, or only its plain form where nobody asks for a derivative: `apply` costs as much as a product.

    A compiler cannot look into a function that has a ``jvp``: it is given the plain form, too.
    """
    return (function.forward if underived() or torch.compiler.is_compiling() else function.apply)(*arguments)
