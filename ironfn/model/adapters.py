"""Train a few numbers beside a frozen model: which leaves there are, their first values, and how a block reads them.

A matrix ``blocks/0/attn/wq`` stays; its adapter is ``blocks/0/attn/wq_lora/a`` [in, r], ``…/b`` [r, out] and, in DoRA,
``…/m`` [out]. A table ``embed/tokens`` or ``head/w`` is [rows, width], and so is the product of its a and b. Experts'
matrices have one a and b each. A tied head has an adapter of its own, which the embedding does not see.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.nn import functional as F

from ironfn import rng, tree
from ironfn.layout.table import WHOLE_TABLE, Table, placement, shard_leaf, unshard_leaf
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.model import nf4
from ironfn.model.arch import Arch
from ironfn.model.init import Shapes, shapes
from ironfn.model.lowrank import Held, dense, fixed, low_rank
from ironfn.model.norms import Normed
from ironfn.model.virtual import KEYS, PROMPT, VALUES, Virtual, first_virtual, virtual_shapes
from ironfn.model.weights import Weight
from ironfn.spec.adapter_records import AdapterSpec
from ironfn.types import Batch, Params

EMBEDDING, HEAD, SUFFIX = "embed/tokens", "head/w", "_lora"
ALL_LINEAR = "all-linear"
_IN_BLOCK = re.compile(r"blocks/\d+/(attn/w[qkvo]|mlp/(shared/)?w_(gate|up|down))")
_LINEAR = re.compile(rf"{_IN_BLOCK.pattern}|blocks/\d+/mlp/shared_gate/w")
_MATRIX = re.compile(rf"{_LINEAR.pattern}|blocks/\d+/mlp/experts/w_(gate|up|down)|{EMBEDDING}|{HEAD}")

Adapt: TypeAlias = "Callable[[Params, str, Batch], Params]"
"""(leaves as they were fetched, the path before theirs, the batch) -> the leaves as the forward pass calls them."""


def matrices(arch: Arch) -> Shapes:
    """Return the shapes of the matrices that may have an adapter; the head is one of them where it is tied, too."""
    return {p: s for p, s in (shapes(arch) | {HEAD: (arch.rows, arch.width)}).items() if _MATRIX.fullmatch(p)}


def targets(spec: AdapterSpec, arch: Arch) -> Shapes:
    """Return the shapes of the matrices that get an adapter. ValueError for a pattern that names none."""
    found: set[str] = set()
    may = matrices(arch)
    for pattern in spec.targets:
        named = {p for p in may if (_LINEAR.fullmatch(p) if pattern == ALL_LINEAR else re.search(pattern, p))}
        if not named:
            near = "blocks/0/attn/wq, blocks/0/mlp/w_up, embed/tokens, head/w"
            raise ValueError(f"adapter.targets: {pattern!r} names no matrix of this model; write {near} … as regexes")
        found |= named
    for path in found:
        special = path in (EMBEDDING, HEAD) or "/experts/" in path
        if spec.dora and special and path != HEAD:
            raise ValueError(f"adapter.dora: {path} cannot have a length a column; leave it out of adapter.targets")
        if spec.dropout and special:
            raise ValueError(f"adapter.dropout: {path} takes none; leave it out of adapter.targets, or dropout at 0")
    return {path: shape for path, shape in may.items() if path in found}


def adapter_shapes(spec: AdapterSpec, arch: Arch) -> Shapes:
    """Return the shape of every trained leaf, by path: of a prompt or a prefix, too. ValueError as `targets`."""
    if spec.kind != "lora":
        return virtual_shapes(spec, arch)
    found: Shapes = {}
    for path, (*stack, rows, columns) in targets(spec, arch).items():
        found[f"{path}{SUFFIX}/a"] = (*stack, rows, spec.rank)
        found[f"{path}{SUFFIX}/b"] = (*stack, spec.rank, columns)
        if spec.dora:
            found[f"{path}{SUFFIX}/m"] = (rows if path == HEAD else columns,)
    return found


def is_adapter(path: str) -> bool:
    """Tell whether a leaf is trained beside a model and is none of the model's own.

    >>> is_adapter("blocks/0/attn/wq_lora/a"), is_adapter("blocks/0/attn/wq_nf4/codes"), is_adapter("embed/prompt")
    (True, False, True)
    """
    *above, name = path.split("/")
    return name in (PROMPT, KEYS, VALUES) or any(part.endswith(SUFFIX) for part in above)


def first_adapter(
    spec: AdapterSpec,
    arch: Arch,
    base: Params,
    seed: int,
    layout: Table,
    mesh: Mesh = SINGLE,
    dtype: torch.dtype = torch.float32,
) -> Params:
    """Return this rank's part of an adapter: the same numbers on every mesh. LoRA's changes nothing yet.

    What reads is drawn as `peft` draws it, evenly from ±1/sqrt(inputs) (for an embedding, which has no inputs, what
    writes, from N(0, 1)); the other factor is 0. m: the lengths of the columns of ``base``, the frozen leaves, of which
    this rank has its part by ``layout``. Every rank calls this together.
    """
    drawn: Params = {}
    for path, shape in adapter_shapes(spec, arch).items():
        if spec.kind != "lora":
            value = first_virtual(path, shape, seed)
        elif path.endswith("/m"):
            matrix = path.removesuffix(f"{SUFFIX}/m")
            w = _whole(base, matrix, layout, mesh)
            value = _length(w, 1 if matrix == HEAD else 0)
        else:
            value = _drawn(path, shape, seed)
        drawn[path] = shard_leaf(value, placement(layout, path), mesh, path).to(dtype)
    return tree.unflatten(drawn)


def frozen_base(spec: AdapterSpec, params: Params, layout: Table, mesh: Mesh = SINGLE) -> Params:
    """Return this rank's part of a model as it is frozen: in NF4 what the spec says.

    Experts and routers stay as they are, as with bitsandbytes. Every rank calls this together. ValueError for matrices
    that NF4 does not take.
    """
    if spec.base == "none":
        return params
    return nf4.quantize(params, partial(_in_4_bits, spec), layout, mesh)


def frozen_paths(spec: AdapterSpec, arch: Arch) -> list[str]:
    """Return the path of every leaf of `frozen_base`, and of the model that it is made of."""
    small = [path for path in shapes(arch) if _in_4_bits(spec, path)]
    return [*shapes(arch), *(f"{path}{nf4.SUFFIX}/{name}" for path in small for name in nf4.NAMES)]


def _in_4_bits(spec: AdapterSpec, path: str) -> bool:
    return {
        "none": False,
        "nf4": bool(_IN_BLOCK.fullmatch(path)),
        "nf4_all": bool(_IN_BLOCK.fullmatch(path)) or path in (EMBEDDING, HEAD),
    }[spec.base]


def _drawn(path: str, shape: tuple[int, ...], seed: int) -> Tensor:
    if path == f"{EMBEDDING}{SUFFIX}/b":
        return rng.normal(shape, 1.0, seed, "adapter", path)
    if path.endswith("/b" if path.startswith(HEAD) else "/a") and not path.startswith(EMBEDDING):
        bound = (shape[-1] if path.startswith(HEAD) else shape[-2]) ** -0.5
        return torch.empty(shape).uniform_(-bound, bound, generator=rng.generator(seed, "adapter", path))
    return torch.zeros(shape)


def _whole(base: Params, path: str, layout: Table, mesh: Mesh) -> Tensor:
    """Return a frozen matrix whole, in the form of the tree: a table [rows, width], else [in, out]."""
    flat = tree.flatten(base)
    if path == HEAD and not any(p.startswith(HEAD) for p in flat):
        path = EMBEDDING
    if path in flat:
        return unshard_leaf(flat[path], placement(layout, path), mesh)
    parts = f"{path}{nf4.SUFFIX}"
    found = {p.rsplit("/", 1)[1]: unshard_leaf(x, placement(layout, p), mesh) for p, x in flat.items() if parts in p}
    rows = nf4.held(path, tree.unflatten(found), SINGLE).rows(torch.float32)
    return rows if path in (EMBEDDING, HEAD) else rows.t()


def _length(w: Tensor, dim: int) -> Tensor:
    high = torch.promote_types(w.dtype, torch.float32)
    return torch.linalg.vector_norm(w, dim=dim, dtype=high).clamp(min=torch.finfo(high).tiny)  # a row that no id has


def adapting(
    spec: AdapterSpec, mesh: Mesh = SINGLE, seed: int | None = None, dtype: torch.dtype = torch.float32
) -> Adapt:
    """Return the `Forward.adapt` of an adapter. seed: of LoRA's dropout; None, as when evaluating, drops nothing.

    dtype: of an embedding that is made of NF4.
    """
    return Adapting(spec, mesh, seed, dtype) if spec.kind == "lora" else Virtual(mesh)


@frozen(eq=False)
class Adapting:
    """Turn the leaves of a block into what the forward pass calls: `Forward.adapt` of a model with an adapter.

    seed: of the dropout; None, as when evaluating, drops nothing. dtype: of an embedding that is made of NF4.
    """

    spec: AdapterSpec
    mesh: Mesh = SINGLE
    seed: int | None = None
    dtype: torch.dtype = torch.float32

    def __call__(self, params: Params, prefix: str, batch: Batch) -> Params:
        """Return the leaves, each matrix that has an adapter or is in NF4 as one that is called or made."""
        done: Params = {}
        for name, node in params.items():
            if not isinstance(node, dict):
                done.setdefault(name, node)
            elif name.endswith((SUFFIX, nf4.SUFFIX)):
                own = name.removesuffix(SUFFIX).removesuffix(nf4.SUFFIX)
                done[own] = self._matrix(prefix + own, params, own, batch)  # pyright: ignore[reportArgumentType]
            else:
                done[name] = self(node, f"{prefix}{name}/", batch)
        return done

    def _matrix(self, path: str, params: Params, name: str, batch: Batch) -> Tensor | Weight:
        parts, factors = params.get(f"{name}{nf4.SUFFIX}"), params.get(f"{name}{SUFFIX}")
        w = nf4.held(path, parts, self.mesh) if isinstance(parts, dict) else tree.leaf(params, name)
        pair = factors if isinstance(factors, dict) else {}
        if path == EMBEDDING:
            return Weight(partial(self._rows, w, pair), (len(w.codes if isinstance(w, nf4.Nf4) else w),))
        if path == HEAD and not pair and isinstance(w, nf4.Nf4):
            return Weight(partial(fixed, w=w), (len(w.codes),), pieces=w.pieces)
        if path == HEAD or (isinstance(w, Tensor) and w.dim() > 2):
            return self._effective(path, w.rows(torch.float32) if isinstance(w, nf4.Nf4) else w, pair)
        out = w.codes.shape[0] if isinstance(w, nf4.Nf4) else w.shape[1]
        if not pair:
            assert isinstance(w, nf4.Nf4)
            return Weight(partial(fixed, w=w), (out,))
        times = partial(self._times, path, w, pair, batch)
        return Weight(lambda x: times(Normed(x)), (out,), times)

    def _rows(self, w: Tensor | nf4.Nf4, pair: Params, ids: Tensor) -> Tensor:
        table = isinstance(w, Tensor)
        found = F.embedding(ids, w) if table else w.rows(self.dtype, ids.flatten()).view(*ids.shape, -1)
        if not pair:
            return found
        return found + self.spec.scale * (F.embedding(ids, tree.leaf(pair, "a")) @ tree.leaf(pair, "b"))

    def _effective(self, path: str, w: Tensor, pair: Params) -> Tensor:
        """Return w + scale a b as a matrix: its gradient is a dense one, which autograd takes apart."""
        if not pair:
            return w
        whole = w + self.spec.scale * (tree.leaf(pair, "a") @ tree.leaf(pair, "b"))
        if "m" not in pair:
            return whole
        return (whole * (tree.leaf(pair, "m") / _length(whole.detach(), 1))[:, None]).to(w.dtype)

    def _times(self, path: str, w: Tensor | Held, pair: Params, batch: Batch, x: Normed) -> Tensor:
        a, b = tree.leaf(pair, "a"), tree.leaf(pair, "b")
        y = low_rank(x, w, a, b, self.spec.scale, self._dropped(path, x.value, batch))
        if "m" not in pair:
            return y
        length = self._lengths(path, dense(w, y.dtype), a.detach(), b.detach())
        return y * (tree.leaf(pair, "m") / length).to(y.dtype)

    def _across(self, path: str) -> bool:
        """Tell whether tp shares out what this matrix reads, and not what it writes."""
        return self.mesh.tp.size > 1 and path.endswith(("/wo", "/w_down"))

    @torch.no_grad()
    def _lengths(self, path: str, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return the lengths of the columns, which take part as constants (section 4.3 of DoRA's paper)."""
        length = _length(torch.addmm(w, a, b, alpha=self.spec.scale), 0)
        return self.mesh.tp.backend.all_reduce(length.square()).sqrt() if self._across(path) else length

    def _dropped(self, path: str, x: Tensor, batch: Batch) -> Tensor | None:
        """Return what a reads: of x [rows, length, in] a share dropped, by the numbers of row, position and input."""
        if self.seed is None or not self.spec.dropout:
            return None
        first = self.mesh.tp.index * x.shape[-1] if self._across(path) else 0
        coordinates = [
            batch["row"].to(x.device),
            torch.arange(x.shape[1], device=x.device),
            torch.arange(first, first + x.shape[-1], device=x.device),
        ]
        return rng.dropout(x, self.spec.dropout, rng.key(self.seed, "adapter", path), coordinates)


