"""Name the values that every room passes to the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from attrs import field, frozen
from torch import Tensor

if TYPE_CHECKING:
    from ironfn.mesh.axis import Mesh

Params: TypeAlias = "dict[str, Tensor | Params]"
"""A tree of tensors: nested dicts whose leaves are tensors. A leaf's name is its path, ``blocks/3/attn/wq``."""

Flat: TypeAlias = "dict[str, Tensor]"
"""A tree written as one dict from path to leaf."""

Batch: TypeAlias = "dict[str, Tensor]"
"""What one step sees. Rows come first in every tensor:

``tokens``    int64 [rows, length]
``targets``   int64 [rows, length], the id that position t has to predict (already shifted; any id where weight is 0)
``weight``    float32 [rows, length], 0 where nothing is learned
``position``  int64 [rows, length], the place inside the document
``segment``   int64 [rows, length], the document's number inside its row, -1 on padding; absent: one document a row
``until``     int64 [rows, length], where documents of a row share their beginnings: a token belongs to the documents
              ``segment`` to ``until``, and stands before what only some of them have; -1 on padding
``reference`` float32 [rows, length], a reference's log-probabilities; those of a text's places are what is summed
``temperature`` float32 [rows, length], what the logits were divided by when a token was drawn; absent: 1
``liked``     int64 [rows, length], 1 where a completion is liked
``lengths``   int64 [rows, length], the length of each token's document; absent: as much of it as the row holds
``row``       int64 [rows], the global number of the row since the run began (indexes the randomness)
``experts``   integers [rows, length, layers with experts, choices], absent: the router chooses; any on padding
"""


@frozen
class LossSum:
    """Hold a loss as a sum and its weight, so that any split of a batch adds up to the whole.

    total: 0-d tensor with a graph, the weighted sum over this part of the batch.
    weight: 0-d tensor without one, the sum of the weights.
    metrics: 0-d tensors that are sums too; their mean is taken over the same weight.
    counts: tensors of any shape that are sums too and stay sums, such as the tokens that each expert was given.
    """

    total: Tensor
    weight: Tensor
    metrics: dict[str, Tensor] = field(factory=dict)
    counts: dict[str, Tensor] = field(factory=dict)


Loss: TypeAlias = "Callable[[Params, Batch, Mesh], LossSum]"
Schedule: TypeAlias = Callable[[int], float]
"""From the index of a step (0 is the first) to the learning rate of that step."""
