"""Lay the decoder out on a mesh: Megatron's tensor parallelism as rows of a table."""

from __future__ import annotations

from ironfn.layout.table import WHOLE, Placement, Table, cut

_ROWS = cut("tp", 0)
_COLUMNS = cut("tp", 1)
_PARTIAL = Placement(partial=("tp",))
_WIDENING = r"blocks/\d+/(attn/(wq|wk|wv)|mlp/(shared/)?(w_gate|w_up))"
_NARROWING = r"blocks/\d+/(attn/wo|mlp/(shared/)?w_down)"
_ADAPTERS = (
    (r"blocks/\d+/attn/prefix_(k|v)", _COLUMNS),
    (r"(embed/tokens|head/w)_lora/a|head/w_lora/m", _ROWS),
    (r"(embed/tokens|head/w)_lora/b", _PARTIAL),
    (rf"{_WIDENING}_lora/a", _PARTIAL),
    (rf"{_WIDENING}_lora/b", _COLUMNS),
    (rf"{_WIDENING}_lora/m", _ROWS),
    (rf"{_NARROWING}_lora/a", _ROWS),
    (rf"{_NARROWING}_lora/(b|m)|blocks/\d+/mlp/shared_gate/w_lora/.*", _PARTIAL),
    (r"blocks/\d+/mlp/experts/(w_gate|w_up)_lora/a", Placement((("ep", 0),), partial=("tp",))),
    (r"blocks/\d+/mlp/experts/(w_gate|w_up)_lora/b", Placement((("ep", 0), ("tp", 2)))),
    (r"blocks/\d+/mlp/experts/w_down_lora/a", Placement((("ep", 0), ("tp", 1)))),
    (r"blocks/\d+/mlp/experts/w_down_lora/b", Placement((("ep", 0),), partial=("tp",))),
    (rf"({_WIDENING}|embed/tokens|head/w)_nf4/(codes|absmax)", _ROWS),
    (rf"{_NARROWING}_nf4/(codes|absmax)", _COLUMNS),
    (r".*_nf4/(scale|mean)", WHOLE),
)
"""The thin factors beside a matrix (`model.adapters`), and its form in 4 bits (`model.nf4`), which has outputs first.

Of x a b one factor is cut as the matrix is, and the other, which is whole, works with a part of a sum on every rank.
"""


def table(sequence_parallel: bool) -> Table:
    """Return the layout of every leaf that `init.shapes` names.

    Under sequence parallelism the leaves between the tensor-parallel regions see a share of the positions.
    Experts are shared out over ep, and each of them over tp as a dense feed-forward is. What is whole inside those
    regions (norms of queries and keys, the gate of shared experts) works with this rank's heads or part of a sum alone.
    """
    between = _PARTIAL if sequence_parallel else WHOLE
    return (
        (r"embed/tokens|head/(w|b)", _ROWS),
        (r"blocks/\d+/attn/(wq|wk|wv)", _COLUMNS),
        (r"blocks/\d+/attn/(bq|bk|bv)", _ROWS),
        (r"blocks/\d+/attn/wo", _ROWS),
        (r"blocks/\d+/(attn/(q|k)_norm/scale|mlp/shared_gate/w)", _PARTIAL),
        (r"blocks/\d+/mlp/(shared/)?(w_gate|w_up)", _COLUMNS),
        (r"blocks/\d+/mlp/(b_gate|b_up)", _ROWS),
        (r"blocks/\d+/mlp/(shared/)?w_down", _ROWS),
        (r"blocks/\d+/mlp/experts/(w_gate|w_up)", Placement((("ep", 0), ("tp", 2)))),
        (r"blocks/\d+/mlp/experts/w_down", Placement((("ep", 0), ("tp", 1)))),
        (r"blocks/\d+/mlp/router/(w|bias)", between),
        (r"embed/prompt|score/w", between),
        *_ADAPTERS,
        (r"embed/(positions|norm/(scale|bias))", between),
        (r"blocks/\d+/(attn/bo|mlp/b_down)", between),
        (r"(blocks/\d+/)?(post_)?norm\d?/(scale|bias)", between),
    )
