"""Choose what a run's spec asks its model to learn: the loss of its training and the one of its evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from attrs import evolve

from ironfn import tree
from ironfn.layout.table import Placement
from ironfn.loss.lm import lm_loss
from ironfn.loss.pairs import Reference, base_model, frozen_model, in_batch, nobody, pair_loss, unpaired_loss
from ironfn.loss.policy import Objective as Policy
from ironfn.loss.policy import cispo, clipped, policy_loss, sapo
from ironfn.loss.preference import Objective, dpo, hinge, ipo, kto, orpo, robust, simpo, with_supervised
from ironfn.loss.reward import reward_loss
from ironfn.mesh.axis import Mesh
from ironfn.model.adapters import frozen_base
from ironfn.model.arch import Arch
from ironfn.model.forward import Forward
from ironfn.model.transformer import hidden
from ironfn.spec.records import DpoSpec, GrpoSpec, RunSpec
from ironfn.types import Loss, Params

from .start import first_weights


def losses(spec: RunSpec, arch: Arch, plain: Forward, how: Forward, reference: Reference) -> tuple[Loss, Loss]:
    """Return the loss that is trained, computed by ``how``, and the one of evaluations, computed by ``plain``.

    What is preferred is learned without dropout and jitter, which would part a policy from its reference.
    """
    chunk, form = spec.train.loss_chunk, spec.data.form
    if form == "prompts":
        return policy_loss(
            arch, policy_objective(spec.grpo), evolve(how, dropout=None, jitter=None, adapt=plain.adapt), chunk=chunk,
            penalties=spec.grpo.router_losses,
        ), lm_loss(arch, plain)  # fmt: skip
    if form in ("documents", "examples"):
        body = torch.compile(hidden, fullgraph=True, dynamic=False) if spec.train.compile else hidden
        return lm_loss(arch, how, chunk=chunk, body=body), lm_loss(arch, plain, chunk=chunk, penalties=False)
    how = evolve(how, dropout=None, jitter=None, adapt=plain.adapt)
    if spec.model.score:
        center = spec.reward.center
        return reward_loss(arch, how, center=center), reward_loss(arch, plain, center=center, penalties=False)
    kept = spec.dpo.router_losses
    if form == "judged":
        judge = partial(unpaired_loss, arch, kto(spec.dpo.beta, spec.dpo.liked, spec.dpo.disliked), reference)
        return judge(how, chunk=chunk, penalties=kept), judge(plain, chunk=chunk, penalties=False)
    compare = partial(pair_loss, arch, objective(spec.dpo), reference)
    return compare(how, chunk=chunk, penalties=kept), compare(plain, chunk=chunk, penalties=False)


def objective(spec: DpoSpec) -> Objective:
    """Return what a spec compares pairs by."""
    beta = spec.beta
    made = {
        "dpo": lambda: dpo(beta, spec.smoothing),
        "robust": lambda: robust(beta, spec.smoothing),
        "hinge": lambda: hinge(beta),
        "ipo": lambda: ipo(beta),
        "simpo": lambda: simpo(beta, spec.margin),
        "orpo": lambda: orpo(beta),
    }[spec.objective]()
    return with_supervised(made, spec.supervised) if spec.supervised else made


def policy_objective(spec: GrpoSpec) -> Policy:
    """Return what a spec makes of the tokens that a policy drew."""
    surrogate = {
        "clipped": lambda: clipped(spec.low, spec.high, spec.dual, whole=spec.whole),
        "cispo": lambda: cispo(1 + spec.high),
        "sapo": sapo,
    }[spec.loss]()
    kl = (spec.kl, spec.kl_weight) if spec.kl != "none" and spec.kl_in == "loss" else None
    return Policy(surrogate, spec.mean, spec.tokens, kl, spec.entropy)


def refers(spec: RunSpec) -> bool:
    """Tell whether a run holds its model to a reference."""
    if spec.data.form == "prompts":
        return spec.grpo.kl != "none"
    return spec.data.form in ("pairs", "judged") and not spec.model.score and spec.dpo.refers


def reference_of(spec: RunSpec) -> Path:
    """Return where the reference of a run lies."""
    return Path(_named(spec) or spec.model.init_from or "")


def _named(spec: RunSpec) -> str | None:
    return (spec.grpo if spec.data.form == "prompts" else spec.dpo).reference


def referred(
    spec: RunSpec, arch: Arch, plain: Forward, layout: Mapping[str, Placement], mesh: Mesh, device: torch.device
) -> Reference:
    """Return what gives the reference's log-probabilities in a step.

    It is the batch where they are precomputed, the model under an adapter, or else a model that is loaded, and frozen,
    beside the trained one. All ranks call this together.
    """
    if not refers(spec):
        return nobody
    if spec.dpo.precompute or spec.data.form == "prompts":
        return in_batch
    if under_adapter(spec):
        return base_model(arch, plain, spec.train.loss_chunk)
    return loaded(spec, arch, plain, layout, mesh, device)


def loaded(
    spec: RunSpec, arch: Arch, plain: Forward, layout: Mapping[str, Placement], mesh: Mesh, device: torch.device
) -> Reference:
    """Load the reference: in the form of the model under an adapter, where it is that. All ranks call this together."""
    return frozen_model(reference_params(spec, arch, layout, mesh, device), arch, plain, spec.train.loss_chunk)


def reference_params(
    spec: RunSpec, arch: Arch, layout: Mapping[str, Placement], mesh: Mesh, device: torch.device
) -> Params:
    """Load this rank's part of the reference. All ranks call this together."""
    dtype = getattr(torch, spec.train.precision.params)
    params, fixed = first_weights(reference_of(spec), arch, layout, mesh, dtype, device)
    whole = tree.merge(params, fixed)
    if under_adapter(spec):
        whole = frozen_base(spec.adapter, whole, layout, mesh)
    return whole


def under_adapter(spec: RunSpec) -> bool:
    """Tell whether the reference is the model under an adapter."""
    return spec.adapter.kind != "none" and _named(spec) is None
