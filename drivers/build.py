"""Turn a spec into the values and pure functions that a run is made of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from attrs import evolve, frozen
from tokenizers import Tokenizer
from torch.nn import functional as F

from ironfn import tree
from ironfn.algo.experts import router_bias, watch_experts
from ironfn.algo.step import State, Step, make_step, skip, stop, unmoved
from ironfn.checkpoint import as_tree
from ironfn.data import Dataset, Lesson, eval_batches, open_dataset, share_at
from ironfn.data.prompts import open_prompts
from ironfn.grad.noise import noise_scale
from ironfn.grad.remat import recompute
from ironfn.grad.value_and_grad import ValueAndGrad, accumulate, value_and_grad
from ironfn.layout.fsdp import fetch
from ironfn.loss.lm import lm_loss
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.model import experts
from ironfn.model.adapters import Adapt, adapting, first_adapter, frozen_base
from ironfn.model.arch import Arch, complete
from ironfn.model.attention import Dropout, by_mask, by_span, written_out
from ironfn.model.forward import Forward, keep, unadapted
from ironfn.model.init import init
from ironfn.model.virtual import with_virtual
from ironfn.optim.schedules import make_schedule
from ironfn.spec.records import PrecisionSpec, RunSpec
from ironfn.types import Batch, Loss, Params

from .objectives import losses, referred
from .places import Places, places
from .start import first_weights

ON_NONFINITE = {"stop": stop, "skip": skip}


@frozen
class Job:
    """Hold a run's parts: what it computes, on which data, where.

    how: the forward pass of evaluation and sampling, without dropout and recomputation. lesson: how examples are
    taught, where the data are those. base, reference: the checksums of the model under an adapter, and of the model
    that a policy is held to, or "".
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
    lesson: Lesson | None = None
    base: str = ""
    reference: str = ""

    @property
    def reads(self) -> bool:
        """Tell whether the loss is that of text, in nats a token."""
        return self.spec.data.form in ("documents", "examples")

    @property
    def rows(self) -> int:
        """Count the rows that this rank computes together."""
        spec = self.spec.train
        return spec.micro_batch or spec.batch // self.mesh.shares

    @property
    def adapts(self) -> bool:
        """Tell whether the model itself is frozen, and something beside it is trained."""
        return self.spec.adapter.kind != "none"

    @property
    def vectors(self) -> int:
        """Count the trained vectors that stand before every text."""
        return self.spec.adapter.tokens if self.spec.adapter.kind in ("prompt", "prefix") else 0

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
        return eval_batches(data, self.rows, self.spec.report.eval_rows, self.mesh.share, self.mesh.shares)

    def here(self, batch: Batch) -> Batch:
        """Return a batch on this rank's device, with places for the vectors that are trained before its texts."""
        if self.vectors:
            batch = with_virtual(batch, self.vectors, self.mesh.tp.size if self.mesh.sequence_parallel else 1)
        return to_device(batch, self.device)

    def question(self, tokenizer: Tokenizer, prompt: str) -> list[int]:
        """Return the ids that a prompt of the spec becomes: a text's beginning, or what an example asks."""
        if self.lesson is not None:
            return self.lesson.question(prompt)
        return [self.train.eos, *tokenizer.encode(prompt, add_special_tokens=False).ids]

    @property
    def ends(self) -> frozenset[int]:
        """The ids at which a text that was asked for ends."""
        taught = frozenset[int]() if self.lesson is None else self.lesson.teaching.stops | {self.lesson.teaching.end}
        return taught | {self.train.eos}

    def first_state(self, *, drawn: bool = False) -> State:
        """Return the state before the first step. drawn: with any numbers where a checkpoint will replace them.

        All ranks call this together. ValueError where ``model.init_from`` is not of this model.
        """
        spec, layout = self.spec.train, self.places.params
        dtype = getattr(torch, spec.precision.params)
        fixed = tree.map(lambda x: x.to(self.device), router_bias(self.arch))
        if self.spec.model.init_from is None or (drawn and not self.adapts):
            params = init(self.arch, spec.seed, layout, self.mesh, dtype)
            params = tree.map(lambda x: x.to(self.device), params)
        else:
            source = Path(self.spec.model.init_from)
            params, given = first_weights(source, self.arch, layout, self.mesh, dtype, self.device, spec.seed)
            fixed = given if fixed else fixed
        if self.adapts:
            whole = {name: each for name, each in params.items() if name != "score"}  # which is trained beside it
            fixed = frozen_base(self.spec.adapter, tree.merge(whole, fixed), layout, self.mesh)
            adapter = first_adapter(self.spec.adapter, self.arch, fixed, spec.seed, layout, self.mesh)
            adapter = tree.map(lambda x: x.to(self.device), adapter)
            params = adapter if "score" not in params else {**adapter, "score": params["score"]}
        extra: Params = {"fixed": fixed} if fixed else {}
        return State(0, params, self.places.optimizer.init(params), extra=extra)

    def saved(self, state: State) -> Params:
        """Return the leaves of a checkpoint: all of a state, but for the model under an adapter."""
        return as_tree(evolve(state, extra={}) if self.adapts else state)

    def noise(self, state: State, batch: Batch) -> dict[str, float]:
        """Measure the gradient noise scale on a batch."""
        how = evolve(self.how, attention=written_out, experts=experts.written_out)
        loss = lm_loss(self.arch, how, chunk=self.spec.train.loss_chunk)
        return noise_scale(loss, state.model, batch, self.mesh)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move a batch, but for ``segment`` and ``until``: where documents begin is read on the host."""
    return {n: x if n in ("segment", "until") else x.to(device, non_blocking=True) for n, x in batch.items()}


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


def forward(precision: PrecisionSpec, *, mixed: bool = False) -> Forward:
    """Return how a spec's precision computes: products in ``compute``, the leaves of ``keep_float32`` in float32.

    mixed: whether there are leaves of another dtype than ``params``, such as those of an adapter.
    """
    same = precision.compute == precision.params and not (mixed and precision.params != "float32")
    return Forward(None if same else getattr(torch, precision.compute), tuple(precision.keep_float32))


def build(spec: RunSpec, mesh: Mesh = SINGLE, device: torch.device | None = None, lesson: Lesson | None = None) -> Job:
    """Open the data and make the functions of a run. ValueError for whatever does not fit together.

    device: this rank's; None picks one for a process alone. lesson: as the data were prepared with.
    """
    device = device or pick_device(spec.train.device)
    train = opened(spec, "train", lesson)
    arch = complete(spec.model, train.vocab_size)
    if arch.positions == "learned" and spec.data.length > arch.context:
        raise ValueError(f"data.length {spec.data.length} does not fit model.context {arch.context}; shorten the rows")
    if arch.rows % mesh.tp.size:
        what = f"{mesh.tp.size} ranks of mesh.tp cannot share {arch.rows} rows of the vocabulary evenly"
        raise ValueError(f"{what}; set model.pad_vocab_to to {mesh.tp.size}, or a multiple of it")
    if spec.data.form == "prompts":  # a model may write ids that its tokenizer does not know
        train = evolve(train, byte_lengths=F.pad(train.byte_lengths, (0, arch.vocab - len(train.byte_lengths))))
    where = places(spec, arch, mesh)
    plain, how = _forwards(spec, arch, where, mesh)
    reference = referred(spec, arch, plain, where.params, mesh, device)
    loss, eval_loss = losses(spec, arch, plain, how, reference)
    return Job(
        spec=spec,
        arch=arch,
        how=plain,
        mesh=mesh,
        device=device,
        train=train,
        validation=opened(spec, "validation", lesson) if spec.data.split.validation else None,
        eval_loss=eval_loss,
        places=where,
        step=make_step(
            _gradient(loss, spec),
            where.optimizer,
            make_schedule(spec.optim.schedule, spec.optim.lr, spec.train.steps),
            table=where.params,
            mesh=mesh,
            updates=where.updates,
            carry=unmoved if arch.moe is None or spec.adapter.kind != "none" else watch_experts(arch),
            bucket_bytes=spec.mesh.bucket_mb << 20,
            clip=spec.optim.clip,
            on_nonfinite=ON_NONFINITE[spec.optim.nonfinite],
            donate=True,
        ),
        lesson=lesson,
    )


def opened(spec: RunSpec, split: str, lesson: Lesson | None) -> Dataset:
    """Open a split of a run's data. ValueError for rows that cannot be used."""
    if spec.data.form != "prompts":
        return open_dataset(spec.data, split, lesson)
    assert lesson is not None, "prompts are written with a model's tokenizer"
    return open_prompts(spec.data, split, lesson, spec.data.length + 1 - spec.grpo.tokens, spec.grpo.rewards)


def _forwards(spec: RunSpec, arch: Arch, where: Places, mesh: Mesh) -> tuple[Forward, Forward]:
    """Return how the model is computed to evaluate it, and to train it: the same, with what only training wants."""
    adapts = spec.adapter.kind != "none"
    plain = forward(spec.train.precision, mixed=adapts)
    if spec.mesh.fsdp:
        plain = evolve(plain, fetch=fetch(where.params, mesh))
    adapt: list[Adapt] = [unadapted, unadapted]
    if adapts:
        adapt = [adapting(spec.adapter, mesh, seed, plain.compute or torch.float32) for seed in (None, spec.train.seed)]
    plain = evolve(plain, adapt=adapt[0])
    return plain, evolve(
        plain,
        adapt=adapt[1],
        attention=by_mask if spec.train.compile else by_span,
        run=recompute if spec.train.remat else keep,
        dropout=Dropout(arch.dropout, spec.train.seed) if arch.dropout else None,
        jitter=spec.train.seed if arch.moe is not None and arch.moe.jitter else None,
    )


def _gradient(loss: Loss, spec: RunSpec) -> ValueAndGrad:
    rows, vg = spec.train.micro_batch, value_and_grad(loss)
    return vg if rows is None else accumulate(vg, rows)
