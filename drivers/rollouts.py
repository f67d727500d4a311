"""Write to prompts, grade what was written, and give it to the updates that learn from it."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve
from tokenizers import Tokenizer

from ironfn import rng, tree
from ironfn.algo.step import Metrics, State
from ironfn.checkpoint.files import replace_whole
from ironfn.data.groups import Completion, Group, lay_groups
from ironfn.data.prompts import Prompt, Prompts
from ironfn.generate.engine import Generator
from ironfn.generate.rollout import Written, roll_out
from ironfn.generate.sampling import Sampling
from ironfn.loss.log_probs import asked_places, place_log_probs
from ironfn.loss.policy import divergence
from ironfn.mesh.agree import each
from ironfn.mesh.axis import SINGLE
from ironfn.model import skinny
from ironfn.model.adapters import is_adapter, merge
from ironfn.model.forward import unadapted
from ironfn.model.prepared import packed
from ironfn.rewards.manager import Reward, grade
from ironfn.rewards.values import Completion as Answer
from ironfn.types import Batch, Params

from .build import Job
from .doubts import unrewarded
from .failures import Failure, together
from .objectives import reference_params, refers, under_adapter
from .samples import (
    Rollout,
    Sample,
    as_json,
    best,
    differs,
    mean_of,
    parts_of,
    passes,
    sealed,
    taught,
    told_of,
    unsealed,
    written,
)

_ROWS_APART = 1 << 24
"""How far the rows of two updates are apart in the numbering that keys dropout."""


class Rollouts:
    """Give each update its batch. All ranks call every method together.

    A rollout is kept in ``folder``, from where a run that was stopped inside of it goes on.
    """

    def __init__(self, job: Job, folder: Path, rewards: Sequence[Reward]) -> None:
        assert isinstance(job.train, Prompts)
        self.job, self.folder, self.rewards, self.prompts = job, folder, rewards, job.train
        self.tokenizer = Tokenizer.from_file(str(job.train.tokenizer))
        self.reference: Params | None = None
        if refers(job.spec) and not under_adapter(job.spec):
            self.reference = reference_params(job.spec, job.arch, job.places.params, job.mesh, job.device)
        self.now: Rollout | None = None

    def __call__(self, state: State) -> tuple[Batch, Metrics]:
        """Return this rank's rows of the next update, on the CPU, and, where it is new, what its rollout is like."""
        first = state.step - state.step % self.job.spec.grpo.updates
        if self.now is not None and self.now.step == first:
            return self._batch(self.now, state), {}
        if state.step > first:  # told of, before the run was stopped
            self.now = self._kept(first)
            return self._batch(self.now, state), {}
        self.now = self._rolled(first, state)
        spec = self.job.spec
        return self._batch(self.now, state), told_of(self.now, self.rewards, spec.grpo, spec.train.seed)

    def answered(
        self,
        state: State,
        prompts: Sequence[Prompt],
        streams: Sequence[tuple[int | str, ...]],
        n: int,
        temperature: float,
    ) -> list[list[Sample]]:
        """Return ``n`` graded completions of each prompt. The ranks of dp share the prompts where they can."""
        written = self._written(state, prompts, streams, n, temperature)
        job = self.job

        def work() -> bytes:
            if not job.speaks:
                return b""
            answers = [
                [Answer(prompt.text, self.text(one), prompt.row, one.ids) for one in group]
                for prompt, group in zip(prompts, written, strict=True)
            ]
            graded = grade(self.rewards, answers)
            return json.dumps([[(one.total, parts_of(one)) for one in group] for group in graded]).encode()

        first, *_ = each(job.mesh, together(job.mesh, job.device, work), job.device)
        return [
            [Sample(one, *given) for one, given in zip(group, told, strict=True)]
            for group, told in zip(written, json.loads(first), strict=True)
        ]

    def evaluated(self, state: State) -> Metrics:
        """Return how the policy answers the validation split: the likeliest texts, and several tries of each prompt.

        accuracy: the mean reward of the likeliest texts. pass_k: the share of prompts that get the highest reward there
        is in one of k tries, and mean_k their mean reward.
        """
        data, grpo = self.job.validation, self.job.spec.grpo
        if not isinstance(data, Prompts):
            return {}
        count = min(self.job.spec.report.eval_rows, data.rows)
        prompts = [data.prompts[k * data.rows // count] for k in range(count)]
        streams: list[tuple[int | str, ...]] = [("evaluation", k) for k in range(count)]
        likeliest = self.answered(state, prompts, streams, 1, 0.0)
        if state.step == 0:
            self._require_rewards(likeliest, "the evaluation before the first step")
        told = {"accuracy": mean_of(likeliest)}
        if grpo.tries:
            tried = self.answered(state, prompts, streams, grpo.tries, grpo.temperature)
            passed = [any(passes(one, self.rewards) for one in group) for group in tried]
            told |= {f"pass_{grpo.tries}": statistics.fmean(passed), f"mean_{grpo.tries}": mean_of(tried)}
        return told

    def readable(self) -> list[dict[str, Any]]:
        """Return what was written last, a row for each prompt."""
        assert self.now is not None
        prompts = self.prompts.at(self.now.numbers, self.job.spec.train.seed)
        return [
            {"step": self.now.step + 1, "prompt": prompt.text, "completions": [
                {"text": self.text(one.written), "reward": one.reward, "ended": one.written.reason, **one.parts}
                for one in group
            ]}
            for prompt, group in zip(prompts, self.now.groups, strict=True)
        ]  # fmt: skip

    def text(self, one: Written) -> str:
        """Return what a completion says, without the token that ended it."""
        ids = one.ids[:-1] if one.ids and one.ids[-1] in self.job.ends else one.ids
        return self.tokenizer.decode(list(ids))

    def forget(self, step: int) -> None:
        """Delete the rollouts that no checkpoint of this step or a later one stands in. Rank 0 alone."""
        first = step - step % self.job.spec.grpo.updates
        for path in self.folder.glob("*.json"):
            if path.stem.isdecimal() and int(path.stem) < first:
                path.unlink()

    def _rolled(self, first: int, state: State) -> Rollout:
        """Write, grade, and write to other prompts where all completions of one were worth the same."""
        grpo, seed = self.job.spec.grpo, self.job.spec.train.seed
        start = first // grpo.updates * grpo.prompts * (1 + grpo.refill)
        rollout = Rollout(first, grpo.temperature_at(first), [], [])
        for turn in range(1 + grpo.refill):
            numbers = list(range(start + turn * grpo.prompts, start + (turn + 1) * grpo.prompts))
            streams: list[tuple[int | str, ...]] = [("rollout", first, number) for number in numbers]
            found = self.answered(state, self.prompts.at(numbers, seed), streams, grpo.group, rollout.temperature)
            groups = [[self._shaped(sample) for sample in group] for group in found]
            groups = self._held(state, evolve(rollout, numbers=numbers, groups=groups))
            rollout = evolve(rollout, numbers=rollout.numbers + numbers, groups=rollout.groups + groups)
            self._require_rewards(rollout.groups, f"the rollout of step {first + 1}")
            if sum(map(differs, rollout.groups)) >= grpo.prompts:
                break
        rollout = best(rollout, grpo.prompts)
        if self.job.speaks:
            self.folder.mkdir(exist_ok=True)
            replace_whole(self._path(first), sealed(rollout))
        return rollout

    def _require_rewards(self, groups: Sequence[Sequence[Sample]], where: str) -> None:
        """Stop the run where no text has a reward: all ranks know the same samples."""
        if (wrong := unrewarded(groups, where)) is not None:
            raise Failure(wrong, speaks=self.job.speaks)

    def _shaped(self, sample: Sample) -> Sample:
        """Take off what a text is too long by (DAPO, arXiv 2503.14476, eq. 13)."""
        grpo = self.job.spec.grpo
        if sample.reward is None or not grpo.overlong:
            return sample
        over = max(0, len(sample.written.ids) - (grpo.tokens - grpo.overlong))
        return evolve(sample, reward=sample.reward - over / grpo.overlong)

    def _held(self, state: State, rollout: Rollout) -> list[list[Sample]]:
        """Take off each text's divergence from the reference, where that belongs into the reward."""
        grpo, job = self.job.spec.grpo, self.job
        if grpo.kl == "none" or grpo.kl_in == "loss":
            return rollout.groups
        done: list[list[Sample]] = []
        for prompt, group in zip(self.prompts.at(rollout.numbers, job.spec.train.seed), rollout.groups, strict=True):
            texts = [Completion(one.written.ids, 0.0, {"drawn": one.written.log_probs}) for one in group]
            arrays = lay_groups([Group(prompt.ids, texts)], job.spec.data.length, job.train.eos)
            batch = {name: torch.from_numpy(values) for name, values in arrays.items()}
            batch |= _at(rollout.temperature, batch) | {"row": torch.arange(len(batch["tokens"]))}
            batch["reference"] = self._referred(state, batch)
            places = asked_places(batch)
            apart = places.sums(divergence(grpo.kl, *(places.of(name, batch) for name in ("drawn", "reference"))))
            sums = iter(apart.tolist())
            off = [grpo.kl_weight * next(sums) if one.written.ids else 0.0 for one in group]
            done.append([
                one if one.reward is None else evolve(one, reward=one.reward - less)
                for one, less in zip(group, off, strict=True)
            ])  # fmt: skip
        return done

    def _written(
        self,
        state: State,
        prompts: Sequence[Prompt],
        streams: Sequence[tuple[int | str, ...]],
        n: int,
        temperature: float,
    ) -> list[list[Written]]:
        job, mesh = self.job, self.job.mesh
        apart = mesh.dp.size > 1 and mesh.ep.size == 1 and not job.spec.mesh.fsdp
        mine = range(mesh.dp.index, len(prompts), mesh.dp.size) if apart else range(len(prompts))
        generator = self._generator(state)
        generator = evolve(generator, mesh=evolve(mesh, dp=SINGLE.dp, world=mesh.tp) if apart else mesh)
        sampling = Sampling(temperature, seed=job.spec.train.seed)
        done = roll_out(
            generator, [prompts[k].ids for k in mine], n, job.spec.grpo.tokens, sampling, job.ends,
            [streams[k] for k in mine],
        )  # fmt: skip
        if not apart:
            return done
        said = json.dumps([[k, [as_json(one) for one in group]] for k, group in zip(mine, done, strict=True)])
        parts = [json.loads(data) for data in each(mesh, said.encode(), job.device)]
        told: dict[int, Any] = {k: group for part in parts for k, group in part}
        return [[written(one) for one in told[k]] for k in range(len(prompts))]

    def _generator(self, state: State) -> Generator:
        """Return the policy as it is now; on a CPU its matrices are laid out for few rows, an adapter merged into them.

        That takes as much memory again while it writes.
        """
        job, mesh = self.job, self.job.mesh
        params, arch, how = state.model, job.arch, job.how
        precision = job.spec.train.precision
        exact = precision.params == precision.compute == "float32"  # or merging would round once more
        if exact and job.device.type == "cpu" and mesh.tp.size == mesh.ep.size == 1 and not job.spec.mesh.fsdp:
            if job.adapts:
                params, arch = merge(job.spec.adapter, arch, tree.branch(state.extra, "fixed"), state.params)
                how = evolve(how, adapt=unadapted)
            params, arch = packed(params, arch, skinny.blocked)
        return Generator(params=params, arch=arch, how=how, version=state.step, routes=job.spec.grpo.replay_routing)

    def _batch(self, rollout: Rollout, state: State) -> Batch:
        """Lay the part of the rollout that this update learns from into rows, and return this rank's."""
        job, grpo, mesh = self.job, self.job.spec.grpo, self.job.mesh
        turn, part = divmod(state.step - rollout.step, grpo.batches)
        seed = job.spec.train.seed
        groups = taught(rollout, self.prompts.at(rollout.numbers, seed), self.rewards, grpo, job.arch, seed)
        order = rng.generator(seed, "replay", rollout.step, turn)
        chosen = torch.randperm(len(groups), generator=order).tensor_split(grpo.batches)[part].tolist()
        together_ = mesh.shares * (job.spec.train.micro_batch or 1)
        texts = [len(one.ids) for group in groups for one in group.completions]
        share = sum(texts) / max(len(texts), 1)
        arrays = lay_groups(
            [groups[k] for k in chosen], job.spec.data.length, job.train.eos, rows=together_,
            step=math.lcm(16, mesh.tp.size), share=share,
        )  # fmt: skip
        rows = len(arrays["tokens"]) // mesh.shares
        mine = slice(mesh.share * rows, (mesh.share + 1) * rows)
        batch = {name: torch.from_numpy(values[mine]) for name, values in arrays.items()}
        numbers = np.arange(mine.start, mine.stop) + state.step * _ROWS_APART
        batch |= _at(rollout.temperature, batch) | {"row": torch.from_numpy(numbers)}
        if refers(job.spec):
            batch["reference"] = self._referred(state, batch)
        return batch

    @torch.no_grad()
    def _referred(self, state: State, batch: Batch) -> torch.Tensor:
        """Return the reference's log-probabilities at the places that are learned from."""
        job, size = self.job, self.job.spec.train.micro_batch or len(batch["tokens"])
        model = self.reference or tree.select(state.model, lambda path: not is_adapter(path))
        done = torch.zeros_like(batch["drawn"])
        for start in range(0, len(done), size):
            rows = {name: x[start : start + size] for name, x in batch.items() if name != "experts"}  # it has its own
            here = job.here(rows)
            places = asked_places(here)
            log_p, _ = place_log_probs(model, here, job.arch, job.mesh, job.how, places, job.spec.train.loss_chunk)
            done[start : start + size].view(-1)[places.at.cpu()] = log_p.cpu().to(done)
        return done

    def _path(self, first: int) -> Path:
        return self.folder / f"{first:08d}.json"

    def _kept(self, first: int) -> Rollout:
        """Read a rollout that an earlier process made: found by rank 0, the same on all."""
        job = self.job

        def read() -> bytes:
            return self._path(first).read_bytes() if job.speaks and self._path(first).exists() else b""

        data, *_ = each(job.mesh, together(job.mesh, job.device, read), job.device)
        if not data:
            raise ValueError(
                f"{self._path(first)} is gone: this run stands in the middle of what was written at step {first}; put "
                "it back, or begin from an earlier checkpoint"
            )
        if (rollout := unsealed(data, first)) is None:
            raise ValueError(f"{self._path(first)} is damaged; put it back, or begin from an earlier checkpoint")
        return rollout


def _at(temperature: float, batch: Batch) -> Batch:
    """Say at which temperature all of a batch was drawn; of 1 nothing has to be said."""
    return {} if temperature == 1 else {"temperature": torch.full_like(batch["drawn"], temperature)}
