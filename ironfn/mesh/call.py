"""Describe one rank's call of a collective, so that calls can be checked, compared between ranks, and told."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
SUMS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8)
"""What every back end adds up."""

DTYPES = (
    *SUMS,
    *(torch.bool, torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)
DIMS = 8  # the most dimensions that a tensor may have, so that a call is a fixed number of integers


class MeshError(RuntimeError):
    """Tell that the ranks of a mesh did not make the same call, or that one of them is gone."""


def told(error: BaseException) -> str:
    """Return an exception in one line."""
    return f"{type(error).__name__}: {error}".rstrip(": ").partition("\n")[0][:400]


@frozen
class Call:
    """One rank's call. at: the dimension or the source; send, receive: the sizes of an all-to-all, else ()."""

    op: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    at: int = 0
    send: tuple[int, ...] = ()
    receive: tuple[int, ...] = ()

    def __str__(self) -> str:
        words = {"all_gather": f"({self.at})", "reduce_scatter": f"({self.at})", "broadcast": f"({self.at})"}
        sizes = f"(send {list(self.send)}, receive {list(self.receive)})" if self.op == "all_to_all" else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.op}{words.get(self.op, '')}{sizes} of {dtype} {list(self.shape)}"


def describe(
    op: str, x: Tensor, size: int, *, at: int = 0, send: Sequence[int] = (), receive: Sequence[int] = ()
) -> Call:
    """Return the call of ``op`` on an axis of ``size`` ranks. MeshError where it is wrong whatever the others do."""
    assert not (x.requires_grad and torch.is_grad_enabled()), f"{op}: gradients cross the mesh by mesh/pairs.py alone"
    if op in ("all_gather", "reduce_scatter") and -x.dim() <= at < x.dim():
        at %= x.dim()
    call = Call(op, x.dtype, tuple(x.shape), at, tuple(send), tuple(receive))
    fault = _fault(call, size)
    if fault:
        raise MeshError(f"{call}: {fault}")
    return call


def _fault(call: Call, size: int) -> str:
    op, at, shape = call.op, call.at, call.shape
    if len(shape) > DIMS or call.dtype not in DTYPES:
        return f"at most {DIMS} dimensions, and a dtype of {', '.join(str(d) for d in DTYPES)}"
    if op in ("all_reduce", "reduce_scatter") and call.dtype not in SUMS:
        return "this dtype has no sum that every back end agrees on; convert to int32 or to a float"
    if op in ("all_gather", "reduce_scatter"):
        if not 0 <= at < len(shape):
            return f"there is no dimension {at}"
        if op == "reduce_scatter" and shape[at] % size:
            return f"{shape[at]} does not divide by {size} along {at}"
    if op == "broadcast" and not 0 <= at < size:
        return f"there is no rank {at} among {size}"
    if op == "all_to_all":
        if len(call.send) != size or len(call.receive) != size or min(*call.send, *call.receive) < 0:
            return f"send and receive need {size} sizes of 0 or more each"
        if not shape or sum(call.send) != shape[0]:
            return f"the sizes to send add up to {sum(call.send)} slices"
    return ""


def agree(calls: Sequence[Call]) -> bool:
    """Tell whether the calls of an axis, in rank order, are one collective."""
    first = calls[0]
    if first.op != "all_to_all":
        return all(call == first for call in calls)
    alike = all((call.op, call.dtype, call.shape[1:]) == (first.op, first.dtype, first.shape[1:]) for call in calls)
    sent = [call.send for call in calls]
    return alike and [call.receive for call in calls] == list(zip(*sent, strict=True))


def encode(call: Call, size: int) -> list[int]:
    """Return the call as a list of integers whose length depends on the size of the axis alone."""
    pad = [0] * (DIMS - len(call.shape))
    sizes = [*call.send, *call.receive] or [0] * (2 * size)
    return [OPS.index(call.op), DTYPES.index(call.dtype), call.at, len(call.shape), *call.shape, *pad, *sizes]


def decode(numbers: Sequence[int], size: int) -> Call:
    """Undo `encode`."""
    op, dtype, at, dims = numbers[:4]
    send, receive = tuple(numbers[4 + DIMS :][:size]), tuple(numbers[4 + DIMS + size :])
    sizes = (send, receive) if OPS[op] == "all_to_all" else ((), ())
    return Call(OPS[op], DTYPES[dtype], tuple(numbers[4 : 4 + dims]), at, *sizes)
