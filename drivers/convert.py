"""Turn a Hugging Face directory into one of ours, and back: ``ironfn convert``."""

from __future__ import annotations

import math
import time
from pathlib import Path

import click

DTYPES = ("float32", "bfloat16", "float16")


@click.command("convert")
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option(
    "--to",
    type=click.Choice(("auto", "ironfn", "hf", "gguf")),
    default="auto",
    show_default=True,
    help="What to write.",
)
@click.option("--dtype", type=click.Choice(DTYPES), help="Cast every tensor; else each keeps its own.")
@click.option("--architecture", help="To hf: the class of transformers, such as LlamaForCausalLM.")
@click.option(
    "--shard-gb",
    type=click.FloatRange(0, 1e6, min_open=True),
    default=5.0,
    show_default=True,
    help="To hf: the most that a file holds.",
)
@click.option(
    "--pad-vocab-to",
    type=click.IntRange(1, 1 << 20),
    default=1,
    show_default=True,
    help="To ironfn: round the vocabulary's rows up to a multiple.",
)
@click.option("--stored-vocab", is_flag=True, help="To ironfn: as many ids as the stored table has rows.")
@click.option(
    "--gguf-type",
    type=click.Choice(("F32", "F16", "Q8_0")),
    default="F16",
    show_default=True,
    help="To gguf: what matrices are written as.",
)
@click.option("--no-tokenizer", is_flag=True, help="To ironfn: go on without a tokenizer.json.")
def command(
    source: Path,
    target: Path,
    to: str,
    dtype: str | None,
    architecture: str | None,
    shard_gb: float,
    pad_vocab_to: int,
    stored_vocab: bool,
    gguf_type: str,
    no_tokenizer: bool,
) -> None:
    """Turn a Hugging Face directory or a GGUF file into a run directory of ours, or a run or a checkpoint into those.

    TARGET has to be new; where it ends in .gguf it is written as such. Every tensor is used exactly once, or the
    command fails, names them, and writes nothing.
    """
    import torch

    from ironfn.hf.directory import is_directory

    began = time.perf_counter()
    kind = None if dtype is None else getattr(torch, dtype)
    if target.exists():
        raise ValueError(f"{target} is there already; give a new name, or remove it")
    if target.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"{target} lies inside of {source}, which would no longer be what it was; give another place")
    if math.isnan(shard_gb):
        raise click.UsageError("--shard-gb is not a number; give the gigabytes that a file may have")
    ours = to == "ironfn" or (to == "auto" and (source.is_file() or is_directory(source)))
    if ours and to == "auto" and target.suffix == ".gguf":
        raise click.UsageError(
            f"{source} is no run: `ironfn convert {source} NEW` makes one of it, and then `ironfn convert NEW {target}`"
        )
    if ours and architecture is not None:
        raise click.UsageError("--architecture says what to write to hf, and this writes ironfn's own")
    if ours and source.is_file():
        from .gguf import import_gguf

        told = import_gguf(source, target, kind, pad_vocab_to)
    elif ours:
        from .imported import import_directory

        told = import_directory(source, target, kind, pad_vocab_to, stored=stored_vocab, bare=no_tokenizer)
    elif to == "gguf" or (to == "auto" and target.suffix == ".gguf"):
        from .gguf import export_gguf

        told = export_gguf(source, target, gguf_type, lambda line: click.echo(line))
    else:
        from .exported import export_run

        told = export_run(source, target, kind, architecture, int(shard_gb * 1e9), lambda line: click.echo(line))
    click.echo(f"{told}, in {time.perf_counter() - began:.1f} s")