@torch.no_grad()
def merge(spec: AdapterSpec, arch: Arch, base: Params, adapter: Params) -> tuple[Params, Arch]:
    """Return the model that needs no adapter: whole leaves, added up in float32 or better and cast once to the base's.

    Where an adapter changes the embedding or the head of a tied model, the head becomes a leaf of its own. What the
    base holds in NF4 comes out in float32. ValueError for a prompt or a prefix, which no matrix can hold.
    """
    if spec.kind != "lora":
        raise ValueError(f"a {spec.kind} stands before the texts and cannot be merged; only lora can")
    flat, factors = dict(tree.flatten(base)), tree.flatten(adapter)
    changed = targets(spec, arch)
    if arch.tied and (EMBEDDING in changed or HEAD in changed):
        flat[HEAD], arch = _whole(base, EMBEDDING, WHOLE_TABLE, SINGLE).clone(), evolve(arch, tied=False)
    for path in {*changed, *(p.rsplit(nf4.SUFFIX, 1)[0] for p in flat if f"{nf4.SUFFIX}/" in p)}:
        w = flat.pop(path) if path in flat else _whole(base, path, WHOLE_TABLE, SINGLE)
        for parts in [p for p in flat if p.startswith(f"{path}{nf4.SUFFIX}/")]:
            del flat[parts]
        flat[path] = _merged(spec, path, w, factors) if path in changed else w
    order = [path for path in shapes(arch) if path in flat]
    return tree.unflatten({path: flat[path] for path in [*order, *(p for p in flat if p not in order)]}), arch


def _merged(spec: AdapterSpec, path: str, w: Tensor, factors: dict[str, Tensor]) -> Tensor:
    high = torch.promote_types(w.dtype, torch.float32)
    a, b = (factors[f"{path}{SUFFIX}/{name}"].to(high) for name in "ab")
    whole = w.to(high) + spec.scale * (a @ b)
    if (m := factors.get(f"{path}{SUFFIX}/m")) is not None:
        dim = 1 if path == HEAD else 0
        whole = whole * (m.to(high) / _length(whole, dim)).unsqueeze(dim)
    return whole.to(w.dtype)
