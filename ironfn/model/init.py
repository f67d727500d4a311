"""Give every leaf its shape and its first value."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ironfn import rng, tree
from ironfn.layout.table import Table, placement, shard_leaf
from ironfn.mesh.axis import Mesh
from ironfn.model.arch import Arch
from ironfn.types import Params

Shapes = dict[str, tuple[int, ...]]


def shapes(arch: Arch) -> Shapes:
    """Return the shape of every leaf by path. Matrices are [in, out]; the embedding and the head are [rows, width]."""
    found: Shapes = {"embed/tokens": (arch.rows, arch.width)}
    if arch.positions == "learned":
        found["embed/positions"] = (arch.context, arch.width)
    if arch.embed_norm:
        found |= _norm(arch, "embed/norm")
    for layer in range(arch.layers):
        found |= {f"blocks/{layer}/{path}": shape for path, shape in _block(arch, layer).items()}
    found |= _norm(arch, "norm")
    if arch.score:
        return found | {"score/w": (arch.width, 1)}
    if not arch.tied:
        found["head/w"] = (arch.rows, arch.width)
    return found | ({"head/b": (arch.rows,)} if arch.head_bias else {})


def _block(arch: Arch, layer: int) -> Shapes:
    """List a block's leaves in the order of their use."""
    mlp = _experts(arch) if arch.has_experts(layer) else _mlp(arch)
    post1, post2 = (_norm(arch, f"post_norm{n}") if arch.post_norms else Shapes() for n in (1, 2))
    norm1, norm2 = (_norm(arch, f"norm{n}") if arch.pre_norms else Shapes() for n in (1, 2))
    norm2 = {} if arch.one_norm else norm2
    return norm1 | _attention(arch) | post1 | norm2 | mlp | post2


def _norm(arch: Arch, name: str) -> Shapes:
    return {f"{name}/scale": (arch.width,)} | ({f"{name}/bias": (arch.width,)} if arch.norm_bias else {})


def _attention(arch: Arch) -> Shapes:
    queries, keys = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    found: Shapes = {
        "attn/wq": (arch.width, queries),
        "attn/wk": (arch.width, keys),
        "attn/wv": (arch.width, keys),
        "attn/wo": (queries, arch.width),
    }
    if arch.attention_bias:
        found |= {"attn/bq": (queries,), "attn/bk": (keys,), "attn/bv": (keys,)}
    if arch.out_bias:
        found["attn/bo"] = (arch.width,)
    if arch.qk_norm != "none":
        one = arch.qk_norm == "head"
        found["attn/q_norm/scale"] = (arch.head_dim if one else queries,)
        found["attn/k_norm/scale"] = (arch.head_dim if one else keys,)
    return found


def _mlp(arch: Arch) -> Shapes:
    found = _feed_forward(arch, "mlp", arch.ffn)
    if arch.mlp_bias:
        found |= ({"mlp/b_gate": (arch.ffn,)} if arch.gated else {}) | {
            "mlp/b_up": (arch.ffn,),
            "mlp/b_down": (arch.width,),
        }
    return found


def _experts(arch: Arch) -> Shapes:
    moe = arch.moe
    assert moe is not None
    ffn = moe.ffn or arch.ffn
    found: Shapes = {"mlp/router/w": (arch.width, moe.experts)}
    found |= {p: (moe.experts, *shape) for p, shape in _feed_forward(arch, "mlp/experts", ffn).items()}
    if moe.shared_gate:
        found["mlp/shared_gate/w"] = (arch.width, 1)
    return found | (_feed_forward(arch, "mlp/shared", (moe.shared_ffn or ffn) * moe.shared) if moe.shared else {})


def _feed_forward(arch: Arch, name: str, ffn: int) -> Shapes:
    gate: Shapes = {f"{name}/w_gate": (arch.width, ffn)} if arch.gated else {}
    return gate | {f"{name}/w_up": (arch.width, ffn), f"{name}/w_down": (ffn, arch.width)}


def first_value(path: str, shape: tuple[int, ...], arch: Arch, seed: int) -> Tensor:
    """Draw one leaf in float32: scales 1 (0, where norms multiply by 1 + scale), biases 0, matrices N(0, init_std²).

    What a block adds to the residual stream (wo, w_down) is drawn with std / sqrt(2 layers)
    (Radford et al. 2019, section 2.3). The draw depends on the seed and the path alone.
    """
    name = path.rsplit("/", 1)[-1]
    if name == "scale":
        return torch.zeros(shape) if arch.norm_offset else torch.ones(shape)
    if name == "bias" or name.startswith("b_") or name in ("bq", "bk", "bv", "bo", "b"):
        return torch.zeros(shape)
    std = arch.init_std / math.sqrt(2 * arch.layers) if name in ("wo", "w_down") else arch.init_std
    return rng.normal(shape, std, seed, "init", path)


def init(arch: Arch, seed: int, table: Table, mesh: Mesh, dtype: torch.dtype = torch.float32) -> Params:
    """Return this rank's part of the first parameters: the same numbers on every mesh, one whole leaf at a time."""
    return tree.unflatten(
        {
            path: shard_leaf(first_value(path, shape, arch, seed), placement(table, path), mesh, path).to(dtype)
            for path, shape in shapes(arch).items()
        }
    )


def abstract(sizes: Shapes, dtype: torch.dtype = torch.float32) -> Params:
    """Return a tree of these shapes that holds no numbers (device ``meta``)."""
    return tree.unflatten({path: torch.empty(shape, dtype=dtype, device="meta") for path, shape in sizes.items()})
