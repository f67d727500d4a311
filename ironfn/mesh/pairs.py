"""Pair every collective with its transpose, so that gradients cross a mesh by the same rule as activations.

`enter` and `leave` are f and g of Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053, section 3), or their
sequence-parallel forms (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2). An axis of size 1 costs nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ironfn.mesh.axis import Axis, Mesh

LENGTH = 1  # the dimension of the positions in an activation [rows, length, width]


class _Copy(torch.autograd.Function):
    """Identity forward, sum over the axis backward."""

    @staticmethod
    def forward(x: Tensor, axis: Axis) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.axis = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.axis.backend.all_reduce(grad), None


class _Reduce(torch.autograd.Function):
    """Sum over the axis forward, identity backward."""

    @staticmethod
    def forward(x: Tensor, axis: Axis) -> Tensor:
        return axis.backend.all_reduce(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None


class _Gather(torch.autograd.Function):
    """Join along a dimension forward, sum and share out backward."""

    @staticmethod
    def forward(x: Tensor, axis: Axis, dim: int) -> Tensor:
        return axis.backend.all_gather(x, dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.axis, ctx.dim = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.axis.backend.reduce_scatter(grad, ctx.dim), None, None


class _Scatter(torch.autograd.Function):
    """Sum and share out along a dimension forward, join backward."""

    @staticmethod
    def forward(x: Tensor, axis: Axis, dim: int) -> Tensor:
        return axis.backend.reduce_scatter(x, dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.axis, ctx.dim = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.axis.backend.all_gather(grad, ctx.dim), None, None


class _Exchange(torch.autograd.Function):
    """Send slices to every rank forward, send what came back backward."""

    @staticmethod
    def forward(x: Tensor, axis: Axis, send: list[int], receive: list[int]) -> Tensor:
        return axis.backend.all_to_all(x, send, receive)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.axis, ctx.send, ctx.receive = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.axis.backend.all_to_all(grad, ctx.receive, ctx.send), None, None, None


def copy(x: Tensor, axis: Axis) -> Tensor:
    """Hand a replicated value to every rank; the gradient is summed over the axis."""
    return x if axis.size == 1 else _Copy.apply(x, axis)  # pyright: ignore[reportReturnType]


def reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum a value over the axis; every rank's gradient is the whole one."""
    return x if axis.size == 1 else _Reduce.apply(x, axis)  # pyright: ignore[reportReturnType]


def gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Join the ranks' shares along ``dim``; the gradient is summed and shared out."""
    return x if axis.size == 1 else _Gather.apply(x, axis, dim)  # pyright: ignore[reportReturnType]


def scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Sum over the axis and keep this rank's share along ``dim``; the gradient is joined."""
    return x if axis.size == 1 else _Scatter.apply(x, axis, dim)  # pyright: ignore[reportReturnType]


def exchange(x: Tensor, axis: Axis, send: list[int], receive: list[int]) -> Tensor:
    """Send ``send[r]`` leading slices to rank r, return the ``receive[r]`` that each rank r sent, in rank order.

    Its transpose is the exchange with send and receive swapped, by which the gradients go back where x came from.
    """
    return x if axis.size == 1 else _Exchange.apply(x, axis, send, receive)  # pyright: ignore[reportReturnType]


def enter(x: Tensor, mesh: Mesh) -> Tensor:
    """Begin a tensor-parallel region with activations [rows, length (a share under SP), width]."""
    return gather(x, mesh.tp, LENGTH) if mesh.sequence_parallel else copy(x, mesh.tp)


def leave(x: Tensor, mesh: Mesh) -> Tensor:
    """End a tensor-parallel region: add up the ranks' partial sums of [rows, length, width]."""
    return scatter(x, mesh.tp, LENGTH) if mesh.sequence_parallel else reduce(x, mesh.tp)
