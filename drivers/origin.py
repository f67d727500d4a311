"""Read what a model that is there already is, so that a spec which begins from it need not say it again."""

from __future__ import annotations

from pathlib import Path

from attrs import asdict, evolve

from ironfn.checkpoint.manifest import NAME as MANIFEST
from ironfn.hf.directory import describe, is_directory
from ironfn.model.families import NAMED
from ironfn.spec.load import load_spec
from ironfn.spec.records import ModelSpec

from .rundir import RunDir


def model_fields(source: Path) -> dict[str, object]:
    """Return the fields of ``model`` of a run, a checkpoint or a Hugging Face directory; {} where there is none.

    What is wrong with the place is said where its weights are read. ValueError for a spec or a config that is damaged.
    """
    spec = _spec_of(source)
    if spec is None:
        return {}
    return {name: value for name, value in asdict(spec).items() if name != "init_from"}


def _spec_of(source: Path) -> ModelSpec | None:
    if is_directory(source):
        return describe(source).spec
    place = RunDir(home(source))
    if not place.spec.is_file():
        return None
    spec = load_spec([place.spec], [], NAMED)
    ids = spec.model.vocab_size
    if ids is None and place.tokenizer.is_file():  # as many as the run's tokenizer has
        from ironfn.data.tokenizer import load

        ids = load(place.tokenizer, spec.data.tokenizer.eos).size
    return evolve(spec.model, vocab_size=ids)


def home(source: Path) -> Path:
    """Return the run's directory of one of its checkpoints; other paths as they are."""
    return source.parent.parent if (source / MANIFEST).exists() else source
