"""Score a model on held-out batches: sums over all of them, divided once."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from attrs import field, frozen
from torch import Tensor

from ironfn.mesh.axis import Mesh, sum_over_rows
from ironfn.types import Batch, Loss, Params


@frozen
class Evaluation:
    """Hold the scores of a set.

    loss: nats a target. perplexity: exp(loss), inf where a float cannot hold it. bits_per_byte: total nats over
    ln 2 over ``bytes``; NaN where no target stands for a byte. tokens: targets scored. bytes: their length as text.
    metrics: the means of the loss's own metrics, over the same weight.
    """

    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int
    bytes: int
    metrics: dict[str, float] = field(factory=dict[str, float])


def evaluate(loss: Loss, params: Params, batches: Iterable[Batch], mesh: Mesh, byte_lengths: Tensor) -> Evaluation:
    """Score ``params`` on ``batches``, each rank on its own rows, and return the scores of all, the same on every rank.

    The ranks compute together, so all of them give equally many batches (`data.dataset.eval_batches`).

    byte_lengths: int64 [vocabulary], the bytes that each id stands for; 0 for special ids. Targets of weight 0 are
    neither scored nor counted. Weights other than 0 and 1 scale the nats but not the bytes.
    ValueError where no target has a weight.
    """
    sums: dict[str, Tensor] = {}
    with torch.no_grad():
        for batch in batches:
            _add(sums, _parts(loss, params, batch, mesh, byte_lengths))
    totals = _over_ranks(sums, mesh)
    weight = totals.pop("weight", 0.0)
    if weight == 0.0:
        raise ValueError("the evaluation set has no target of weight above 0; prepare a longer one or score more rows")
    total, tokens, size = totals.pop("total"), round(totals.pop("tokens")), round(totals.pop("bytes"))
    return Evaluation(
        loss=total / weight,
        perplexity=perplexity(total / weight),
        bits_per_byte=bits_per_byte(total, size),
        tokens=tokens,
        bytes=size,
        metrics={name.removeprefix("metric "): value / weight for name, value in totals.items()},
    )


def perplexity(loss: float) -> float:
    """Return exp(loss), inf where that is more than a float holds.

    >>> perplexity(1.5), perplexity(800.0)
    (4.4816890703380645, inf)
    """
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def bits_per_byte(nats: float, size: float) -> float:
    """Return the bits of ``nats`` for each of ``size`` bytes; NaN for no bytes."""
    return nats / math.log(2.0) / size if size else math.nan


def target_bytes(batch: Batch, byte_lengths: Tensor) -> Tensor:
    """Count the bytes of the targets whose weight is above 0: a 0-d int64 tensor.

    Targets of weight 0 may hold any number, so they never index the table.
    """
    scored = batch["targets"][batch["weight"] > 0]
    return byte_lengths.to(scored.device)[scored].sum()


def _parts(loss: Loss, params: Params, batch: Batch, mesh: Mesh, byte_lengths: Tensor) -> dict[str, Tensor]:
    part = loss(params, batch, mesh)
    return {
        "total": part.total,
        "weight": part.weight,
        "tokens": (batch["weight"] > 0).sum(),
        "bytes": target_bytes(batch, byte_lengths),
        **{f"metric {name}": value for name, value in part.metrics.items()},
    }


def _add(sums: dict[str, Tensor], parts: dict[str, Tensor]) -> None:
    """Add in float64: a set of many batches must not lose the small ones. Nothing waits for the device here."""
    for name, value in parts.items():
        value = value.detach().double()
        sums[name] = sums[name] + value if name in sums else value


def _over_ranks(sums: dict[str, Tensor], mesh: Mesh) -> dict[str, float]:
    """Return the sums over the ranks that hold other rows, in one exchange."""
    if not sums:
        return {}
    totals = sum_over_rows(torch.stack(list(sums.values())), mesh)
    return dict(zip(sums, totals.tolist(), strict=True))
