"""Open the newest checkpoint of a run for looking at it: its parameters, its tokenizer, its spec."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from attrs import frozen
from tokenizers import Tokenizer

from ironfn import checkpoint, tree
from ironfn.algo.step import State
from ironfn.data.preparation import TOKENIZER
from ironfn.data.tokenizer import load
from ironfn.model.arch import Arch
from ironfn.model.forward import Forward
from ironfn.spec.records import RunSpec
from ironfn.spec.structure import structure
from ironfn.types import Params

from .build import forward


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
    """Open a run directory's newest whole checkpoint, or one checkpoint. ValueError where there is none."""
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = folder if (folder / "manifest.msgpack").exists() else checkpoint.newest(folder, say)
    if found is None:
        raise ValueError(f"{path} holds no checkpoint; train one with `ironfn pretrain`")
    saved, meta = checkpoint.load(found, keep=lambda leaf: leaf.startswith(("params/", "extra/fixed/")))
    spec, arch = structure(meta["spec"], RunSpec), structure(meta["arch"], Arch)
    if isinstance(spec, list) or isinstance(arch, list):
        raise ValueError(f"{found} was written by ironfn {meta['ironfn']}, whose specs this version does not read")
    beside = found.parent.parent / TOKENIZER
    vocabulary = load(beside if beside.exists() else Path(spec.data.dir) / TOKENIZER, spec.data.tokenizer.eos)
    say(f"{found}, step {meta['step']}")
    extra = tree.branch(saved, "extra") if "extra" in saved else {}
    return Trained(
        params=State(meta["step"], tree.branch(saved, "params"), {}, extra=extra).model,
        arch=arch,
        how=forward(spec.train.precision),
        tokenizer=vocabulary.tokenizer,
        eos=vocabulary.eos,
        prompts=tuple(spec.report.prompts),
    )
