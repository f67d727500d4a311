"""Draw small models, batches, optimizers and meshes."""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from hypothesis import strategies as st

from ironfn import tree
from ironfn.mesh.axis import SINGLE
from ironfn.model.arch import Arch, complete
from ironfn.model.families import PRESETS
from ironfn.model.init import init
from ironfn.model.tables import table
from ironfn.optim.adamw import adamw
from ironfn.optim.combine import partition
from ironfn.optim.muon import muon
from ironfn.optim.optimizer import Optimizer
from ironfn.spec.records import ModelSpec
from ironfn.types import Batch, Params


@st.composite
def archs(draw: st.DrawFn, tp: int = 1, **fixed: Any) -> Arch:
    """Draw a small decoder of any family whose heads and vocabulary ``tp`` ranks can share."""
    preset = draw(st.sampled_from(sorted(PRESETS)))
    kv_heads = tp * draw(st.sampled_from([1, 2]))
    heads = kv_heads * draw(st.sampled_from([1, 2]))
    fields: dict[str, Any] = {
        "layers": draw(st.integers(1, 2)),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": draw(st.sampled_from([2, 4])),
        "width": 8,
        "ffn": tp * draw(st.sampled_from([4, 6])),
        "context": 16,
        "tied": draw(st.booleans()),
        "pad_vocab_to": tp,
        "mlp": draw(st.sampled_from(["gelu", "gelu_tanh", "swiglu", "geglu"])),
        "mlp_bias": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "positions": draw(st.sampled_from(["rotary", "learned", "none"])),
        "init_std": 0.3,
    }
    return complete(ModelSpec(preset=preset, **(dict(PRESETS[preset]) | fields | fixed)), draw(st.integers(11, 17)))


def params_of(arch: Arch, seed: int = 0) -> Params:
    """Return random float64 parameters in which no bias is 0 and no scale is 1."""
    first = init(arch, seed, table(False), SINGLE, torch.float64)
    noise = torch.Generator().manual_seed(seed)
    return tree.map(lambda x: x + 0.1 * torch.randn(x.shape, generator=noise, dtype=x.dtype), first)


def batch_of(arch: Arch, rows: int, length: int, seed: int, documents: bool) -> Batch:
    """Return a random batch: documents of random lengths, padding at the end, some targets of weight 0."""
    g = torch.Generator().manual_seed(seed)
    batch = {
        "tokens": torch.randint(0, arch.vocab, (rows, length), generator=g),
        "targets": torch.randint(0, arch.vocab, (rows, length), generator=g),
        "weight": (torch.rand(rows, length, generator=g) < 0.8).double(),
        "row": torch.arange(rows) + 1000,
    }
    if documents:
        segment = (torch.rand(rows, length, generator=g) < 0.3).long().cumsum(1)
        padded = torch.arange(length) >= length - torch.randint(0, 3, (rows, 1), generator=g)
        segment = torch.where(padded, -1, segment - segment[:, :1])
        starts = torch.ones_like(segment, dtype=torch.bool)
        starts[:, 1:] = segment[:, 1:] != segment[:, :-1]
        places = torch.arange(length).expand(rows, -1)
        first = torch.where(starts, places, 0).cummax(1).values
        batch |= {"segment": segment, "position": places - first}
        batch["weight"] = torch.where(padded, 0.0, batch["weight"])
    return batch


@frozen
class Named:
    """Name an optimizer, so that a counter-example can be read."""

    name: str
    optimizer: Optimizer


def optimizers() -> st.SearchStrategy[str]:
    """Draw the name of an optimizer; `optimizer` makes it."""
    return st.sampled_from(["adamw", "muon"])


def optimizer(name: str) -> Optimizer:
    """Return the optimizer of that name over the model's tree."""
    # Some gradients are 0 but for rounding (a key's bias without positions: softmax does not see it). AdamW divides
    # them by their own size: with its usual eps of 1e-8 it would turn a difference of 1e-19 into one of 1e-11.
    plain = adamw(eps=1e-4, weight_decay=0.1)
    if name == "adamw":
        return plain
    groups = {"muon": muon(), "adamw": plain}
    return partition(groups, lambda path: "muon" if "/w" in path and "head" not in path else "adamw")
