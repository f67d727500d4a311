"""Give tokens their log-probabilities, and the entropy of the choice, without ever holding the logits of a batch.

What a token's log-probability will be multiplied by is known only when all of them are. So the logits are made twice:
once for the values, and once for the gradient, when autograd brings the factors; see `cross_entropy`. Where the head is
frozen, as under an adapter, once is enough. What nobody asks for is not computed: an entropy, or its gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.nn import functional as F

from ironfn.loss.cross_entropy import (
    add_product,
    log_softmax_at,
    logits_of,
    pieces_of,
    sum_of_rows,
    to_gradient,
    wanted,
)
from ironfn.mesh.axis import Axis
from ironfn.model.matmul import plain
from ironfn.model.modes import forward_ad_is_on
from ironfn.model.weights import Weight


@frozen(eq=False)
class _Asked:
    """Say what is asked of a head. told: the entropies as well; learned: and their gradient."""

    axis: Axis
    vocab: int
    cap: float | None
    chunk: int
    told: bool = False
    learned: bool = False


class _Choice:
    """Hold a choice among the ids for some rows, of which this rank has a part of the ids.

    heat: the rows' temperatures. exps: e^z, where z are the logits over them, less the largest. sums: of e^z over all
    ids. apart: z less its mean under the choice, where an entropy is learned. local, mine: which id of this rank's the
    target is, if it is one.
    """

    def __init__(
        self, x: Tensor, w: Tensor, b: Tensor | None, targets: Tensor, heat: Tensor | None, asked: _Asked
    ) -> None:
        rows, self.heat = w.shape[0], heat
        local = targets - asked.axis.index * rows
        self.mine = (local >= 0) & (local < rows)
        self.local = local.clamp(0, rows - 1)
        logits, self.tanh = logits_of(x, w, b, asked.axis.index * rows, asked.vocab, asked.cap)
        if heat is not None:
            logits.div_(heat[:, None])
        if not asked.told:
            self.exps = logits
            self.log_p, self.sums = log_softmax_at(logits, self.local, self.mine, asked.axis)
            self.entropy = logits.new_empty(0)
            return
        z = logits.sub_(_top(logits, asked.axis)[:, None])
        self.exps = z.exp()
        z.clamp_(min=-1e30)  # an id that is none has -inf
        target = torch.where(self.mine, z.gather(1, self.local[:, None])[:, 0], 0.0)
        joined = torch.stack([target, self.exps.sum(-1), torch.linalg.vecdot(self.exps, z)])
        if asked.axis.size > 1:
            joined = asked.axis.backend.all_reduce(joined)
        target, self.sums, products = joined
        mean = products / self.sums
        self.log_p, self.entropy = target - self.sums.log(), self.sums.log() - mean
        self.apart = z.sub_(mean[:, None]) if asked.learned else None

    def of_entropy(self) -> Tensor:
        """Return the gradient of each row's entropy by its logits: -p_j (z_j - the mean z). To be asked for first."""
        assert self.apart is not None, "the entropy is learned"
        below = self.sums if self.heat is None else self.sums * self.heat
        grad = self.apart.mul_(self.exps).div_(-below[:, None])
        return grad if self.tanh is None else grad.mul_(1 - self.tanh.square())

    def of_log_p(self, factors: Tensor) -> Tensor:
        """Return the gradient of each row's log p by its logits, times its factor, where ``exps`` was."""
        share = -factors if self.heat is None else -factors / self.heat
        to_gradient(self.exps, self.sums, self.local, self.mine, share, self.tanh)
        return self.exps


def _top(logits: Tensor, axis: Axis) -> Tensor:
    top = logits.amax(-1)
    return top if axis.size == 1 else axis.backend.all_gather(top[None], 0).amax(0)


