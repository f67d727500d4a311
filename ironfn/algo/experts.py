"""Watch the experts' loads from step to step, and even them out by DeepSeek's bias."""

from __future__ import annotations

import torch
from torch import Tensor

from ironfn import tree
from ironfn.algo.step import Carry, Metrics
from ironfn.model.arch import Arch
from ironfn.types import Params


def router_bias(arch: Arch) -> Params:
    """Return the biases on the choice before the first step, for ``State.extra["fixed"]``: zeros, float32 [experts].

    {} where the model has no experts or ``model.moe.bias_rate`` is 0.
    """
    moe = arch.moe
    if moe is None or moe.bias_rate == 0.0:
        return {}
    layers = arch.expert_layers
    return tree.unflatten({f"blocks/{layer}/mlp/router/bias": torch.zeros(moe.experts) for layer in layers})


def watch_experts(arch: Arch) -> Carry:
    """Return the ``carry`` of `make_step` for a model with experts: metrics of the loads, and the biases after a step.

    With the biases of `router_bias` in ``extra["fixed"]``, each expert's moves by bias_rate, up where its load over the
    whole batch is below the mean and down where it is above (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    Metrics, in multiples of the fair share, tokens times top_k over experts: ``load/<block>/<expert>``; ``load_max``
    and ``load_min``, of the most and least loaded expert of a block, as means over the blocks. ``dropped`` is the share
    of the choices that found their expert full. ValueError for a model without experts.
    """
    moe = arch.moe
    if moe is None:
        raise ValueError("the model has no experts to watch; leave the step's carry out")

    def carry(extra: Params, counts: dict[str, Tensor]) -> tuple[Params, Metrics]:
        load = counts["load"].double()
        fair = load.mean(1, keepdim=True).clamp(min=1e-30)
        relative = (load / fair).cpu()
        metrics: Metrics = {
            "load_max": float(relative.amax(1).mean()),
            "load_min": float(relative.amin(1).mean()),
            "dropped": float(counts["dropped"].sum()) / max(float(load.sum()), 1.0),
        }
        for layer, row in zip(arch.expert_layers, relative.tolist(), strict=True):
            metrics |= {f"load/{layer}/{expert}": value for expert, value in enumerate(row)}
        if "fixed" not in extra:
            return extra, metrics
        change = moe.bias_rate * (load.mean(1, keepdim=True) - load).sign()
        moved = {
            path: bias + change[arch.expert_layers.index(int(path.split("/")[1]))].to(bias)
            for path, bias in tree.flatten(tree.branch(extra, "fixed")).items()
            if path.endswith("/router/bias")
        }
        return extra | {"fixed": tree.unflatten(tree.flatten(tree.branch(extra, "fixed")) | moved)}, metrics

    return carry
