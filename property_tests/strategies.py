"""Draw small models, batches, optimizers and meshes."""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve, frozen
from hypothesis import strategies as st

from ironfn import tree
from ironfn.mesh.axis import SINGLE
from ironfn.model.arch import Arch, complete
from ironfn.model.families import PRESETS, model_spec
from ironfn.model.init import init
from ironfn.model.tables import table
from ironfn.optim.adamw import adamw
from ironfn.optim.combine import partition
from ironfn.optim.muon import muon
from ironfn.optim.optimizer import Optimizer
from ironfn.spec.records import ModelSpec, MoeSpec, RopeSpec
from ironfn.types import Batch, Params

DENSE = MoeSpec()
FACTORS = ("short_factor", "long_factor")


@st.composite
def families(draw: st.DrawFn, tp: int, moe: MoeSpec = DENSE) -> ModelSpec:
    """Draw a small decoder whose heads, feed-forward and vocabulary ``tp`` ranks can share.

    It is of a family as it stands, or of any mixture of what families differ in.
    """
    preset = draw(st.sampled_from(["llama", *sorted(PRESETS.keys() - {"llama"})]))
    kv_heads, head_dim = tp * draw(st.sampled_from([1, 2])), draw(st.sampled_from([2, 4]))
    chosen: dict[str, Any] = {
        "layers": draw(st.integers(max(moe.dense_layers, moe.every - 1) + 1, max(2, moe.every))),
        "heads": kv_heads * draw(st.sampled_from([1, 2, 3])),
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "width": 8,
        "ffn": tp * draw(st.sampled_from([4, 6])),
        "context": 16,
        "tied": draw(st.booleans()),
        "pad_vocab_to": tp,
        "init_std": 0.3,
        "moe": moe,
    }
    family = model_spec(preset, **chosen)
    near = {"windows": [3, 0]} if family.windows else {}
    caps = {n: 2.0 for n in ("attention_softcap", "logit_softcap") if getattr(family, n) is not None}
    family = evolve(family, rope_fraction=1.0 if head_dim == 2 else max(0.5, family.rope_fraction), **near, **caps)
    family = evolve(family, mlp_bias=family.mlp_bias and moe.experts == 0)
    if family.rope.kind != "none":
        family = evolve(family, rope=evolve(family.rope, original_context=6))
    return draw(quirks(family)) if draw(st.booleans()) else family


@st.composite
def quirks(draw: st.DrawFn, family: ModelSpec) -> ModelSpec:
    """Draw a mixture of what families differ in."""
    flag = st.booleans()
    positions = draw(st.sampled_from(["rotary", "learned", "alibi", "none"]))
    turned = family.head_dim or 0
    changed = evolve(
        family,
        mlp=draw(st.sampled_from(["swiglu", "geglu", "gelu", "gelu_tanh"])),
        mlp_bias=family.moe.experts == 0 and draw(flag),
        attention_bias=draw(flag),
        attention_out_bias=draw(st.sampled_from([None, True, False])),
        attention_scale=draw(st.sampled_from([None, 0.3])),
        attention_clip=draw(st.sampled_from([None, 1.5])),
        attention_softcap=draw(st.sampled_from([None, 2.0])) if positions != "alibi" else None,
        logit_softcap=draw(st.sampled_from([None, 2.0])),
        positions=positions,
        # a window of 1 leaves queries a gradient of rounding alone, which Muon would make as large as any
        windows=draw(st.sampled_from([[], [3], [0, 2], [4, 2]])),
        qk_norm=draw(st.sampled_from(["none", "head", "width"])),
        norm_offset=family.norm == "rms" and draw(flag),
        parallel=draw(flag),
        embed_scale=draw(flag),
        embed_norm=draw(flag),
        head_bias=draw(flag),
        rope=RopeSpec(),
        rope_fraction=1.0,
        rope_local_theta=None,
    )
    changed = evolve(changed, post_norms=not changed.parallel and draw(flag))
    changed = evolve(
        changed,
        pre_norms=not changed.post_norms or draw(flag),
        parallel_norms=changed.parallel and draw(flag),
    )
    if positions != "rotary":
        return changed
    kinds = ["none", "linear", "llama3", "yarn", "longrope", *(["dynamic"] if turned > 2 else [])]
    pairs = {
        n: draw(st.lists(st.sampled_from([1.0, 3.0]), min_size=turned // 2, max_size=turned // 2)) for n in FACTORS
    }
    rope = RopeSpec(kind=draw(st.sampled_from(kinds)), factor=4.0, original_context=6, **pairs)
    local = draw(st.sampled_from([None, 100.0])) if any(changed.windows) else None
    half = turned > 2 and rope.kind in ("none", "linear", "llama3", "yarn") and draw(flag)
    return evolve(changed, rope=rope, rope_local_theta=local, rope_fraction=0.5 if half else 1.0)


@st.composite
def archs(draw: st.DrawFn, tp: int = 1, moe: MoeSpec = DENSE) -> Arch:
    """Draw the architecture of a small decoder."""
    return complete(draw(families(tp, moe)), draw(st.integers(11, 17)))


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
