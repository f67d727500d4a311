"""Find out how a spec's examples are written for the model that is taught."""

from __future__ import annotations

from pathlib import Path

from attrs import evolve

from ironfn.data.lesson import Lesson
from ironfn.data.tokenizer import load
from ironfn.hf.directory import TOKENIZER, is_directory
from ironfn.spec.records import RunSpec

from .origin import home
from .rundir import RunDir
from .wording import Wording, open_wording


def taught(spec: RunSpec) -> tuple[RunSpec, Lesson | None]:
    """Return a spec that names its tokenizer, and how its examples are taught: None where its data are documents.

    The tokenizer is the model's own where ``data.tokenizer.file`` names none. ValueError where it names another.
    """
    form = spec.data.form
    if form == "documents":
        return spec, None
    tokenizer, wording = spec.data.tokenizer, _wording(spec)
    if tokenizer.file is None:
        assert spec.model.init_from is not None, "checked with the spec"
        file = _tokenizer_of(Path(spec.model.init_from))
        end = wording.vocabulary.tokenizer.id_to_token(wording.vocabulary.eos)
        spec = evolve(spec, data=evolve(spec.data, tokenizer=evolve(tokenizer, file=str(file), eos=end)))
    elif load(tokenizer.file, tokenizer.eos).checksum != wording.vocabulary.checksum:
        raise ValueError(
            f"data.tokenizer.file {tokenizer.file} is not the tokenizer of the model that is taught, "
            f"{spec.model.init_from}; leave it out"
        )
    sft = spec.sft
    teaching = wording.teaching(sft.template, sft.train_on, sft.rewritten)
    holds = "examples" if form == "prompts" else form
    return spec, Lesson(sft, teaching, holds, spec.model.score)


def _wording(spec: RunSpec) -> Wording:
    if spec.model.init_from is not None:
        return open_wording(home(Path(spec.model.init_from)))
    assert spec.data.tokenizer.file is not None, "checked with the spec"
    return open_wording(Path(spec.data.tokenizer.file))


def _tokenizer_of(source: Path) -> Path:
    return source / TOKENIZER if is_directory(source) else RunDir(home(source)).tokenizer
