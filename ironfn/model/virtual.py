"""Put trained vectors before every text: embeddings (prompt tuning), or keys and values of every block (prefix tuning).

The rows of a batch get ``tokens`` places before each text, of position 0, 1, … (`with_virtual`); what stands there is
the same for all texts: of ``embed/prompt`` [tokens, width] instead of an embedding (Lester et al. 2021, arXiv
2104.08691), or of ``blocks/0/attn/prefix_k`` and ``prefix_v`` [tokens, kv_heads head_dim] instead of a key, which is
not turned, and a value (Li & Liang 2021, arXiv 2101.00190). So packing, masks, windows and meshes are as ever.
"""

from __future__ import annotations

from functools import partial

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional as F

from ironfn import rng
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.model.arch import Arch
from ironfn.model.forward import share
from ironfn.model.init import Shapes
from ironfn.model.weights import Weight
from ironfn.spec.adapter_records import AdapterSpec
from ironfn.tree import leaf
from ironfn.types import Batch, Params

PROMPT, KEYS, VALUES = "prompt", "prefix_k", "prefix_v"


def virtual_shapes(spec: AdapterSpec, arch: Arch) -> Shapes:
    """Return the shape of every trained leaf of a prompt or a prefix, by path."""
    if spec.kind == "prompt":
        return {f"embed/{PROMPT}": (spec.tokens, arch.width)}
    each = (spec.tokens, arch.kv_heads * arch.head_dim)
    return {f"blocks/{layer}/attn/{name}": each for layer in range(arch.layers) for name in (KEYS, VALUES)}


def first_virtual(path: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Draw a leaf from N(0, 1), as `peft` does."""
    return rng.normal(shape, 1.0, seed, "adapter", path)


def with_virtual(batch: Batch, tokens: int, multiple: int = 1) -> Batch:
    """Return the batch with places for ``tokens`` vectors before each text: nothing is learned there.

    Rows grow by that for each of their texts, then all to the longest, rounded up to a ``multiple``. ValueError for a
    batch that says which experts its tokens choose.
    """
    if "experts" in batch:
        raise ValueError("a batch with given experts has none for the vectors before its texts; leave them out")
    old = batch["tokens"]
    rows, length = old.shape
    segment = batch.get("segment", torch.zeros_like(old)).to(old.device)
    places = torch.arange(length, device=old.device).expand_as(old)
    starts = F.pad(segment[:, 1:] != segment[:, :-1], (1, 0), value=True) & (segment >= 0)
    moved = places + tokens * starts.cumsum(1)
    longest = int(moved[:, -1].max()) + 1 if rows else length
    longest += -longest % multiple
    row = torch.arange(rows, device=old.device)[:, None].expand_as(old)

    def spread(x: Tensor, rest: int) -> Tensor:
        return torch.full((rows, longest), rest, dtype=x.dtype, device=x.device).index_put((row, moved), x)

    done = {name: spread(batch[name], 0) for name in ("tokens", "targets", "weight") if name in batch}
    place = torch.where(segment >= 0, batch.get("position", places) + tokens, 0)
    done["position"], done["segment"] = spread(place, 0), spread(segment, -1)
    if "lengths" in batch:
        done["lengths"] = spread(batch["lengths"] + tokens, 0)
    # the places themselves lie just before where each text now begins
    at, first = starts.nonzero().unbind(1)
    before = torch.arange(tokens, device=old.device)
    index = at[:, None].expand(-1, tokens), (moved[at, first] - tokens)[:, None] + before
    for name in ("segment", "lengths"):
        if name in done:
            done[name][index] = done[name][at, moved[at, first]][:, None].expand(-1, tokens)
    done["position"][index] = before.expand(len(at), -1)
    return {name: x for name, x in batch.items() if name not in done} | done


@frozen(eq=False)
class Virtual:
    """Put what was trained where the places are: `Forward.adapt` of a model with a prompt or a prefix."""

    mesh: Mesh = SINGLE

    def __call__(self, params: Params, prefix: str, batch: Batch) -> Params:
        """Return the leaves, those before the texts as ones that are called: (x of all positions) -> x with them."""
        done: Params = {}
        for name, node in params.items():
            if isinstance(node, dict):
                done[name] = self(node, f"{prefix}{name}/", batch)
            elif name in (PROMPT, KEYS, VALUES):
                place = batch["position"].to(node.device)
                done[name] = Weight(partial(_put, leaf(params, name), place, self.mesh), (node.shape[1],))  # pyright: ignore[reportArgumentType]
            else:
                done[name] = node
        return done


def _put(table: Tensor, place_BT: Tensor, mesh: Mesh, x: Tensor) -> Tensor:
    """Return x [B, T, ...] with row p of the table where the position is p; x has all positions, or a rank's share."""
    if x.shape[1] != place_BT.shape[1]:
        place_BT = share(place_BT, mesh)
    chosen = F.embedding(place_BT.clamp(max=len(table) - 1), table).view_as(x)
    return torch.where((place_BT < len(table)).view(*place_BT.shape, *(1,) * (x.dim() - 2)), chosen, x)
