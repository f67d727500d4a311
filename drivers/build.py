"""Turn a spec into the values and pure functions that a run is made of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from attrs import evolve, frozen

from ironfn import tree
from ironfn.algo.experts import router_bias, watch_experts
from ironfn.algo.step import State, Step, make_step, skip, stop, unmoved
from ironfn.data import Dataset, eval_batches, open_dataset, share_at
from ironfn.grad.noise import noise_scale
from ironfn.grad.remat import recompute
from ironfn.grad.value_and_grad import ValueAndGrad, accumulate, value_and_grad
from ironfn.layout.fsdp import fetch
from ironfn.loss.lm import lm_loss
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.model import experts
from ironfn.model.arch import Arch, complete
from ironfn.model.attention import Dropout, by_mask, by_span, written_out
from ironfn.model.forward import Forward, keep
from ironfn.model.init import init
from ironfn.model.transformer import hidden
from ironfn.optim.schedules import make_schedule
from ironfn.spec.records import PrecisionSpec, RunSpec
from ironfn.types import Batch, Loss, Params

from .places import Places, places
from .start import first_weights

ON_NONFINITE = {"stop": stop, "skip": skip}


@frozen
class Job:
    """Hold a run's parts: what it computes, on which data, where.

    how: the forward pass of evaluation and sampling, without dropout and recomputation.
    """

    spec: RunSpec
    arch: Arch
    how: Forward
    mesh: Mesh
    device: torch.device
    train: Dataset
    validation: Dataset | None
    eval_loss: Loss
    places: Places
    step: Step

    @property
    def speaks(self) -> bool:
        """Tell whether this is the rank that speaks and writes for all."""
        return self.mesh.world.index == 0

    def batch(self, step: int) -> Batch:
        """Return this rank's rows of a step, on the CPU."""
        spec = self.spec.train
        return share_at(self.train, step, spec.batch, spec.seed, self.mesh.share, self.mesh.shares)

    def eval_batches(self, data: Dataset) -> Iterator[Batch]:
        """Yield this rank's rows of an evaluation, on the CPU: as many at a time as it trains on."""
        spec = self.spec.train
        rows = spec.micro_batch or spec.batch // self.mesh.shares
        return eval_batches(data, rows, self.spec.report.eval_rows, self.mesh.share, self.mesh.shares)

    def first_state(self, *, drawn: bool = False) -> State:
        """Return the state before the first step. drawn: whatever ``model.init_from`` says, which will be replaced.

        All ranks call this together. ValueError where ``model.init_from`` is not of this model.
        """
        spec = self.spec.train
        dtype = getattr(torch, spec.precision.params)
        fixed = tree.map(lambda x: x.to(self.device), router_bias(self.arch))
        if self.spec.model.init_from is None or drawn:
            params = init(self.arch, spec.seed, self.places.params, self.mesh, dtype)
            params = tree.map(lambda x: x.to(self.device), params)
        else:
            source = Path(self.spec.model.init_from)
            params, given = first_weights(source, self.arch, self.places.params, self.mesh, dtype, self.device)
            fixed = given if fixed else fixed
        extra: Params = {"fixed": fixed} if fixed else {}
        return State(0, params, self.places.optimizer.init(params), extra=extra)

    def noise(self, state: State, batch: Batch) -> dict[str, float]:
        """Measure the gradient noise scale on a batch."""
        how = evolve(self.how, attention=written_out, experts=experts.written_out)
        loss = lm_loss(self.arch, how, chunk=self.spec.train.loss_chunk)
        return noise_scale(loss, state.model, batch, self.mesh)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move a batch, but for ``segment``: where documents begin is read on the host."""
    return {n: x if n == "segment" else x.to(device, non_blocking=True) for n, x in batch.items()}


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the device of a spec's ``train.device`` for one of a machine's ranks.

    ValueError where CUDA is asked for and absent, or has fewer devices than there are ranks.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("train.device is cuda, but torch finds no CUDA device; use auto or cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= (devices := torch.cuda.device_count()):
        raise ValueError(f"rank {local_rank} of this machine has no CUDA device of its own: there are {devices}")
    return torch.device("cuda", local_rank)


def forward(precision: PrecisionSpec) -> Forward:
    """Return how a spec's precision computes: products in ``compute``, the leaves of ``keep_float32`` in float32."""
    same = precision.compute == precision.params
    return Forward(None if same else getattr(torch, precision.compute), tuple(precision.keep_float32))


def build(spec: RunSpec, mesh: Mesh = SINGLE, device: torch.device | None = None) -> Job:
    """Open the data and make the functions of a run. ValueError for whatever does not fit together.

    device: this rank's; None picks one for a process alone.
    """
    device = device or pick_device(spec.train.device)
    train = open_dataset(spec.data, "train")
    arch = complete(spec.model, train.vocab_size)
    if arch.positions == "learned" and spec.data.length > arch.context:
        raise ValueError(f"data.length {spec.data.length} does not fit model.context {arch.context}; shorten the rows")
    if arch.rows % mesh.tp.size:
        what = f"{mesh.tp.size} ranks of mesh.tp cannot share {arch.rows} rows of the vocabulary evenly"
        raise ValueError(f"{what}; set model.pad_vocab_to to {mesh.tp.size}, or a multiple of it")
    where = places(spec, arch, mesh)
    plain = forward(spec.train.precision)
    if spec.mesh.fsdp:
        plain = evolve(plain, fetch=fetch(where.params, mesh))
    how = evolve(
        plain,
        attention=by_mask if spec.train.compile else by_span,
        run=recompute if spec.train.remat else keep,
        dropout=Dropout(arch.dropout, spec.train.seed) if arch.dropout else None,
        jitter=spec.train.seed if arch.moe is not None and arch.moe.jitter else None,
    )
    body = torch.compile(hidden, fullgraph=True, dynamic=False) if spec.train.compile else hidden
    chunk = spec.train.loss_chunk
    return Job(
        spec=spec,
        arch=arch,
        how=plain,
        mesh=mesh,
        device=device,
        train=train,
        validation=open_dataset(spec.data, "validation") if spec.data.split.validation else None,
        eval_loss=lm_loss(arch, plain, chunk=chunk, penalties=False),
        places=where,
        step=make_step(
            _gradient(lm_loss(arch, how, chunk=chunk, body=body), spec),
            where.optimizer,
            make_schedule(spec.optim.schedule, spec.optim.lr, spec.train.steps),
            table=where.params,
            mesh=mesh,
            updates=where.updates,
            carry=unmoved if arch.moe is None else watch_experts(arch),
            bucket_bytes=spec.mesh.bucket_mb << 20,
            clip=spec.optim.clip,
            on_nonfinite=ON_NONFINITE[spec.optim.nonfinite],
            donate=True,
        ),
    )


def _gradient(loss: Loss, spec: RunSpec) -> ValueAndGrad:
    rows, vg = spec.train.micro_batch, value_and_grad(loss)
    return vg if rows is None else accumulate(vg, rows)
