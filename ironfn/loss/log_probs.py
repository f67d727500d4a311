"""Score the tokens and the texts that a batch asks for."""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from ironfn.loss.scores import token_log_probs, token_scores
from ironfn.mesh.axis import Mesh
from ironfn.mesh.pairs import enter
from ironfn.model.arch import Arch
from ironfn.model.forward import Forward
from ironfn.model.moe import Seen
from ironfn.model.transformer import head_bias, head_weight, hidden
from ironfn.types import Batch, Params


@frozen(eq=False)
class Places:
    """Say which places of a batch are asked for, and of which text: text after text.

    at: int64 [N], among the flattened places. targets: int64 [N]. sizes: of each text, how many of them are its own.
    keys: int64 [texts], each text's row times the length of a row, and its segment.
    """

    at: Tensor
    targets: Tensor
    sizes: tuple[int, ...]
    keys: Tensor

    def sums(self, values: Tensor) -> Tensor:
        """Add up values [N] of the places to [texts], in float32 or better: in one order, on any device."""
        high = values.to(torch.promote_types(values.dtype, torch.float32))
        return torch.stack([part.sum() for part in high.split(self.sizes)]) if self.sizes else high

    def of(self, name: str, batch: Batch) -> Tensor:
        """Return [N], what a field of the batch says of the places."""
        return batch[name].flatten()[self.at]


def asked_places(batch: Batch) -> Places:
    """Find the places with a weight, and number the texts that have any: row after row, in their order.

    A place belongs to the text of its ``segment``: what is asked for belongs to one text alone.
    """
    at = batch["weight"].flatten().nonzero()[:, 0]
    length = batch["weight"].shape[1]
    here = at.to(batch["segment"].device)
    keys, sizes = torch.unique_consecutive(
        here // length * length + batch["segment"].flatten()[here], return_counts=True
    )
    assert len(keys) == len(keys.unique()), "what a text is asked for stands together"
    return Places(at, batch["targets"].flatten()[at], tuple(sizes.tolist()), keys)


def place_log_probs(
    params: Params,
    batch: Batch,
    arch: Arch,
    mesh: Mesh,
    how: Forward,
    places: Places,
    chunk: int | None = None,
) -> tuple[Tensor, Seen]:
    """Return the log-probabilities [N] of what the places ask for, in nats, and what the experts tell.

    The head runs at these places only, at the batch's ``temperature`` where it has one. chunk: as `cross_entropy`.
    """
    x, head, seen = _at_head(params, batch, arch, mesh, how, places)
    return token_log_probs(x, targets=places.targets, chunk=chunk, **head), seen


def place_scores(
    params: Params,
    batch: Batch,
    arch: Arch,
    mesh: Mesh,
    how: Forward,
    places: Places,
    chunk: int | None = None,
    *,
    learned: bool,
) -> tuple[tuple[Tensor, Tensor], Seen]:
    """Return, as `place_log_probs`, the log-probabilities with the entropies [N] of the choices, and what experts tell.

    learned: whether the entropies have a gradient.
    """
    x, head, seen = _at_head(params, batch, arch, mesh, how, places)
    return token_scores(x, targets=places.targets, chunk=chunk, learned=learned, **head), seen


def _at_head(
    params: Params, batch: Batch, arch: Arch, mesh: Mesh, how: Forward, places: Places
) -> tuple[Tensor, dict[str, Any], Seen]:
    """Return the hidden states [N, D] of the places, the head that reads them, and what the experts tell."""
    x, seen = hidden(params, batch, arch, mesh, how)
    warmth = places.of("temperature", batch) if "temperature" in batch else None
    head = {"temperature": warmth, "w": head_weight(params, arch, how), "bias": head_bias(params, arch, how)}
    rows = enter(x, mesh).flatten(0, 1).index_select(0, places.at)
    return rows, {"axis": mesh.tp, "vocab": arch.vocab, "softcap": arch.logit_softcap, **head}, seen
