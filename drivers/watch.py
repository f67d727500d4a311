"""Watch a run: every rank measures and evaluates its part, one of them tells the file, the console and the trackers."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Generator, Hashable, Iterator
from contextlib import contextmanager

import torch
import xxhash
from attrs import Factory, asdict, define, evolve
from tokenizers import Tokenizer

from ironfn.algo.step import Metrics, State
from ironfn.checkpoint import steps
from ironfn.data.packed import PackedStore
from ironfn.data.pairs import PairStore
from ironfn.data.prompts import Prompts
from ironfn.generate import engine
from ironfn.generate.engine import Request, Token, complete
from ironfn.generate.sampling import Sampling
from ironfn.mesh.axis import Mesh
from ironfn.model.counting import flops_per_token, parameters
from ironfn.report.evaluation import bits_per_byte, evaluate, target_bytes
from ironfn.report.meter import Meter, peak_memory
from ironfn.report.mfu import find_peak, mfu
from ironfn.report.rows import EvaluationRow, MetricsFile, RunRow, TrainRow, Value, as_dict, read_rows, trim
from ironfn.types import Batch

from .build import Job
from .console import Console
from .doubts import Doubts
from .places import trained_shapes
from .rollouts import Rollouts
from .rundir import RunDir
from .trackers import Trackers, open_trackers

KNOWN = ("step", "loss", "grad_norm", "lr", "tokens", "skipped")


@define
class Voice:
    """Tell everyone who watches: only rank 0 has one."""

    place: RunDir
    console: Console
    trackers: Trackers
    rows: MetricsFile

    def train(self, row: TrainRow, fingerprint: str, show: bool) -> None:
        """Write a step's row, with the checksum of its batch. show: the console and the trackers hear of it as well.

        Metrics of single experts, whose names have a slash, are for the file alone: there may be thousands.
        """
        self.rows.write(evolve(row, extra={**row.extra, "batch": fingerprint}))
        if show:
            row = evolve(row, extra={name: value for name, value in row.extra.items() if "/" not in name})
            self.console.train(row)
            self.trackers.log(row.step, as_dict(row))

    def evaluation(self, row: EvaluationRow) -> None:
        """Write and show an evaluation."""
        self.rows.write(row)
        self.console.evaluation(row)
        self.trackers.log(row.step, as_dict(row))

    def completions(self, rollouts: Rollouts) -> None:
        """Write what the policy wrote, and what it was worth, a prompt a line."""
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rollouts.readable())
        try:
            with self.place.completions.open("a", encoding="utf-8", errors="replace") as file:
                file.write(lines)
        except OSError as error:
            error.filename = str(self.place.completions)
            raise

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Write and show how the model continued a prompt."""
        with self.place.samples.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "prompt": prompt, "text": text}, ensure_ascii=False) + "\n")
        self.console.sample(step, prompt, text)
        self.trackers.text(step, prompt, text)


