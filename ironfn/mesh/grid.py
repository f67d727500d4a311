"""Number the ranks of a mesh: dp slowest, then ep, tp fastest."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from ironfn.mesh.axis import Axis, Backend, Mesh


@frozen
class Grid:
    """How many ranks each axis has."""

    dp: int = 1
    tp: int = 1
    ep: int = 1

    def __attrs_post_init__(self) -> None:
        for name, size in (("dp", self.dp), ("tp", self.tp), ("ep", self.ep)):
            if size < 1:
                raise ValueError(f"{name} = {size}: an axis has 1 rank or more")

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self.dp * self.tp * self.ep

    def place(self, rank: int) -> dict[str, int]:
        """Return the index on each axis."""
        return {"dp": rank // (self.ep * self.tp), "ep": rank // self.tp % self.ep, "tp": rank % self.tp}

    def members(self, name: str, rank: int) -> list[int]:
        """Return the ranks, in order, that differ from ``rank`` on that axis alone; all of them for "world"."""
        if name == "world":
            return list(range(self.world))
        mine = self.place(rank)
        return [r for r in range(self.world) if {**self.place(r), name: 0} == {**mine, name: 0}]

    def name(self, rank: int) -> str:
        """Return what to call a rank, as in "rank 3 (dp 1, tp 1)"."""
        sizes = {"dp": self.dp, "ep": self.ep, "tp": self.tp}
        at = ", ".join(f"{axis} {index}" for axis, index in self.place(rank).items() if sizes[axis] > 1)
        return f"rank {rank}" + (f" ({at})" if at else "")

    def mesh(self, rank: int, sequence_parallel: bool, backend: Callable[[str, list[int]], Backend]) -> Mesh:
        """Return the mesh as a rank sees it; ``backend(axis, members)`` joins the ranks of an axis of size > 1.

        The calls come in one order on all ranks: dp, tp, ep, world.
        """

        def axis(name: str) -> Axis:
            members = self.members(name, rank)
            if len(members) == 1:
                return Axis(name)
            return Axis(name, len(members), members.index(rank), backend(name, members))

        return Mesh(axis("dp"), axis("tp"), axis("ep"), sequence_parallel, axis("world"))
