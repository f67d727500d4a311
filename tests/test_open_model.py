"""A model opens alike from a run, a checkpoint, a Hugging Face directory and a GGUF file, with what goes with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from tokenizers import Tokenizer

from drivers.gguf import export_gguf
from drivers.imported import import_directory
from drivers.main import main
from drivers.trained import Trained, open_model
from drivers.wording import open_wording
from ironfn import tree
from ironfn.data.tokenizer import train
from ironfn.hf.usage import chat_template, ends, specials
from ironfn.mesh.axis import SINGLE
from ironfn.model.transformer import logits
from ironfn.spec.records import TokenizerSpec

from .chat_templates import TEMPLATES
from .hf_models import quiet

TOLD = [{"role": "user", "content": "Say <|im_end|>!"}]


def silent(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any, Any]]:
    """Return a folder with one tiny model as hf, run and model.gguf, and `transformers`' model and tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = Tokenizer.from_str(train([Path(__file__).read_text()], TokenizerSpec(vocab_size=300)))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", chat_template=TEMPLATES["chatml"]
    )
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=302, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3, bos_token_id=300, eos_token_id=301,
    )  # fmt: skip
    with quiet():
        model = transformers.LlamaForCausalLM(config).eval()
        model.generation_config.eos_token_id = [301, 299]
        model.save_pretrained(folder / "hf")
        theirs.save_pretrained(folder / "hf")
        import_directory(folder / "hf", folder / "run", None, 1, stored=False, bare=False)
        export_gguf(folder / "run", folder / "model.gguf", "F32", silent)
        yield folder, model, theirs


WHERE = ("hf", "run", "run/checkpoints/0", "model.gguf")


def opened(models: tuple[Path, Any, Any], where: str, **more: Any) -> Trained:
    path = models[0] / where
    return open_model(next(path.parent.glob("*0*")) if where.endswith("/0") else path, silent, **more)


@pytest.mark.parametrize("where", WHERE, ids=["hf", "run", "checkpoint", "gguf"])
def test_a_model_is_the_same_wherever_it_lies(models: tuple[Path, Any, Any], where: str) -> None:
    _, model, theirs = models
    ours = opened(models, where)
    ids = torch.tensor([ours.encode("def f(x):")])
    assert ids.tolist() == [theirs("def f(x):")["input_ids"]]
    with torch.no_grad():
        right = model(ids).logits
    torch.testing.assert_close(logits(ours.params, {"tokens": ids}, ours.arch, SINGLE), right, rtol=0, atol=2e-5)
    chat = ours.chat()
    assert chat is not None
    right = theirs.apply_chat_template(TOLD, add_generation_prompt=True, sanitize_control_tokens=True)["input_ids"]
    assert chat.encode(TOLD) == right
    chat.renderer.close()
    assert (ours.bos, ours.arch.context) == (300, 256)
    assert ours.stop == ({0, 301} if where.endswith("gguf") else {301, 299})
    assert ours.encode("") == [300]
    assert len(ours.version) > 0


@pytest.mark.parametrize("where", ["hf", "run"])
def test_a_policy_stops_at_every_end_that_its_model_has(models: tuple[Path, Any, Any], where: str) -> None:
    """The fault: a text that ends with the second of two ends goes on, and counts as cut off."""
    assert open_wording(models[0] / where).teaching(None, "all", "split").stops == {301, 299}


def test_its_dtype_is_as_asked_and_nothing_is_kept_twice(models: tuple[Path, Any, Any]) -> None:
    for where in WHERE:
        ours = opened(models, where, dtype=torch.bfloat16)
        assert {leaf.dtype for leaf in tree.leaves(ours.params)} == {torch.bfloat16}, where
        assert ours.how.compute is None


def test_every_command_takes_any_of_them(models: tuple[Path, Any, Any], tmp_path: Path) -> None:
    asked = tmp_path / "asked.jsonl"
    asked.write_text(json.dumps({"query": "a", "choices": ["b", "c"], "gold": 0}) + "\n")
    texts: set[str] = set()
    for where in ("hf", "run", "model.gguf"):
        path = str(models[0] / where)
        done = CliRunner().invoke(main, ["generate", path, "-p", "def", "--tokens", "5", "-t", "0"])
        assert done.exit_code == 0, done.output
        texts.add(done.stdout)
        done = CliRunner().invoke(main, ["eval", path, "-t", str(asked)])
        assert done.exit_code == 0, done.output
    assert len(texts) == 1


def test_a_directory_without_a_tokenizer_is_refused(models: tuple[Path, Any, Any], tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((models[0] / "hf" / name).read_bytes())
    with pytest.raises(ValueError, match=r"has no tokenizer.json; write one \(in transformers"):
        open_model(tmp_path, silent)


def test_what_the_small_files_say() -> None:
    def told(**files: Any) -> dict[str, bytes]:
        names = {"generation": "generation_config.json", "config": "config.json", "tokenizer": "tokenizer_config.json"}
        return {names[name]: json.dumps(value).encode() for name, value in files.items()}

    assert ends(told(generation={"eos_token_id": [5, 3]}, config={"eos_token_id": 1})) == (5, 3)
    assert ends(told(generation={}, config={"eos_token_id": 0})) == (0,)
    assert ends(told(generation={"eos_token_id": None}, config={"eos_token_id": [True, "x"]})) == ends({}) == ()
    token = {"content": "<s>", "lstrip": False, "__type": "AddedToken"}
    config = {"bos_token": token, "eos_token": "</s>", "unk_token": None, "pad_token": 5, "model_max_length": 9}
    assert specials(told(tokenizer=config)) == {"bos_token": "<s>", "eos_token": "</s>"}
    many = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    assert chat_template(told(tokenizer={"chat_template": many})) == "d"
    assert chat_template(told(tokenizer={"chat_template": many}), tools=True) == "t"
    both = told(tokenizer={"chat_template": "old"}) | {"chat_template.jinja": "né".encode()}
    assert chat_template(both) == "né"
    assert chat_template(told(tokenizer={"chat_template": [{"name": "rag", "template": "r"}]})) is None
    assert chat_template(told(tokenizer={})) is chat_template({}) is None
