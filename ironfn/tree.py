"""Walk trees of tensors: nested dicts whose leaves have paths such as ``blocks/3/attn/wq``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ironfn.types import Flat, Params


def flatten(tree: Params, prefix: str = "") -> Flat:
    """Return the leaves by path, in the tree's own order.

    >>> list(flatten({"a": {"b": torch.zeros(1)}, "c": torch.zeros(1)}))
    ['a/b', 'c']
    """
    flat: Flat = {}
    for name, node in tree.items():
        path = f"{prefix}{name}"
        if isinstance(node, dict):
            flat |= flatten(node, path + "/")
        else:
            flat[path] = node
    return flat


def unflatten(flat: dict[str, Any]) -> Params:
    """Build the tree whose leaves have these paths. ValueError where one path runs through another's leaf.

    >>> unflatten({"a/b": 1, "a/c": 2})
    {'a': {'b': 1, 'c': 2}}
    """
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ValueError(f"path {path!r} runs through a leaf")
        if name in node:
            raise ValueError(f"path {path!r} is there twice")
        node[name] = leaf
    return tree


def map(f: Callable[..., Any], tree: Params, *others: Params) -> Params:
    """Apply ``f`` to every leaf, and to the leaves at the same path of the other trees.

    KeyError where another tree lacks a path.
    """
    return {
        name: map(f, node, *(other[name] for other in others))  # pyright: ignore[reportArgumentType]
        if isinstance(node, dict)
        else f(node, *(other[name] for other in others))
        for name, node in tree.items()
    }


def map_path(f: Callable[[str, Tensor], Any], tree: Params, prefix: str = "") -> Params:
    """Apply ``f(path, leaf)`` to every leaf."""
    return {
        name: map_path(f, node, f"{prefix}{name}/") if isinstance(node, dict) else f(prefix + name, node)
        for name, node in tree.items()
    }


def select(tree: Params, keep: Callable[[str], bool]) -> Params:
    """Keep the leaves whose path satisfies ``keep``; empty branches vanish."""
    return unflatten({path: leaf for path, leaf in flatten(tree).items() if keep(path)})


def merge(*trees: Params) -> Params:
    """Join trees with disjoint leaves. ValueError where two hold the same path."""
    merged: Flat = {}
    for tree in trees:
        for path, leaf in flatten(tree).items():
            if path in merged:
                raise ValueError(f"path {path!r} is in two of the trees")
            merged[path] = leaf
    return unflatten(merged)


def branch(tree: Params, name: str) -> Params:
    """Return the subtree of that name."""
    found = tree[name]
    assert isinstance(found, dict), f"{name} is a leaf"
    return found


def leaf(tree: Params, name: str) -> Tensor:
    """Return the leaf of that name."""
    found = tree[name]
    assert not isinstance(found, dict), f"{name} is a branch"
    return found


def leaves(tree: Params) -> list[Tensor]:
    """Return the leaves in the order of ``flatten``."""
    return list(flatten(tree).values())


def rebuild(tree: Params, new_leaves: Iterable[Any]) -> Params:
    """Return a tree of the same shape that holds the new leaves, given in the order of ``flatten``."""
    return unflatten(dict(zip(flatten(tree), new_leaves, strict=True)))


def clone(tree: Params) -> Params:
    """Copy every leaf."""
    return map(torch.clone, tree)


def count(tree: Params) -> int:
    """Count the numbers in a tree."""
    return sum(leaf.numel() for leaf in leaves(tree))


def nbytes(tree: Params) -> int:
    """Count the bytes of a tree."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree))


def norm(tree: Params) -> Tensor:
    """Return the global 2-norm of a tree as a 0-d float32 (or float64) tensor."""
    found = [leaf.detach() for leaf in leaves(tree)]
    high = torch.float64 if any(leaf.dtype == torch.float64 for leaf in found) else torch.float32
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(found, 2.0, high)))
