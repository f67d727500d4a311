"""Open the newest checkpoint of a run for looking at it: its parameters, its tokenizer, its spec."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from attrs import frozen
from tokenizers import Tokenizer

from ironfn import tree
from ironfn.data.preparation import TOKENIZER
from ironfn.data.tokenizer import load
from ironfn.model.arch import Arch
from ironfn.model.forward import Forward
from ironfn.types import Params

from .build import forward
from .saved import open_saved


@frozen
class Trained:
    """Hold a trained model, ready to be used. eos: the id that ends, and so begins, a text."""

    params: Params
    arch: Arch
    how: Forward
    tokenizer: Tokenizer
    eos: int
    prompts: tuple[str, ...]


def require_text(text: str, what: str) -> None:
    """Refuse text that is no Unicode: half a surrogate pair, as undecodable bytes of a command line become."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} {text!r} is not valid Unicode at character {error.start}; write it in UTF-8"
        ) from error


def open_trained(path: Path, say: Callable[[str], None]) -> Trained:
    """Open a model for use: see `open_saved`. ValueError where it has no tokenizer."""
    saved = open_saved(path, say)
    if saved.tokenizer is None:
        raise ValueError(f"{path} has no {TOKENIZER}; put the one that the model was trained with there")
    vocabulary = load(saved.tokenizer, saved.spec.data.tokenizer.eos)
    return Trained(
        params=tree.merge(saved.params, saved.fixed),
        arch=saved.arch,
        how=forward(saved.spec.train.precision),
        tokenizer=vocabulary.tokenizer,
        eos=vocabulary.eos,
        prompts=tuple(saved.spec.report.prompts),
    )
