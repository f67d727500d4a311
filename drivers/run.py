"""Run the one loop: take steps, watch them, save, and stop when asked to."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import xxhash
from attrs import asdict, define, evolve
from tokenizers import Tokenizer

from ironfn import __version__
from ironfn.algo.step import Metrics, State
from ironfn.checkpoint import load_newest, prune, save, steps
from ironfn.checkpoint.files import replace_whole
from ironfn.data import eval_batches, prefetch
from ironfn.generate.sampling import continuation, sampler
from ironfn.model.counting import flops_per_token, parameters
from ironfn.report.evaluation import Evaluation, bits_per_byte, evaluate, target_bytes
from ironfn.report.meter import Meter, peak_memory
from ironfn.report.mfu import find_peak, mfu
from ironfn.report.rows import EvaluationRow, MetricsFile, RunRow, TrainRow, Value, as_dict, read_rows, trim
from ironfn.spec.records import RunSpec
from ironfn.types import Batch, Params

from .build import Job, build, to_device
from .console import Console
from .report import draw
from .rundir import RunDir
from .signals import EXIT_STOPPED, stop_requested
from .trackers import Trackers, open_trackers


def run(spec: RunSpec, *, override: bool = False, restart: bool = False) -> int:
    """Train as a spec says, from where its run directory stands, and return the process's exit code.

    override: go on although the spec changed where a run may not. restart: begin anew where no checkpoint is whole.
    0 when the last step is done, 75 when a signal asked to stop and the state is saved.
    """
    if spec.train.threads is not None:
        torch.set_num_threads(spec.train.threads)
    place = RunDir.of(spec)
    with ExitStack() as stack:
        stack.enter_context(place.held())
        console = stack.enter_context(Console(spec.train.steps, title=spec.name))
        resume = f"ironfn pretrain {shlex.quote(str(place.spec))}"
        stopped = stack.enter_context(stop_requested(resume))
        place.settle(spec, resuming=bool(steps(place.checkpoints)), override=override, warn=console.warn)
        job = build(spec)
        state, seconds = _restore(job, place, console, restart)
        replace_whole(place.tokenizer, job.train.tokenizer.read_bytes())
        with _watch(job, place, console, state, seconds) as watch:
            state = _loop(job, state, place, watch, stopped)
        if state.step < spec.train.steps:
            console.note(f"saved at step {state.step} of {spec.train.steps}; to go on: {resume}")
            return EXIT_STOPPED
        draw(place.path, console.note, console.warn)
        return 0


def _loop(job: Job, state: State, place: RunDir, watch: Watch, stopped: Any) -> State:
    """Take steps until the last one or a signal; save at intervals and at the end."""
    spec = job.spec
    if state.step == 0:
        watch.look_closer(state)
    for batch in prefetch(job.batch, state.step, spec.train.steps, workers=spec.data.workers):
        on_device = to_device(batch, job.device)
        noise = _noise(job, state, on_device)
        state, metrics = job.step(state, on_device)
        watch.step(state, batch, metrics | noise)
        last = state.step == spec.train.steps
        if last or state.step % spec.report.eval_every == 0:
            watch.look_closer(state)
        reason = stopped()
        if last or reason or state.step % spec.checkpoint.every == 0:
            with watch.meter.away():
                watch.rows.sync()
                _save(job, state, place, watch.meter.seconds)
        if reason:
            break
    return state


def _noise(job: Job, state: State, batch: Batch) -> Metrics:
    every = job.spec.train.noise_scale_every
    return job.noise(state, batch) if every is not None and state.step % every == 0 else {}


def as_tree(state: State) -> Params:
    """Return what of a state a checkpoint keeps as tensors."""
    return {"params": state.params, "opt": state.opt, "extra": state.extra}


def _save(job: Job, state: State, place: RunDir, seconds: float) -> None:
    meta = {
        "ironfn": __version__,
        "spec": asdict(job.spec),
        "arch": asdict(job.arch),
        "data": f"{job.train.checksum:016x}",
        "skipped": state.skipped,
        "seconds": seconds,
    }
    save(place.checkpoints, state.step, as_tree(state), meta)
    prune(place.checkpoints, job.spec.checkpoint.keep, job.spec.checkpoint.keep_every)


def _restore(job: Job, place: RunDir, console: Console, restart: bool) -> tuple[State, float]:
    """Return the newest whole state of the run and the seconds spent on it; the first state where there is none."""
    state = job.first_state()
    found = load_newest(place.checkpoints, console.warn, restart=restart, device=job.device, into=as_tree(state))
    if found is None:
        done = max((row["step"] for row in read_rows(place.metrics)), default=0)
        if done >= job.spec.checkpoint.every and not restart:
            raise ValueError(
                f"{place.metrics} tells of {done} steps, but {place.checkpoints} holds no checkpoint: restore it, give "
                "this run another name, or give --restart to begin anew and lose these rows"
            )
        # a damaged checkpoint may have half filled the state before it was given up
        return (job.first_state() if restart else state), 0.0
    meta = found.meta
    if meta["data"] != f"{job.train.checksum:016x}":
        raise ValueError(
            f"{found.path} was trained on other data than {job.spec.data.dir} holds now; prepare the old data again, "
            "or give this run another name"
        )
    if meta["step"] > job.spec.train.steps:
        raise ValueError(f"{found.path} is past train.steps {job.spec.train.steps}; raise it to go on, or leave it")
    console.note(f"resuming at step {meta['step']} from {found.path}")
    return evolve(state, step=meta["step"], skipped=meta["skipped"]), meta["seconds"]


@define
class Watch:
    """Tell everyone who watches how the run goes: the file, the console and the trackers."""

    job: Job
    place: RunDir
    console: Console
    trackers: Trackers
    rows: MetricsFile
    meter: Meter
    tokenizer: Tokenizer
    flops: float
    peak: float

    def step(self, state: State, batch: Batch, metrics: Metrics) -> None:
        """Record a step; show every ``report.log_every``-th."""
        known = ("step", "loss", "grad_norm", "lr", "tokens", "skipped")
        pace, left = self.meter.look(state.step, round(metrics["tokens"]))
        extra: dict[str, Value] = {name: value for name, value in metrics.items() if name not in known}
        row = TrainRow(
            step=state.step,
            loss=metrics["loss"],
            bits_per_byte=bits_per_byte(
                metrics["loss"] * metrics["tokens"], float(target_bytes(batch, self.job.train.byte_lengths))
            ),
            lr=metrics["lr"],
            grad_norm=metrics["grad_norm"],
            tokens_per_s=pace,
            mfu=mfu(self.flops, pace, self.peak, devices=1),
            memory=peak_memory(self.job.device),
            seconds=self.meter.seconds,
            left=left,
            skipped=state.skipped,
            extra=extra,
        )
        self.rows.write(evolve(row, extra={**extra, "batch": _fingerprint(batch)}))
        every = self.job.spec.report.log_every
        if state.step % every == 0 or state.step in (1, self.job.spec.train.steps):
            self.console.train(row)
            self.trackers.log(state.step, as_dict(row))

    def look_closer(self, state: State) -> None:
        """Evaluate on the validation split and continue the fixed prompts."""
        with self.meter.away():
            if self.job.validation is not None:
                row = EvaluationRow.of(self._evaluate(state), step=state.step, seconds=self.meter.seconds)
                self.rows.write(row)
                self.console.evaluation(row)
                self.trackers.log(state.step, as_dict(row))
            for number, prompt in enumerate(self.job.spec.report.prompts):
                self._sample(state, number, prompt)

    def _evaluate(self, state: State) -> Evaluation:
        spec, data = self.job.spec, self.job.validation
        assert data is not None
        rows = spec.train.micro_batch or spec.train.batch
        batches = (to_device(batch, self.job.device) for batch in eval_batches(data, rows, spec.report.eval_rows))
        return evaluate(self.job.eval_loss, state.params, batches, self.job.mesh, data.byte_lengths)

    def _sample(self, state: State, number: int, prompt: str) -> None:
        job = self.job
        ids = [job.train.eos, *self.tokenizer.encode(prompt, add_special_tokens=False).ids]
        choose = sampler(0.8, 50, job.spec.train.seed, number)
        new = continuation(
            state.params, job.arch, ids, job.spec.report.sample_tokens, choose,
            stop=frozenset([job.train.eos]), window=job.spec.data.length, how=job.how,
        )  # fmt: skip
        text = self.tokenizer.decode(list(new))
        with self.place.samples.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": state.step, "prompt": prompt, "text": text}, ensure_ascii=False) + "\n")
        self.console.sample(state.step, prompt, text)
        self.trackers.text(state.step, prompt, text)


def _fingerprint(batch: Batch) -> str:
    """Return a short checksum of what a step saw, so that two runs' data can be compared from their metrics."""
    return f"{xxhash.xxh3_64_intdigest(batch['tokens'].numpy().tobytes() + batch['targets'].numpy().tobytes()):016x}"


