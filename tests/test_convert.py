"""`ironfn convert`: a directory in, trained on, and out again, on any mesh."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from drivers.main import main
from drivers.places import places
from drivers.saved import open_saved
from drivers.start import first_weights
from ironfn import tree
from ironfn.hf.directory import describe
from ironfn.layout.table import unshard
from ironfn.mesh import fake
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.model.arch import complete
from ironfn.spec.records import MeshSpec, RunSpec
from ironfn.types import Params

from .hf_models import VOCAB, edited, equal, model_of, quiet, taken_in

CPU = torch.device("cpu")


def ironfn(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def done(*words: object) -> str:
    result = ironfn(*words)
    assert result.exit_code == 0, result.output
    return result.output


def refused(*words: object) -> str:
    result = ironfn(*words)
    assert result.exit_code == 1, result.output
    return result.output


def add_tokenizer(path: Path, size: int = 300) -> None:
    """Put a tokenizer and what goes with one into a directory."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat"] * 3, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"eos_token":  "</s>"}')
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "generation_config.json").write_text('{"eos_token_id": [1, 0]}')


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a Hugging Face directory of several files, with a tokenizer, below the working directory."""
    import transformers

    monkeypatch.chdir(tmp_path)
    with quiet():
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=48, max_position_embeddings=64, bos_token_id=0, eos_token_id=1,
        )  # fmt: skip
        transformers.LlamaForCausalLM(config).save_pretrained("hf", max_shard_size="30KB")
    add_tokenizer(Path("hf"))
    edited(Path("hf"), something_else={"kept": [1]})
    return Path("hf")


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def test_in_and_out_changes_nothing(source: Path) -> None:
    assert "21 tensors, 34,720 parameters" in done("convert", source, "ours")
    assert "whole" in done("ckpt", "verify", "ours")
    assert done("generate", "ours", "-p", "the cat", "--tokens", 3)
    assert "LlamaForCausalLM" in done("convert", "ours", "back", "--shard-gb", "3e-5")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert Path("back", name).read_bytes() == (source / name).read_bytes(), name
    before, after = (json.loads((path / "config.json").read_text()) for path in (source, Path("back")))
    assert before.items() <= after.items()
    mine, theirs = tensors(Path("back")), tensors(source)
    assert set(mine) == set(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_what_was_trained_goes_out_with_what_came_in(source: Path) -> None:
    """Begun from the Hugging Face directory as it stands; the template goes along, the beginning is needed once."""
    done("convert", source, "ours")
    Path("text.txt").write_text("the cat sat on the mat. " * 200)
    short = ["-s", "data.length=32", "-s", "data.sets={m: {sources: [text.txt]}}", "-s", "data.split.validation=0"]
    short += ["-s", "train.batch=2", "-s", "out=out", "-s", "name=b", "-s", f"model.init_from={source}"]
    done("prepare", "ours/spec.yaml", *short)
    done("pretrain", "ours/spec.yaml", *short, "-s", "train.steps=1")
    trained = tree.flatten(open_saved(Path("out/b"), print).params)
    moved = {path: (x - trained[path]).abs().max() for path, x in tree.flatten(taken_in(source)[0]).items()}
    assert 0 < max(moved.values()) < 1e-4  # one step of the rate that the spec sets
    done("convert", "out/b", "back")
    assert Path("back/chat_template.jinja").read_text() == "{{ messages }}"
    source.rename("gone")
    done("pretrain", "ours/spec.yaml", *short, "-s", "train.steps=2")


def test_a_cast_and_a_padded_table(source: Path) -> None:
    done("convert", source, "ours", "--dtype", "bfloat16", "--pad-vocab-to", 64)
    saved = open_saved(Path("ours"), print)
    assert saved.spec.train.precision.params == "bfloat16"
    table = tree.flatten(saved.params)["embed/tokens"]
    assert (table.dtype, table.shape[0], int(table[300:].count_nonzero())) == (torch.bfloat16, 320, 0)
    done("convert", "ours", "back", "--dtype", "float16")
    back = tensors(Path("back"))
    assert {x.dtype for x in back.values()} == {torch.float16}
    assert back["lm_head.weight"].shape[0] == 300


REFUSED: dict[str, tuple[Any, list[object], str]] = {
    "a target that is there": (lambda path: Path("ours").mkdir(), [], "is there already"),
    "no tokenizer": (lambda path: (path / "tokenizer.json").unlink(), [], "no tokenizer.json"),
    "a tokenizer that is none": (lambda path: (path / "tokenizer.json").write_text("[" * 99999), [], "not a tokenizer"),
    "a tokenizer that is too large": (lambda path: add_tokenizer(path, 310), [], "the tokenizer has"),
    "an architecture": (lambda path: edited(path, architectures=["X"]), [], "known are"),
    "a source that is neither": (lambda path: (path / "config.json").unlink(), [], "holds no checkpoint; train one"),
    "an adapter alone": (
        lambda path: (path / "config.json").rename(path / "adapter_config.json"), [], "an adapter without its model",
    ),
    "the wrong direction": (lambda path: None, ["--to", "hf"], "`ironfn convert hf NEW` makes a run of it"),
    "ids that are no JSON": (
        lambda path: (path / "generation_config.json").write_text("{"), [], "generation_config.json is not JSON",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_is_refused_leaves_nothing(case: str, source: Path) -> None:
    spoil, words, why = REFUSED[case]
    if case == "a tokenizer that is too large":
        edited(source, vocab_size=258)
        small = {n: t[:258] if t.shape[0] == 300 else t for n, t in tensors(source).items()}
        for file in source.glob("*.safetensors*"):
            file.unlink()
        save_file(small, source / "model.safetensors")
    spoil(source)
    before = {path for path in Path().iterdir() if path.is_dir()}
    assert why in refused("convert", source, "ours", *words)
    assert {path for path in Path().iterdir() if path.is_dir()} == before


def test_what_cannot_be_meant_is_refused(source: Path) -> None:
    before = sorted(Path().rglob("*"))
    assert "hf/out lies inside of hf" in refused("convert", source, "hf/out")
    for words in (("hf", "out.gguf"), ("hf", "out", "--shard-gb", "nan"), ("hf", "out", "--pad-vocab-to", 10**12)):
        result = ironfn("convert", *words)
        assert result.exit_code == 2, result.output
    assert sorted(Path().rglob("*")) == before
    (source / "config.json").rename("a file")
    for command in (["generate"], ["eval", "-t", "a file"]):
        assert ironfn(*command, "a file").exit_code in (1, 2)
        assert "Traceback" not in ironfn(*command, "a file").output


def test_a_model_without_a_tokenizer_goes_in_if_asked(source: Path) -> None:
    (source / "tokenizer.json").unlink()
    done("convert", source, "ours", "--no-tokenizer")
    assert "put the one that the model was trained with there" in refused("generate", "ours", "-p", "x")
    done("convert", "ours", "back")
    assert not Path("back/tokenizer.json").exists()


@pytest.mark.parametrize("name", ["llama", "mixtral", "glm4-moe"])
@pytest.mark.parametrize("kind", ["hf", "ours"])
def test_first_weights_are_the_same_on_every_mesh(name: str, kind: str, tmp_path: Path) -> None:
    with quiet():
        model_of(name).save_pretrained(tmp_path / "hf")
    whole, arch = taken_in(tmp_path / "hf")
    if kind == "ours":
        done("convert", tmp_path / "hf", tmp_path / "ours", "--no-tokenizer")

    def taken(mesh: Mesh, spec: MeshSpec) -> Params:
        where = places(RunSpec(mesh=spec), arch, mesh).params
        params, fixed = first_weights(tmp_path / kind, arch, where, mesh, torch.float32, CPU)
        return unshard(tree.merge(params, fixed), where, mesh)

    equal(taken(SINGLE, MeshSpec()), whole)
    ep = 2 if arch.moe is not None else 1
    for params in fake.run(lambda mesh: taken(mesh, MeshSpec(tp=2, ep=ep)), tp=2, ep=ep):
        equal(params, whole)
    for params in fake.run(lambda mesh: taken(mesh, MeshSpec(dp=2, fsdp=True)), dp=2):
        equal(params, whole)


def test_first_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    with quiet():
        model_of("llama").save_pretrained(tmp_path / "hf")
    other = complete(attrs.evolve(describe(tmp_path / "hf").spec, layers=3, norm_eps=0.1), 1)
    where = places(RunSpec(), other, SINGLE).params
    with pytest.raises(ValueError, match=r"layers is 2 there and 3 here; norm_eps is 0\.001 there and 0\.1 here"):
        first_weights(tmp_path / "hf", other, where, SINGLE, torch.float32, CPU)
    with pytest.raises(ValueError, match=r"config\.json is a file; `ironfn convert"):
        first_weights(tmp_path / "hf/config.json", other, where, SINGLE, torch.float32, CPU)
    with pytest.raises(ValueError, match="there is no directory"):
        first_weights(tmp_path / "no", other, where, SINGLE, torch.float32, CPU)
    assert other.vocab == VOCAB
