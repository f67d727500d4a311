"""Law 4: what was saved on any mesh loads on any other, bit-equal tensor by tensor."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from ironfn import tree
from ironfn.checkpoint import load, load_newest, read_manifest, save, verify
from ironfn.checkpoint.plan import DTYPES
from ironfn.layout.table import Placement, held, shard_leaf
from ironfn.mesh import fake
from ironfn.mesh.axis import Mesh
from property_tests.test_checkpoint_law import bits, names

AXES = ("dp", "ep", "tp")
WORLDS = [
    sizes for n in range(1, 9) for m in range(1, 9) for k in range(1, 9) if math.prod(sizes := (n, m, k)) <= 8
]  # fmt: skip


@frozen
class Layout:
    """Lay a tree out on a mesh of these sizes."""

    sizes: tuple[int, int, int]
    places: dict[str, Placement]


@st.composite
def layouts(draw: st.DrawFn, leaves: dict[str, torch.Tensor]) -> Layout:
    """Draw a mesh of up to 8 ranks, and for each leaf a placement that divides it."""
    sizes = draw(st.sampled_from(WORLDS))
    places = {}
    for path, leaf in leaves.items():
        cuts, shape = [], list(leaf.shape)
        owner = draw(st.none() | st.integers(0, sizes[0] - 1))
        for axis in draw(st.permutations(AXES)):
            size = sizes[AXES.index(axis)]
            fitting = [dim for dim, n in enumerate(shape) if n % size == 0]
            if fitting and not (axis == "dp" and owner is not None) and draw(st.booleans()):
                cuts.append((axis, draw(st.sampled_from(fitting))))
                shape[cuts[-1][1]] //= size
        places[path] = Placement(tuple(cuts), owner)
    return Layout(sizes, places)


@st.composite
def leaves(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Draw leaves by path: any dtype and bits, dims that divide in many ways, none, or of no elements; some tied."""
    found: dict[str, torch.Tensor] = {}
    for path in draw(st.lists(st.lists(names, min_size=1, max_size=2).map("/".join), max_size=5, unique=True)):
        if path == "__metadata__" or any(path.startswith(f"{p}/") or p.startswith(f"{path}/") for p in found):
            continue
        shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12]), max_size=3))
        dtype = draw(st.sampled_from(list(DTYPES)))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
        size = torch.empty(0, dtype=dtype).element_size()
        raw = torch.randint(0, 256, [*shape, size], dtype=torch.uint8, generator=generator)
        found[path] = (raw[..., 0] > 127) if dtype == torch.bool else raw.view(dtype)[..., 0]
        if found and draw(st.integers(0, 4)) == 0:
            found[path] = found[draw(st.sampled_from(list(found)))]
    return found


def run(function: Any, layout: Layout) -> list[Any]:
    dp, ep, tp = layout.sizes
    return fake.run(function, dp=dp, ep=ep, tp=tp, timeout=20)


def share(flat: dict[str, torch.Tensor], places: dict[str, Placement], mesh: Mesh) -> dict[str, torch.Tensor]:
    """Cut a tree; leaves that were one tensor and are placed alike stay one."""
    made: dict[Any, torch.Tensor] = {}
    kept = {path: leaf for path, leaf in flat.items() if held(places[path], mesh)}
    return {
        path: made.setdefault((id(leaf), places[path]), shard_leaf(leaf, places[path], mesh).clone())
        for path, leaf in kept.items()
    }


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_one_mesh_saved_another_loads_to_the_bit(data: st.DataObject) -> None:
    flat = data.draw(leaves(), "leaves")
    here, there = data.draw(layouts(flat), "saved on"), data.draw(layouts(flat), "loaded on")
    file_bytes = data.draw(st.sampled_from([1, 100, 2 << 30]), "file_bytes")
    with tempfile.TemporaryDirectory() as name:
        room = Path(name)

        def write(mesh: Mesh) -> Path:
            mine = tree.unflatten({**share(flat, here.places, mesh), "none": {}})
            meta = {"rank": mesh.world.index}
            return save(room, 7, mine, meta, layout=here.places, mesh=mesh, file_bytes=file_bytes)

        assert {str(path) for path in run(write, here)} == {str(room / "step-00000007")}
        assert verify(room / "step-00000007") == []
        manifest = read_manifest(room / "step-00000007")
        assert manifest.meta == {"step": 7, "rank": 0}
        assert {p: leaf.shape for p, leaf in manifest.leaves.items()} == {p: tuple(x.shape) for p, x in flat.items()}
        alone = tree.flatten(load(room / "step-00000007")[0])
        assert {p: bits(x) for p, x in alone.items()} == {p: bits(x) for p, x in flat.items()}

        def read(mesh: Mesh) -> None:
            wanted = {p: bits(x) for p, x in share(flat, there.places, mesh).items()}
            found = load_newest(room, print, layout=there.places, mesh=mesh)
            assert found is not None
            assert found.tree["none"] == {}
            assert {p: bits(x) for p, x in tree.flatten(found.tree).items()} == wanted
            into = tree.unflatten({p: torch.zeros_like(x) for p, x in share(flat, there.places, mesh).items()})
            load(found.path, into=into, layout=there.places, mesh=mesh)
            assert {p: bits(x) for p, x in tree.flatten(into).items()} == wanted

        run(read, there)