@contextmanager
def _watch(job: Job, place: RunDir, console: Console, state: State, seconds: float) -> Generator[Watch]:
    """Open the run's files at its present step: rows of steps that are to be taken again are dropped."""
    spec = job.spec
    fresh = state.step == 0
    compute = getattr(torch, spec.train.precision.compute)
    peak = find_peak(job.device, compute, spec.report.peak_flops)
    flops = flops_per_token(job.arch, spec.data.length)
    if place.samples.exists():
        place.samples.write_bytes(b"") if fresh else trim(place.samples, state.step)
    with MetricsFile.new(place.metrics) if fresh else MetricsFile.open(place.metrics, state.step) as rows:
        opened = open_trackers(spec.report.trackers, place.path, asdict(spec), console.warn, state.step)
        try:
            if fresh:
                rows.write(_describe(job, flops, peak))
            console.note(
                f"{spec.name}: {parameters(job.arch) / 1e6:.1f} M parameters on {job.device}, "
                f"{job.train.tokens / 1e6:.2f} M tokens in {job.train.rows} rows, {state.step}/{spec.train.steps} steps"
            )
            meter = Meter(spec.train.steps, state.step, seconds, time.perf_counter)
            tokenizer = Tokenizer.from_file(str(job.train.tokenizer))
            yield Watch(job, place, console, opened, rows, meter, tokenizer, flops, peak)
        finally:
            opened.close()


def _describe(job: Job, flops: float, peak: float) -> RunRow:
    spec = job.spec
    return RunRow(
        parameters=parameters(job.arch),
        flops_per_token=flops,
        peak_flops=peak,
        tokens_per_step=spec.train.batch * spec.data.length,
        device=torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else "cpu",
    )