@define
class Watch:
    """Measure how the run goes, on all ranks together. peak: of one device; rank 0 knows it."""

    job: Job
    voice: Voice | None
    meter: Meter
    tokenizer: Tokenizer
    flops: float
    peak: float
    rollouts: Rollouts | None = None
    doubts: Doubts = Factory(Doubts)

    def roll_out(self, state: State) -> tuple[Batch, Metrics]:
        """Return an update's batch of what the policy wrote, and tell what that was where it is new."""
        assert self.rollouts is not None
        batch, told = self.rollouts(state)
        if self.voice is not None and told:
            self.voice.completions(self.rollouts)
            for line in self.doubts.about(told, self.job.spec.grpo.tokens):
                self.voice.console.warn(line)
        return batch, told

    def forget(self, place: RunDir) -> None:
        """Delete what was written before the oldest checkpoint."""
        kept = steps(place.checkpoints) if self.rollouts is not None and self.voice is not None else []
        if self.rollouts is not None and kept:
            self.rollouts.forget(min(kept))

    def step(self, state: State, batch: Batch, metrics: Metrics, stopped: Callable[[], str | None]) -> bool:
        """Record a step; show every ``report.log_every``-th. Return whether any rank has been told to stop."""
        job, spec = self.job, self.job.spec
        told = stopped() is not None
        size, places, memory, stop, fingerprint = seen(batch, job.train.byte_lengths, told, job.mesh, job.device)
        tokens = round(metrics["tokens"]) if job.reads else places
        pace, left = self.meter.look(state.step, tokens)
        if self.voice is None:
            return stop
        nats = metrics.get("cross_entropy", metrics["loss"])  # a loss may hold penalties that are no text
        extra: dict[str, Value] = {name: value for name, value in metrics.items() if name not in KNOWN}
        if not job.reads:
            size, extra = 0, extra | {("texts" if self.rollouts else "pairs"): metrics["tokens"]}
        row = TrainRow(
            step=state.step,
            loss=metrics["loss"],
            bits_per_byte=bits_per_byte(nats * metrics["tokens"], size),
            lr=metrics["lr"],
            grad_norm=metrics["grad_norm"],
            tokens_per_s=pace,
            mfu=mfu(self.flops, pace * places / max(tokens, 1), self.peak, devices=job.mesh.world.size),
            memory=memory,
            seconds=self.meter.seconds,
            left=left,
            skipped=state.skipped,
            extra=extra,
        )
        shown = state.step % spec.report.log_every == 0 or state.step in (1, spec.train.steps)
        self.voice.train(row, fingerprint, shown)
        return stop

    def look_closer(self, state: State) -> None:
        """Evaluate on the validation split and continue the fixed prompts."""
        job = self.job
        with self.meter.away():
            if self.rollouts is not None:
                told = self.rollouts.evaluated(state)
                if self.voice is not None and told:
                    self.voice.evaluation(answers_row(state.step, self.meter.seconds, told))
                    if math.isnan(told["accuracy"]):
                        self.voice.console.warn("no answer of this evaluation has a reward: every grader failed")
            elif (data := job.validation) is not None:
                batches = map(job.here, job.eval_batches(data))
                found = evaluate(job.eval_loss, state.model, batches, job.mesh, data.byte_lengths)
                if not job.reads:
                    found = evolve(found, perplexity=math.nan, bits_per_byte=math.nan)
                if self.voice is not None:
                    self.voice.evaluation(EvaluationRow.of(found, step=state.step, seconds=self.meter.seconds))
            for prompt, text in zip(job.spec.report.prompts, self._continued(state), strict=True):
                if self.voice is not None:
                    self.voice.sample(state.step, prompt, text)

    def sync(self) -> None:
        """Wait until the rows are on the disk."""
        if self.voice is not None:
            self.voice.rows.sync()

    def _continued(self, state: State) -> list[str]:
        """Return what the model writes after each prompt: all ranks together, all prompts at once.

        A text goes no further than the rows that the model is trained on, half of which at most is the prompt's end.
        """
        job, spec, length = self.job, self.job.spec, self.job.spec.data.length
        requests: list[Request] = []
        for number, prompt in enumerate(spec.report.prompts):
            ids = job.question(self.tokenizer, prompt)[-max(length // 2, 1) :]
            limit = min(spec.report.sample_tokens, length + 1 - len(ids))
            sampling = Sampling(0.8, top_k=50, seed=spec.train.seed)
            requests.append(
                Request(key=number, prompt=tuple(ids), limit=limit, sampling=sampling, stop=job.ends, stream=(number,))
            )
        new: dict[Hashable, list[int]] = {request.key: [] for request in requests}
        model = engine.Generator(params=state.model, arch=job.arch, how=job.how, mesh=job.mesh, before=job.vectors)
        for event in complete(model, requests):
            if isinstance(event, Token):
                new[event.key].append(event.id)
        return [self.tokenizer.decode(ids) for ids in new.values()]


def answers_row(step: int, seconds: float, told: Metrics) -> EvaluationRow:
    """Return the row of an evaluation that has no loss."""
    none = math.nan
    extra: dict[str, Value] = dict(told)
    return EvaluationRow(
        step=step, loss=none, perplexity=none, bits_per_byte=none, tokens=0, bytes=0, seconds=seconds, extra=extra
    )


def seen(
    batch: Batch, byte_lengths: torch.Tensor, stop: bool, mesh: Mesh, device: torch.device
) -> tuple[int, int, int, bool, str]:
    """Return all ranks' bytes of targets and tokens read, the most memory of one, whether any stops, a fingerprint.

    The fingerprint is that of the global batch, its rows in order: the same on every mesh, so that two runs' data can
    be compared from their metrics. The ranks tell each other all of this in one exchange.
    """
    rows = [_row_checksum(batch, row) for row in range(len(batch["tokens"]))]
    size, read = int(target_bytes(batch, byte_lengths)), int((batch.get("segment", batch["tokens"]) >= 0).sum())
    mine = torch.tensor([[size, read, peak_memory(device), int(stop), *rows]])
    if mesh.world.size > 1:
        mine = mesh.world.backend.all_gather(mine.to(device), 0).cpu()
    shares = mine[:: mesh.tp.size]  # the ranks of tp saw the same rows
    fingerprint = xxhash.xxh3_64_hexdigest(shares[:, 4:].contiguous().numpy().tobytes())
    size, read = shares[:, :2].sum(0).tolist()
    return size, read, int(mine[:, 2].max()), bool(mine[:, 3].any()), fingerprint


def _row_checksum(batch: Batch, row: int) -> int:
    """Return 63 bits, which fit a signed number."""
    data = batch["tokens"][row].numpy().tobytes() + batch["targets"][row].numpy().tobytes()
    return xxhash.xxh3_64_intdigest(data) >> 1


@contextmanager
def watching(
    job: Job, place: RunDir, console: Console, state: State, seconds: float, rollouts: Rollouts | None = None
) -> Generator[Watch]:
    """Open the run's files at its present step: rows of steps that are to be taken again are dropped."""
    meter = Meter(job.spec.train.steps, state.step, seconds, time.perf_counter)
    tokenizer = Tokenizer.from_file(str(job.train.tokenizer))
    # of what is frozen no gradient is made: two products of three are left
    flops = flops_per_token(job.arch, job.spec.data.length) * (2 / 3 if job.adapts else 1)
    if not job.speaks:
        yield Watch(job, None, meter, tokenizer, flops, 0.0, rollouts)
        return
    spec, fresh = job.spec, state.step == 0
    peak = find_peak(job.device, getattr(torch, spec.train.precision.compute), spec.report.peak_flops)
    for path in (place.samples, place.completions):
        if path.exists():
            path.write_bytes(b"") if fresh else trim(path, state.step)
    with MetricsFile.new(place.metrics) if fresh else MetricsFile.open(place.metrics, state.step) as rows:
        opened = open_trackers(spec.report.trackers, place.path, asdict(spec), console.warn, state.step)
        try:
            if _devices(place) != job.mesh.world.size:  # at the start, and where the run goes on on another mesh
                rows.write(_describe(job, flops, peak, state.step))
            devices = f"{job.mesh.world.size} x {job.device.type}" if job.mesh.world.size > 1 else job.device
            size = f"{parameters(job.arch) / 1e6:.1f} M parameters"
            if job.adapts:
                size += f" and {_trained(job) / 1e6:.2f} M that are trained beside them"
            if job.train.tokens:
                size += f" on {devices}, {job.train.tokens / 1e6:.2f} M tokens in {job.train.rows} rows"
            else:
                size += f" on {devices}"
            console.note(f"{spec.name}: {size}, {state.step}/{spec.train.steps} steps")
            for line in _packing(job) if fresh else ():
                console.note(line)
            yield Watch(job, Voice(place, console, opened, rows), meter, tokenizer, flops, peak, rollouts)
        finally:
            opened.close()


def _trained(job: Job) -> int:
    return sum(math.prod(shape) for shape in trained_shapes(job.spec, job.arch)[0].values())


def _packing(job: Job) -> Iterator[str]:
    """Say how examples lie in rows, and what became of those that are longer."""
    spec = job.spec
    for name, store in zip(job.train.names, job.train.stores, strict=True):
        if isinstance(store, PackedStore | PairStore):
            kind = "texts" if isinstance(store, PackedStore) else "pairs"
            fit, how = store.fit, f"{len(store.size):,} {kind} in {store.packs.rows:,} rows"
            yield f"{name}: {how}, {store.packs.efficiency:.1%} of their places filled"
            if fit.overlong:
                done = {"truncate": "truncated", "split": "split", "drop": "dropped"}[spec.sft.overlong]
                lost = f"{fit.lost_targets:,} of their {fit.targets:,} trained tokens are lost"
                yield f"{name}: {fit.overlong:,} {kind} longer than data.length {spec.data.length} are {done}; {lost}"
    if isinstance(job.train, Prompts):
        cut = f"; {job.train.cut:,} are longer than a row has room for, and left out" if job.train.cut else ""
        yield f"{job.train.rows:,} prompts, {spec.grpo.prompts} of them answered {spec.grpo.group} times at a time{cut}"
    elif job.lesson is not None:
        yield f"an epoch is {-(-job.train.rows // spec.train.batch):,} steps"


def _devices(place: RunDir) -> int | None:
    runs = [row for row in read_rows(place.metrics) if row.get("kind") == "run"]
    return runs[-1].get("devices") if runs else None


def _describe(job: Job, flops: float, peak: float, step: int) -> RunRow:
    spec = job.spec
    return RunRow(
        step=step,
        parameters=parameters(job.arch),
        flops_per_token=flops,
        peak_flops=peak,
        devices=job.mesh.world.size,
        tokens_per_step=0 if spec.data.form == "prompts" else spec.train.batch * spec.data.length,
        device=torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else "cpu",
        extra={"trained": _trained(job)} if job.adapts else {},
    )
