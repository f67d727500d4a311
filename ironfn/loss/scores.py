"""Give tokens their log-probabilities at a temperature, and the entropy of the choice, without the logits of a batch.

As `log_probs`, which needs neither: the logits are made once for the values and once for the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ironfn.loss.cross_entropy import logits_of
from ironfn.mesh.axis import Axis
from ironfn.model.matmul import product


class _Scores(torch.autograd.Function):
    """(x [N, D], w [V, D], b [V] or None, targets [N]) -> (log p [N], entropy [N])."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        x: Tensor, w: Tensor, b: Tensor | None, targets: Tensor, axis: Axis, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        empty = x.new_empty(0, dtype=torch.promote_types(x.dtype, torch.float32))
        found = [(empty, empty)]
        for part, target in zip(x.split(rest[-1]), targets.split(rest[-1]), strict=True):
            choice = _choose(part, w.to(x.dtype), b, target, axis, *rest[:-1])
            found.append((choice.target - choice.sums.log(), choice.sums.log() - choice.mean))
        log_probs, entropy = zip(*found, strict=True)
        return torch.cat(log_probs), torch.cat(entropy)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.rest = inputs[4:]
        ctx.save_for_backward(*inputs[:4])

    @staticmethod
    def backward(ctx: Any, of_log_p: Tensor, of_entropy: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w, b, targets = ctx.saved_tensors
        axis, *rest, chunk = ctx.rest
        temperature = rest[-1]
        need = ctx.needs_input_grad[:3]
        used = w.to(x.dtype)
        x_grad, w_grad, b_grad = (
            torch.zeros_like(t) if t is not None and wants else None for t, wants in zip((x, w, b), need, strict=True)
        )
        for start in range(0, len(x), chunk):
            place = slice(start, start + chunk)
            choice = _choose(x[place], used, b, targets[place], axis, *rest)
            first, second = of_log_p[place, None], of_entropy[place, None]
            p = choice.exps / choice.sums[:, None]
            # d log p_t / d z_j is [j = t] - p_j; d H / d z_j is -p_j (z_j - sum p z)
            grad = -p * (first + second * torch.where(p > 0, choice.shifted - choice.mean[:, None], 0.0))
            grad.scatter_add_(1, choice.local[:, None], torch.where(choice.mine[:, None], first, 0.0))
            grad /= temperature
            if choice.tanh is not None:
                grad *= 1.0 - choice.tanh.square()
            if b_grad is not None:
                b_grad += grad.sum(0)
            grad = grad.to(x.dtype)
            if x_grad is not None:
                x_grad[place] = product(grad, used)
            if w_grad is not None:
                w_grad += grad.t() @ x[place]
        return x_grad, w_grad, b_grad, *(None,) * 6


class _Choice:
    """Hold what a choice among the ids is made of: z, the logits over the temperature less the largest.

    shifted: z, of this rank's ids. exps: e^z. sums: of e^z over all ids. mean: of z, as the ids are likely. target: z
    of the target. local, mine: which of this rank's ids it is, if it is one of them.
    """

    def __init__(self, logits: Tensor, tanh: Tensor | None, targets: Tensor, first: int, axis: Axis) -> None:
        self.tanh = tanh
        local = targets - first
        self.mine = (local >= 0) & (local < logits.shape[1])
        self.local = local.clamp(0, logits.shape[1] - 1)
        top = logits.amax(-1)
        if axis.size > 1:
            top = axis.backend.all_gather(top[None], 0).amax(0)
        self.shifted = logits.sub_(top[:, None])
        self.exps = self.shifted.exp()
        target = torch.where(self.mine, self.shifted.gather(1, self.local[:, None])[:, 0], 0.0)
        products = torch.where(self.exps > 0, self.exps * self.shifted, 0.0).sum(-1)  # an id that is none has -inf
        joined = torch.stack([target, self.exps.sum(-1), products])
        if axis.size > 1:
            joined = axis.backend.all_reduce(joined)
        self.target, self.sums = joined[0], joined[1]
        self.mean = joined[2] / self.sums


def _choose(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    targets: Tensor,
    axis: Axis,
    vocab: int,
    cap: float | None,
    temperature: float,
) -> _Choice:
    first = axis.index * w.shape[0]
    logits, tanh = logits_of(x, w, b, first, vocab, cap)
    return _Choice(logits.div_(temperature), tanh, targets, first, axis)


def token_scores(
    x: Tensor,
    w: Tensor,
    targets: Tensor,
    axis: Axis,
    *,
    vocab: int,
    bias: Tensor | None = None,
    softcap: float | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return of each target log softmax(logits / temperature)[target], and the entropy of that distribution, in nats.

    Float32 [N] (float64 for float64). x [N, width] and targets [N]; the rest as `cross_entropy` has it.
    """
    chunk = chunk or max(64, (1 << 22) // w.shape[0])
    return _Scores.apply(x, w, bias, targets, axis, vocab, softcap, temperature, chunk)  # pyright: ignore[reportReturnType]
