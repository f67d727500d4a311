"""Say what of a run's state a checkpoint keeps as tensors, and where each of its leaves lives on the mesh."""

from __future__ import annotations

from ironfn import tree
from ironfn.algo.step import State
from ironfn.layout.table import WHOLE, Placement, Table, by_path, placement
from ironfn.layout.zero import state_layout
from ironfn.types import Params


def as_tree(state: State) -> Params:
    """Return the parameters, the optimizer's state and the extras as one tree, for `save` and for `load`'s ``into``."""
    return {"params": state.params, "opt": state.opt, "extra": state.extra}


def layout_of(state: State, table: Table, updates: Table | None = None) -> dict[str, Placement]:
    """Return the placement of every leaf of `as_tree`, for ``layout``.

    table, updates: those of `make_step`. The extras' ``fixed`` leaves are placed as parameters of their path would be,
    other extras are whole.
    """
    params = tree.flatten(state.params)
    moved = state_layout(state.opt, by_path(table if updates is None else updates, params))
    places = {f"params/{path}": placement(table, path) for path in params}
    places |= {f"opt/{path}": place for path, place in moved.items()}
    for path in tree.flatten(state.extra):
        fixed = path.removeprefix("fixed/")
        places[f"extra/{path}"] = WHOLE if fixed == path else placement(table, fixed)
    return places