class _Trained(torch.autograd.Function):
    """(x [N, D], w [V, D], b [V], targets [N], heat [N]) -> (log p [N], entropy [N], or [0] where it is not told)."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        x: Tensor, w: Tensor, b: Tensor | None, targets: Tensor, heat: Tensor | None, asked: _Asked
    ) -> tuple[Tensor, Tensor]:
        empty, w = x.new_empty(0, dtype=torch.promote_types(x.dtype, torch.float32)), w.to(x.dtype)
        found = [(empty, empty)]
        for start in range(0, len(x), asked.chunk):
            place = slice(start, start + asked.chunk)
            choice = _Choice(x[place], w, b, targets[place], _at(heat, place), asked)
            found.append((choice.log_p, choice.entropy))
            del choice  # or the next chunk's logits would stand beside these
        log_p, entropy = zip(*found, strict=True)
        return torch.cat(log_p), torch.cat(entropy)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.asked = inputs[5]
        if not ctx.asked.learned:
            ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs[:5])

    @staticmethod
    def backward(ctx: Any, of_log_p: Tensor, of_entropy: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w, b, targets, heat = ctx.saved_tensors
        asked: _Asked = evolve(ctx.asked, told=ctx.asked.learned)
        used = w.to(x.dtype)
        x_grad, w_grad, b_grad = (
            torch.zeros_like(t) if need else None for t, need in zip((x, w, b), ctx.needs_input_grad[:3], strict=True)
        )
        counts = (of_log_p != 0) | (of_entropy != 0) if asked.learned else of_log_p != 0
        for place in counts.nonzero()[:, 0].split(asked.chunk):
            x_part = x[place]
            choice = _Choice(x_part, used, b, targets[place], _at(heat, place), asked)
            more = choice.of_entropy().mul_(of_entropy[place, None]) if asked.learned else None
            grad = choice.of_log_p(of_log_p[place])
            grad = grad if more is None else grad.add_(more)
            if b_grad is not None:
                b_grad += grad.sum(0)
            grad = grad.to(x.dtype)
            if x_grad is not None:
                x_grad[place] = sum_of_rows(grad, used)
            if w_grad is not None:
                add_product(w_grad, grad, x_part)
            del choice, grad, more
        return x_grad, w_grad, b_grad, None, None, None


def _at(heat: Tensor | None, place: Any) -> Tensor | None:
    return None if heat is None else heat[place]


class _Frozen(torch.autograd.Function):
    """(x, w, b, targets, heat) -> (log p, entropy, the gradients of each log p and, if learned, entropy by its own x).

    A token's values depend on its own x alone, so their gradients are known at once, but for a factor. The logits are
    made once; a head that is trained would need its gradient's factors first.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        x: Tensor, w: Tensor, b: Tensor | None, targets: Tensor, heat: Tensor | None, asked: _Asked
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        w = w.to(x.dtype)
        log_p = x.new_empty(len(x), dtype=torch.promote_types(x.dtype, torch.float32))
        entropy = torch.empty_like(log_p if asked.told else log_p[:0])
        own, of_entropy = torch.empty_like(x), torch.empty_like(x if asked.learned else x[:0])
        for start in range(0, len(x), asked.chunk):
            place = slice(start, start + asked.chunk)
            choice = _Choice(x[place], w, b, targets[place], _at(heat, place), asked)
            log_p[place], entropy[place] = choice.log_p, choice.entropy
            if asked.learned:
                of_entropy[place] = sum_of_rows(choice.of_entropy().to(x.dtype), w)
            own[place] = sum_of_rows(choice.of_log_p(torch.ones_like(choice.log_p)).to(x.dtype), w)
            del choice
        return log_p, entropy, own, of_entropy

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.learned = inputs[5].learned
        ctx.mark_non_differentiable(*output[1 + ctx.learned :])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output[2:])

    @staticmethod
    def backward(ctx: Any, *factors: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        total = None
        for own, factor in zip(ctx.saved_tensors, factors[: 1 + ctx.learned], strict=False):
            if factor is not None:
                part = own * factor[:, None].to(own.dtype)
                total = part if total is None else total.add_(part)
        return total, None, None, None, None, None


def token_scores(
    x: Tensor,
    w: Tensor | Weight,
    targets: Tensor,
    axis: Axis,
    *,
    vocab: int,
    bias: Tensor | None = None,
    softcap: float | None = None,
    temperature: Tensor | None = None,
    chunk: int | None = None,
    learned: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return of each target log softmax(logits / temperature)[target], and the entropy of that distribution, in nats.

    As `token_log_probs`. learned: whether the entropies have a gradient.
    """
    return _of_tokens(x, w, targets, bias, temperature, _Asked(axis, vocab, softcap, chunk or 0, True, learned))


def token_log_probs(
    x: Tensor,
    w: Tensor | Weight,
    targets: Tensor,
    axis: Axis,
    *,
    vocab: int,
    bias: Tensor | None = None,
    softcap: float | None = None,
    temperature: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Return log softmax((x wᵀ + bias) / temperature)[target] of each target, float32 [N] (float64 for float64).

    x [N, width], targets and temperature [N], None being 1; the rest as `cross_entropy` has it, but a head that is had
    by pieces is there whole. Under `torch.func` all logits are held.
    """
    return _of_tokens(x, w, targets, bias, temperature, _Asked(axis, vocab, softcap, chunk or 0))[0]


def _of_tokens(
    x: Tensor, w: Tensor | Weight, targets: Tensor, bias: Tensor | None, heat: Tensor | None, asked: _Asked
) -> tuple[Tensor, Tensor]:
    if isinstance(w, Weight):
        w = torch.cat(list(pieces_of(w, x.dtype)))
    if not asked.chunk:  # 32 MiB of logits in float32, or twice 16 MiB
        asked = evolve(asked, chunk=max(64, (1 << (22 if asked.told else 23)) // w.shape[0]))
    if not (plain(x) and plain(w)) or forward_ad_is_on():
        assert asked.axis.size == 1, "torch.func sees one process"
        return _written_out(x, w, targets, bias, heat, asked)
    heat = None if heat is None else heat.to(torch.promote_types(x.dtype, torch.float32))
    arguments = (x, w, bias, targets, heat, asked)
    if wanted(x) and not (wanted(w) or wanted(bias)):
        return _Frozen.apply(*arguments)[:2]  # pyright: ignore[reportOptionalSubscript, reportReturnType]
    if any(map(wanted, (x, w, bias))):
        return _Trained.apply(*arguments)  # pyright: ignore[reportReturnType]
    return _Trained.forward(*arguments)


def _written_out(
    x: Tensor, w: Tensor, targets: Tensor, bias: Tensor | None, heat: Tensor | None, asked: _Asked
) -> tuple[Tensor, Tensor]:
    logits = x @ w[: asked.vocab].t().to(x.dtype)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if bias is not None:
        logits = logits + bias[: asked.vocab]
    if asked.cap is not None:
        logits = (logits / asked.cap).tanh() * asked.cap
    log_p = F.log_softmax(logits if heat is None else logits / heat[:, None], -1)
    entropy = -(log_p.exp() * log_p).sum(-1) if asked.told else log_p.new_empty(0)
    return log_p.gather(1, targets[:, None])[:, 0], entropy if asked.learned else entropy.detach()
