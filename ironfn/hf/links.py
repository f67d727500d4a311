"""Match the tensors of a directory with the leaves of a model: each used exactly once, or none is read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from attrs import evolve, frozen
from torch import Tensor

from ironfn.hf.names import Naming, Row
from ironfn.hf.tensors import DTYPES, MAX_TENSORS, Entry, listed
from ironfn.model.arch import Arch
from ironfn.model.init import Shapes, shapes

EMBEDDING, HEAD = "embed/tokens", "head/w"
PADDED = ("embed/tokens", "head/w", "head/b")
"""The leaves whose last rows may have no id, and so no numbers in a file."""

_QUANTIZED = re.compile(r".*\.(qweight|qzeros|absmax|SCB|weight_packed|weight_scale|weight_scale_inv|quant_state\..*)")
"""The names that GPTQ, AWQ, bitsandbytes and compressed-tensors give to what a weight was packed into."""

_Key = tuple[str, int | None]


@frozen
class Link:
    """Tie one tensor of a file to whole leaves, or to one expert's part of them.

    shape: the tensor's. sizes: how many outputs each leaf has. heads: where they are interleaved, in how many heads.
    """

    tensor: str
    row: Row
    paths: tuple[str, ...]
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    heads: int | None = None
    expert: int | None = None

    def parts(self, tensor: Tensor) -> list[Tensor]:
        """View each leaf's numbers in the tensor: [..., in, out], or [..., in, heads, head_dim] if interleaved."""
        if self.row.turned and tensor.dim() > 1:
            tensor = tensor.transpose(-1, -2)
        if self.heads is not None:
            return list(tensor.unflatten(-1, (self.heads, len(self.paths), -1)).unbind(-2))
        return list(tensor.split(self.sizes, -1))


def links(naming: Naming, arch: Arch, fixed: Sequence[str] = ()) -> Iterator[Link]:
    """Yield every tensor that a file of this model may have, in the table's order.

    fixed: paths of leaves beside the parameters, of the shape [experts]. ValueError for more tensors than models have.
    """
    experts = 0 if arch.moe is None else arch.moe.experts
    if arch.layers * max(experts, 1) * 3 > MAX_TENSORS:
        raise ValueError(f"{arch.layers} layers of {experts} experts are more tensors than the {MAX_TENSORS:,} allowed")
    # the table's last rows, that no id has, are ours alone
    found = shapes(evolve(arch, rows=arch.vocab)) | dict.fromkeys(fixed, (experts,))
    for row in naming.top:
        yield from _links(row, row.theirs, "", found, arch)
    for layer in range(arch.layers):
        for row in naming.rows:
            name = naming.base + naming.block.format(i=layer) + row.theirs
            yield from _links(row, name, f"blocks/{layer}/", found, arch)


def _links(row: Row, name: str, prefix: str, found: Shapes, arch: Arch) -> Iterator[Link]:
    paths = tuple(prefix + path for path in row.ours)
    if any(path not in found for path in paths):
        return
    each = "{e}" in row.theirs
    leaves = [found[path][1:] if each else found[path] for path in paths]
    sizes = tuple(shape[-1] for shape in leaves)
    shape = (*leaves[0][:-1], sum(sizes))
    if row.turned and len(shape) > 1:
        shape = (*shape[:-2], shape[-1], shape[-2])
    link = Link(name, row, paths, shape, sizes, arch.heads if row.interleaved else None)
    if not each:
        yield link
        return
    for expert in range(found[paths[0]][0]):
        yield evolve(link, tensor=name.replace("{e}", str(expert)), expert=expert)


def match(
    entries: Mapping[str, Entry], naming: Naming, arch: Arch, fixed: Sequence[str] = ()
) -> list[tuple[Link, Entry]]:
    """Pair every tensor of a directory with its leaves.

    ValueError, with every name, where a tensor has no leaf, a leaf no tensor or two, or where shapes differ. A tied
    head that is stored all the same is left to the caller, who has to compare it with the embedding.
    """
    named = _with_base(entries, naming)
    pairs: list[tuple[Link, Entry]] = []
    used: set[str] = set()
    given: dict[_Key, str] = {}
    first: dict[_Key, str] = {}
    wrong: list[str] = []
    for link in links(naming, arch, fixed):
        keys = [(path, link.expert) for path in link.paths]
        for key in keys:
            first.setdefault(key, link.tensor)
        if (entry := named.get(link.tensor)) is None:
            continue
        used.add(link.tensor)
        wrong += [f"{link.tensor} and {given[key]} both give {key[0]}" for key in keys if key in given]
        given |= dict.fromkeys(keys, link.tensor)
        wrong += _unfit(link, entry)
        pairs.append((link, entry))
    missing = [name for key, name in first.items() if key not in given and not _elsewhere(key, given, first)]
    twice = [path for path, expert in given if expert is None and (path, 0) in given]
    wrong += [f"{path} is given both stacked and expert by expert" for path in twice]
    left = [
        name for name in named
        if name not in used and 0 not in named[name].shape and not (arch.tied and name == head_name(naming))
        and not any(re.fullmatch(regex, name) for regex in naming.passed_over)
    ]  # fmt: skip
    if any(_QUANTIZED.fullmatch(name) for name in left):
        wrong.insert(0, "quantized weights are not read; dequantize them first, and save them as F16, BF16 or F32")
    wrong += [f"missing: {listed(list(dict.fromkeys(missing)))}"] if missing else []
    wrong += [f"not of this model: {listed(left)}"] if left else []
    if wrong:
        raise ValueError("the tensors do not fit the config:\n  " + "\n  ".join(wrong[:40]))
    return pairs


def _elsewhere(key: _Key, given: Mapping[_Key, str], first: Mapping[_Key, str]) -> bool:
    """Tell whether this one is not missed: stacked where experts may come one by one, one of them where all do."""
    path, expert = key
    return (path, 0) in first if expert is None else (path, None) in given


def _unfit(link: Link, entry: Entry) -> list[str]:
    wrong: list[str] = []
    if entry.dtype not in DTYPES:
        wrong.append(f"{link.tensor} is {entry.dtype}: quantized weights are not read; give {', '.join(DTYPES)}")
    if entry.shape != link.shape:
        wrong.append(f"{link.tensor} is {list(entry.shape)}, the config calls for {list(link.shape)}")
    return wrong


def _with_base(entries: Mapping[str, Entry], naming: Naming) -> dict[str, Entry]:
    """Put the base before the names where a file was saved from the bare decoder, without a head."""
    if any(name.startswith(naming.base) for name in entries):
        return dict(entries)
    return {name if name.startswith("lm_head.") else naming.base + name: entry for name, entry in entries.items()}


def head_name(naming: Naming) -> str:
    """Return the name of the tensor that holds the head; "" where none can."""
    return next((row.theirs for row in naming.top if row.ours == (HEAD,)), "")
