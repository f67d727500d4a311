"""Multiply few rows by a large matrix, which is what decoding does all the time. There is no derivative of these.

One row reads every number once, and is done when memory has given them. No BLAS of torch's comes near that; its sum of
weighted rows of a table does: with the matrix as the table and the row's numbers as weights it is the same product, its
kernel (fbgemm's `EmbeddingSpMDM`) fetches ahead, and widens 8 bits as it reads (docs/decisions.md).
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional as F

from ironfn import pages
from ironfn.model.weights import Times

mkldnn: Any = torch.ops.mkldnn
quantized: Any = torch.ops.quantized
_bag_of_bytes: Any = quantized.embedding_bag_byte_rowwise_offsets.default
# as it is below Python, where every argument would be looked at first
_product_of_bytes: Any = quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default._op

_SMALL = 1 << 18
"""Numbers of a matrix below which a call of oneDNN costs what its layout saves, with caches that are always cold."""

_NARROW, _WIDE = 64, 512
"""Columns of a part: below these a thread more is not worth it, above those a sum of rows leaves the registers."""

_FEW = 2
"""Rows up to which bytes are widened for each: for more it is cheaper to cut the rows into bytes."""


def suits(w: Tensor) -> bool:
    """Tell whether the kernels of this module are there for w: on a CPU for which torch has fbgemm and oneDNN."""
    engines = torch.backends.quantized.supported_engines
    return w.device.type == "cpu" and "fbgemm" in engines and torch.backends.mkldnn.is_available()


@frozen(eq=False)
class _Bags:
    """Say how the rows of a table [parts * in, out / parts] make a product: each part of the columns is a bag.

    index: [rows, parts, in], flat; offsets: where each bag begins.
    """

    parts: int
    index: Tensor
    offsets: Tensor

    def weights(self, rows: Tensor) -> Tensor:
        """Return rows [rows, in] as the weights of the bags."""
        return torch.cat([rows] * self.parts, 1).view(-1)


def _parted(w: Tensor, rows: int) -> tuple[Tensor, list[_Bags]]:
    """Return w [in, out] as a table of parts of its columns one after the other, and its bags for 1 to ``rows`` rows.

    Each thread gets as many parts, of no more columns than are added up in registers; the last is filled up.
    """
    inputs, outputs = w.shape
    threads = min(torch.get_num_threads(), max(1, outputs // _NARROW))
    parts = threads * -(-outputs // (threads * _WIDE))
    width = -(-outputs // parts)
    table = F.pad(w, (0, parts * width - outputs)).view(inputs, parts, width).transpose(0, 1).flatten(0, 1)
    index = torch.arange(inputs * parts, dtype=torch.int32)
    offsets = torch.arange(0, rows * parts * inputs, inputs, dtype=torch.int32)
    return table, [_Bags(parts, index.repeat(n), offsets[: n * parts]) for n in range(1, rows + 1)]


def float32(w: Tensor) -> Times:
    """Return the product with w [in, out]: bags for one row, for more `blocked`. So w is kept twice."""
    table, (bags,) = _parted(w, 1)
    return partial(_times_float32, pages.copied(table), bags, w.shape[1], blocked(w))


def blocked(w: Tensor) -> Times:
    """Return the product with w [in, out] for a few rows: in oneDNN's blocked layout where w is large.

    That takes a tenth of the time to make that `float32` takes, and one row twice the time to read.
    """
    if w.numel() < _SMALL:
        return partial(torch.matmul, other=w.contiguous())
    return partial(_times_blocked, mkldnn._reorder_linear_weight(w.t(), 32), w.shape[1])


def _times_float32(table: Tensor, bags: _Bags, outputs: int, more: Times, x: Tensor) -> Tensor:
    *shape, inputs = x.shape
    if x.numel() != inputs:
        return more(x)
    weights = bags.weights(x.reshape(1, inputs))
    out = torch.embedding_bag(table, bags.index, bags.offsets, False, 0, False, weights)[0].view(-1)
    return (out if out.shape[0] == outputs else out[:outputs]).view(*shape, outputs)


def _times_blocked(blocked: Tensor, outputs: int, x: Tensor) -> Tensor:
    *shape, inputs = x.shape
    rows = x.reshape(-1, inputs)
    out = mkldnn._linear_pointwise.default(_filled(rows), blocked, None, "none", [], "")
    return out[: rows.shape[0]].view(*shape, outputs)


def _filled(rows: Tensor) -> Tensor:
    """Add rows of zeros, so that only a few numbers of rows ever come up.

    oneDNN compiles a kernel for each number and keeps a thousand of them, of more than half a megabyte each.
    """
    count = rows.shape[0]
    more = -count % (1 if count <= 8 else 8 if count <= 64 else 32)
    return F.pad(rows, (0, 0, 0, more)) if more else rows


def bytes_of(whole: Tensor, scale: Tensor) -> Times:
    """Return the product with whole [in, out], int8, times scale [out]: bags for few rows, bytes by bytes for more."""
    table, few = _parted(whole, _FEW)
    table = (table.to(torch.int16) + 128).to(torch.uint8)
    # fbgemm's rows end with what each of their numbers is multiplied by and what is then added
    ends = torch.tensor([1.0, -128.0]).view(torch.uint8).expand(len(table), -1)
    return partial(_times_bytes, pages.copied(torch.cat([table, ends], 1)), few, _by_fbgemm(whole, scale), scale)


def _by_fbgemm(whole: Tensor, scale: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # tensors of quantised numbers go, says torch; nothing else takes bytes to fbgemm
        zeros = torch.zeros(len(scale), dtype=torch.int64)
        turned = torch._make_per_channel_quantized_tensor(whole.t().contiguous(), scale.double(), zeros, 0)
    return quantized.linear_prepack(turned, None)


def _times_bytes(table: Tensor, few: list[_Bags], by_bytes: Any, scale: Tensor, x: Tensor) -> Tensor:
    *shape, inputs = x.shape
    rows = (x if x.dtype == torch.float32 else x.float()).reshape(-1, inputs)
    count = rows.shape[0]
    if 0 < count <= _FEW:
        bags = few[count - 1]
        out = _bag_of_bytes(table, bags.index, bags.offsets, False, 0, False, bags.weights(rows))
        out = out.view(count, -1)[:, : scale.shape[0]] * scale
    else:
        out = _of_two_bytes(rows, by_bytes)
    out = out.view(*shape, scale.shape[0])
    return out if x.dtype == torch.float32 else out.to(x.dtype)


def _of_two_bytes(rows: Tensor, by_bytes: Any) -> Tensor:
    """Multiply bytes with bytes: a row is 63 parts of its largest number, up or down, and 63 of half of one of those.

    That is two rows of one product, which cost little more than one, and rounds less than bfloat16 would. More parts
    would overflow the 16 bits in which processors without VNNI add up pairs.
    """
    part = rows.abs().amax(-1, True).mul_(1 / 63)  # a norm takes four times as long
    rest = rows / part
    whole = rest.round()
    both = torch.cat([whole, rest.sub_(whole).mul_(126)])
    out = _product_of_bytes(both, 1.0, 64, by_bytes)
    count = rows.shape[0]
    return out[:count].add_(out[count:], alpha=1 / 126).mul_(part)
