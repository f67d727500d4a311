"""Run the one loop: take steps, watch them, save, and stop when asked to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
import xxhash
from attrs import asdict, evolve

from ironfn import __version__
from ironfn.algo.step import Metrics, NonFiniteError, State
from ironfn.checkpoint import Saver, load_newest, prune, steps
from ironfn.checkpoint.files import replace_whole
from ironfn.data import Dataset, prefetch
from ironfn.mesh.agree import each
from ironfn.mesh.axis import SINGLE, Mesh, any_rank
from ironfn.report.rows import read_rows
from ironfn.spec.load import dump_spec
from ironfn.spec.records import RunSpec
from ironfn.types import Batch, Params

from .build import Job, build, pick_device
from .console import Console
from .failures import Failure, alike, one_voice, together
from .imported import keep_along
from .launch import Ranks, command, threads
from .modes import mode
from .objectives import loaded, reference_of, refers
from .references import referenced
from .report import draw
from .rewarding import rewards_of
from .rollouts import Rollouts
from .rundir import RunDir
from .signals import EXIT_STOPPED, stop_requested
from .start import identity
from .taught import taught
from .watch import Watch, watching


def run(
    spec: RunSpec,
    *,
    mesh: Mesh = SINGLE,
    device: torch.device | None = None,
    override: bool = False,
    restart: bool = False,
) -> int:
    """Train as a spec says, from where its run directory stands, and return the process's exit code.

    Every rank of the mesh calls it; rank 0 alone holds the directory, speaks, and writes what is not a checkpoint.
    override: go on although the spec changed where a run may not. restart: begin anew where no checkpoint is whole.
    0 when the last step is done, 75 when a signal asked any rank to stop and the state is saved.
    """
    ranks, place, speaks = Ranks.here(), RunDir.of(spec), mesh.world.index == 0
    if (count := threads(spec.train.threads, ranks.local_size)) is not None:
        torch.set_num_threads(count)
    device = device or pick_device(spec.train.device)
    spec, lesson = together(mesh, device, lambda: taught(spec))
    local_size = ranks.local_size if ranks.size > 1 else None
    again = command(place.spec, mesh.world.size, local_size, mode(spec))
    with ExitStack() as stack:
        console = stack.enter_context(Console(spec.train.steps, speak=speaks, title=spec.name))
        stopped = stack.enter_context(stop_requested(again, speak=speaks))

        def begin() -> None:
            if speaks:
                stack.enter_context(place.held())
                place.settle(spec, resuming=bool(steps(place.checkpoints)), override=override, warn=console.warn)

        together(mesh, device, begin)
        alike(mesh, device, "the spec", xxhash.xxh3_64_intdigest(dump_spec(spec).encode()))
        # before the model is loaded: what they lack is told at once
        rewards = together(mesh, device, lambda: rewards_of(spec, device, grades=speaks))
        job = together(mesh, device, lambda: build(spec, mesh, device, lesson))
        alike(mesh, device, f"the data in {spec.data.dir}", job.train.checksum)
        job = evolve(job, base=_identity(job, job.adapts, Path(spec.model.init_from or "")))
        job = evolve(job, reference=_identity(job, refers(spec), reference_of(spec)))
        if spec.dpo.precompute:
            job = _referenced(job, console)
        begun = bool(steps(place.checkpoints))
        first = together(mesh, device, lambda: job.first_state(drawn=begun))
        state, seconds = together(mesh, device, lambda: _restore(job, first, place, console, restart))
        if speaks:
            replace_whole(place.tokenizer, job.train.tokenizer.read_bytes())
            keep_along(spec.model.init_from, place)
        rollouts = Rollouts(job, place.rollouts, rewards) if rewards else None
        with watching(job, place, console, state, seconds, rollouts) as watch:
            state = _loop(job, state, place, watch, stopped)
        if state.step < spec.train.steps:
            console.note(f"saved at step {state.step} of {spec.train.steps}; to go on: {again}")
            return EXIT_STOPPED
        if speaks:
            draw(place.path, console.note, console.warn)
        return 0


def _identity(job: Job, wanted: bool, source: Path) -> str:
    """Return the checksum of a model that has to stay as it is, which rank 0 reads for all; "" where none is wanted."""
    if not wanted:
        return ""
    mine = together(job.mesh, job.device, lambda: identity(source).encode() if job.speaks else b"")
    first, *_ = each(job.mesh, mine, job.device)
    return first.decode()


def _referenced(job: Job, console: Console) -> Job:
    """Return a job whose data know what the reference gives them."""
    spec, mesh, device = job.spec, job.mesh, job.device
    under = "" if spec.dpo.reference else f" {spec.adapter.base}"
    precision = spec.train.precision
    key = f"{job.reference}{under} {precision.params} {precision.compute}"

    def known(data: Dataset) -> Dataset:
        return referenced(
            data, key, lambda: loaded(spec, job.arch, job.how, job.places.params, mesh, device), job.here, job.rows,
            mesh, device, console.note,
        )  # fmt: skip

    return evolve(job, train=known(job.train), validation=None if job.validation is None else known(job.validation))


def _loop(job: Job, state: State, place: RunDir, watch: Watch, stopped: Callable[[], str | None]) -> State:
    """Take steps until the last one or a signal; save at intervals and at the end."""
    spec, saver = job.spec, _saver(job, place)
    if state.step == 0:
        watch.look_closer(state)
    made = iter(()) if watch.rollouts else prefetch(
        job.batch, state.step, spec.train.steps, workers=spec.data.workers
    )  # fmt: skip
    while state.step < spec.train.steps:
        batch, told = (next(made), {}) if watch.rollouts is None else watch.roll_out(state)
        on_device = job.here(batch)
        told |= _noise(job, state, on_device)
        state, metrics = _step(job, state, on_device)
        stop = watch.step(state, batch, metrics | told, stopped)
        last = state.step == spec.train.steps
        if last or state.step % spec.report.eval_every == 0:
            watch.look_closer(state)
            stop = any_rank(job.mesh, stopped() is not None, job.device)  # it may have taken long
        with one_voice(job.mesh):
            saver.poll()
        if last or stop or state.step % spec.checkpoint.every == 0:
            with watch.meter.away():
                watch.sync()
                wait = last or stop or not spec.checkpoint.asynchronous
                _save(job, state, saver.save if wait else saver.start, watch.meter.seconds)
                watch.forget(place)
        if stop:
            break
    return state


def _step(job: Job, state: State, batch: Batch) -> tuple[State, Metrics]:
    """Take a step. That it is not finite is one decision of all ranks, and told once."""
    try:
        return job.step(state, batch)
    except NonFiniteError as error:
        raise Failure(str(error), speaks=job.speaks) from error


def _noise(job: Job, state: State, batch: Batch) -> Metrics:
    every = job.spec.train.noise_scale_every
    return job.noise(state, batch) if every is not None and state.step % every == 0 else {}


def _saver(job: Job, place: RunDir) -> Saver:
    keep = job.spec.checkpoint

    def after(path: Path) -> None:
        prune(place.checkpoints, keep.keep, keep.keep_every)

    return Saver(place.checkpoints, job.places.saved, job.mesh, after)


def _save(job: Job, state: State, save: Callable[[int, Params, dict[str, object]], object], seconds: float) -> None:
    meta: dict[str, object] = {
        "ironfn": __version__,
        "spec": asdict(job.spec),
        "arch": asdict(job.arch),
        "data": f"{job.train.checksum:016x}",
        "base": job.base,
        "reference": job.reference,
        "skipped": state.skipped,
        "seconds": seconds,
    }
    with one_voice(job.mesh):
        save(state.step, job.saved(state), meta)


def _restore(job: Job, state: State, place: RunDir, console: Console, restart: bool) -> tuple[State, float]:
    """Return the newest whole state of the run and the seconds spent on it; the first ``state`` where there is none.

    Saved on whatever mesh: every rank takes its shares. What is wrong is found by all ranks alike.
    """
    found = load_newest(
        place.checkpoints, console.warn, restart=restart, device=job.device, into=job.saved(state),
        layout=job.places.saved, mesh=job.mesh,
    )  # fmt: skip
    if found is None:
        done = max((row["step"] for row in read_rows(place.metrics)), default=0)
        last = job.spec.checkpoint.every * (2 if job.spec.checkpoint.asynchronous else 1)
        if done > last and not restart:  # a death in the first save leaves no checkpoint
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
    if meta.get("base", "") != job.base:
        raise ValueError(
            f"{found.path} was trained beside another model than {job.spec.model.init_from} holds now; put that back, "
            "or give this run another name"
        )
    if meta.get("reference", "") != job.reference:
        raise ValueError(
            f"{found.path} was held to another reference than {reference_of(job.spec)} holds now; put that back, or "
            "give this run another name"
        )
    if meta["step"] > job.spec.train.steps:
        raise ValueError(f"{found.path} is past train.steps {job.spec.train.steps}; raise it to go on, or leave it")
    console.note(f"resuming at step {meta['step']} from {found.path}")
    return evolve(state, step=meta["step"], skipped=meta["skipped"]), meta["seconds"]
