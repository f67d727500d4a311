"""Read how a model's texts are written, and nothing of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from attrs import field, frozen

from ironfn.data.chat import Chat, chat_of
from ironfn.data.supervise import Teaching, begin_of
from ironfn.data.templates import template_of
from ironfn.data.tokenizer import Vocabulary, load
from ironfn.data.turns import Rewritten, TrainOn
from ironfn.hf.directory import describe, is_directory
from ironfn.hf.gguf_load import open_gguf
from ironfn.hf.gguf_tokenizer import tokenizer_of
from ironfn.hf.usage import chat_template, ends, specials
from ironfn.model.arch import complete
from ironfn.model.families import NAMED
from ironfn.spec.load import load_spec

from .gguf import carried, end_of
from .imported import kept, vocabulary_of
from .rundir import RunDir


@frozen(eq=False)
class Wording:
    """Hold a model's tokenizer and the small files that it came with, by name. begin: the ids before a text."""

    vocabulary: Vocabulary = field(repr=False)
    begin: tuple[int, ...]
    files: Mapping[str, bytes] = field(factory=dict, repr=False)

    def chat(self, template: str | None = None) -> Chat | None:
        """Return how conversations are written. template: a name of `TEMPLATES` or a file, to take for its own."""
        text = chat_template(self.files) if template is None else template_of(template, self.vocabulary)
        end = self.vocabulary.tokenizer.id_to_token(self.vocabulary.eos)
        named = {"eos_token": end} if end is not None else {}
        return None if text is None else chat_of(self.vocabulary, text, named | specials(self.files))

    def teaching(self, template: str | None, train_on: TrainOn, rewritten: Rewritten) -> Teaching:
        """Return how the model is taught; see `Teaching`."""
        stops = frozenset(i for i in ends(self.files) if 0 <= i < self.vocabulary.size)
        return Teaching(self.vocabulary, self.chat(template), self.begin, train_on, rewritten, stops)


def open_wording(path: Path) -> Wording:
    """Read a tokenizer.json, a run, a Hugging Face directory or a GGUF file. ValueError where it has no tokenizer."""
    if path.is_file() and path.suffix == ".json":
        return _came_with(load(path), {})
    if path.is_file():
        model = open_gguf(path)
        tokenizer = tokenizer_of(model.file.metadata).encode()
        return _came_with(vocabulary_of(tokenizer, path, end_of(model), complete(model.spec, 1)), carried(model))
    if is_directory(path):
        described = describe(path)
        if described.tokenizer is None:
            raise ValueError(f"{path} has no tokenizer.json; put the one that the model was trained with there")
        arch = complete(described.spec, 1)
        return _came_with(vocabulary_of(described.tokenizer, path, described.eos, arch), described.carried)
    place = RunDir(path)
    if not (place.spec.is_file() and place.tokenizer.is_file()):
        raise ValueError(f"{path} is no model: no run with spec.yaml and tokenizer.json, no Hugging Face directory")
    vocabulary = load(place.tokenizer, load_spec([place.spec], [], NAMED).data.tokenizer.eos)
    files = kept(place)
    # a text of a model of ours begins where another one ends
    return _came_with(vocabulary, files) if files else Wording(vocabulary, (vocabulary.eos,))


def _came_with(vocabulary: Vocabulary, files: Mapping[str, bytes]) -> Wording:
    return Wording(vocabulary, begin_of(vocabulary), files)
