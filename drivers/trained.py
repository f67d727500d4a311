"""Open a model to use it: a run or a checkpoint of ours, a Hugging Face directory, a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from attrs import evolve, field, frozen
from tokenizers import Tokenizer

from ironfn import tree
from ironfn.data.chat import Chat
from ironfn.data.preparation import TOKENIZER
from ironfn.data.tokenizer import Vocabulary, load
from ironfn.hf.directory import describe, is_directory, load_model
from ironfn.hf.gguf_load import load_weights, open_gguf
from ironfn.hf.gguf_tokenizer import tokenizer_of
from ironfn.hf.usage import ends, specials
from ironfn.mesh.axis import SINGLE
from ironfn.model.adapters import adapting
from ironfn.model.arch import Arch, complete
from ironfn.model.forward import DEFAULT, Forward
from ironfn.model.tables import table
from ironfn.types import Params

from .adapted import found_base, merged, opened_base
from .build import forward, pick_device
from .gguf import carried, end_of
from .imported import kept, vocabulary_of
from .origin import model_fields
from .rundir import RunDir
from .saved import open_saved
from .wording import Wording


@frozen(eq=False)
class Trained:
    """Hold a trained model, ready to be used.

    version: what tells its parameters from others. files: the small files that it came with, by name, if it came from
    elsewhere. prompts: what its run's spec asks it now and then. vectors: how many of a trained prompt or prefix stand
    before every text.
    """

    params: Params
    arch: Arch
    how: Forward
    vocabulary: Vocabulary = field(repr=False)
    version: str
    files: Mapping[str, bytes] = field(factory=dict, repr=False)
    prompts: tuple[str, ...] = ()
    vectors: int = 0

    @property
    def tokenizer(self) -> Tokenizer:
        return self.vocabulary.tokenizer

    @property
    def eos(self) -> int:
        """The id that ends a document, and begins a text of a model of ours."""
        return self.vocabulary.eos

    @property
    def stop(self) -> frozenset[int]:
        """The ids after which nothing more is to be expected, those that end an answer among them."""
        names = [self.specials.get("eos_token")]
        known = {self.vocabulary.eos, *ends(self.files), *map(self.tokenizer.token_to_id, filter(None, names))}
        return frozenset(i for i in known if i is not None and 0 <= i < self.arch.vocab)

    @property
    def bos(self) -> int:
        """The id that stands before a text: as the files say that the model came with, else the one that ends it."""
        name = self.specials.get("bos_token")
        found = None if name is None else self.tokenizer.token_to_id(name)
        return self.eos if found is None else found

    @property
    def specials(self) -> dict[str, str]:
        """What the tokenizer's config calls its tokens, or would, had it one."""
        end = self.tokenizer.id_to_token(self.vocabulary.eos)
        return specials(self.files) if self.files or end is None else {"eos_token": end}

    def encode(self, prompt: str) -> list[int]:
        """Return the ids of a text to continue: as its own tokenizer begins one, or after the end of another text."""
        if self.files:
            return self.tokenizer.encode(prompt).ids or [self.bos]
        return [self.eos, *self.tokenizer.encode(prompt, add_special_tokens=False).ids]

    def chat(self, template: str | None = None) -> Chat | None:
        """Return how conversations are written for it. template: see `Wording.chat`."""
        return Wording(self.vocabulary, (), self.files).chat(template)


def require_text(text: str, what: str) -> None:
    """Refuse text that is no Unicode: half a surrogate pair, as undecodable bytes of a command line become."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} {text!r} is not valid Unicode at character {error.start}; write it in UTF-8"
        ) from error


def open_model(
    path: Path,
    say: Callable[[str], None],
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | None = None,
) -> Trained:
    """Open a model for use, in memory, tensor by tensor, whatever it lies in.

    ValueError where it has no tokenizer, or ends in a reward and so writes nothing.

    dtype: of the parameters; None takes a run's own, the files' on a GPU, float32 on a CPU. device: None picks one.
    """
    found = _opened(path, say, dtype, device)
    if found.arch.score:
        raise ValueError(f"{path} ends in a reward (model.score) and predicts no token; take a model that has a head")
    return found


def open_scorer(path: Path, say: Callable[[str], None], *, device: torch.device | None = None) -> Trained:
    """Open a reward model for use. ValueError where it has no tokenizer, or ends in no reward; else as `open_model`."""
    known = {} if path.is_file() else model_fields(path)
    if not known.get("score", True):
        raise ValueError(
            f"{path} predicts tokens and gives no reward; train one by `ironfn reward-model`, or take a "
            "...ForSequenceClassification of one label"
        )
    return _opened(path, say, None, device)


def _opened(
    path: Path, say: Callable[[str], None], dtype: torch.dtype | str | None, device: torch.device | None
) -> Trained:
    device = pick_device("auto") if device is None else device
    kind: torch.dtype | None = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    opened = _of_gguf if path.is_file() else _of_directory if is_directory(path) else _of_run
    return opened(path, say, kind, device)


def _of_run(path: Path, say: Callable[[str], None], dtype: torch.dtype | None, device: torch.device) -> Trained:
    saved, vectors = open_saved(path, say), 0
    how = forward(saved.spec.train.precision) if dtype is None else DEFAULT
    if (adapter := saved.spec.adapter).kind in ("prompt", "prefix"):
        how, vectors = evolve(how, adapt=adapting(adapter)), adapter.tokens
        saved = evolve(saved, fixed=opened_base(saved, found_base(saved)))
    elif adapter.kind != "none":
        saved = merged(saved, say)
    if saved.tokenizer is None:
        raise ValueError(f"{path} has no {TOKENIZER}; put the one that the model was trained with there")
    params = tree.map(lambda leaf: leaf.to(device, dtype or leaf.dtype), tree.merge(saved.params, saved.fixed))
    return Trained(
        params,
        saved.arch,
        how,
        load(saved.tokenizer, saved.spec.data.tokenizer.eos),
        version=str(saved.path),
        files=kept(RunDir(saved.path.parent.parent)),
        prompts=tuple(saved.spec.report.prompts),
        vectors=vectors,
    )


def _of_directory(path: Path, say: Callable[[str], None], dtype: torch.dtype | None, device: torch.device) -> Trained:
    described = describe(path)
    if described.tokenizer is None:
        raise ValueError(
            f"{path} has no {TOKENIZER}; write one (in transformers: AutoTokenizer.from_pretrained(…)"
            ".save_pretrained(…))"
        )
    arch = complete(described.spec, 1)
    kind = torch.float32 if dtype is None and device.type == "cpu" else dtype
    params = load_model(described, arch, table(False), SINGLE, dtype=kind, device=device)
    say(f"{path}, {described.family.architecture}, {tree.count(params):,} parameters")
    vocabulary = vocabulary_of(described.tokenizer, path / TOKENIZER, described.eos, arch)
    return Trained(params, arch, DEFAULT, vocabulary, version=str(path), files=described.carried)


def _of_gguf(path: Path, say: Callable[[str], None], dtype: torch.dtype | None, device: torch.device) -> Trained:
    model = open_gguf(path)
    arch = complete(model.spec, 1)
    tokenizer = tokenizer_of(model.file.metadata).encode()
    params = load_weights(model, arch, table(False), SINGLE, dtype=dtype or torch.float32, device=device)
    say(f"{path}, {model.family.name}, {tree.count(params):,} parameters")
    vocabulary = vocabulary_of(tokenizer, path, end_of(model), arch)
    return Trained(params, arch, DEFAULT, vocabulary, version=str(path), files=carried(model))
