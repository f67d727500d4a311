"""Every family in and out of a Hugging Face directory: names, configs, and not one bit changed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ironfn import tree
from ironfn.hf.config import REQUIRED
from ironfn.hf.directory import describe, export_model
from ironfn.layout.table import unshard
from ironfn.mesh import fake
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.model.arch import complete
from ironfn.model.tables import table
from ironfn.model.transformer import logits
from ironfn.types import Params

from .hf_models import CONFIGS, VOCAB, edited, equal, logits_of, model_of, quiet, taken_in

TOKENS = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    with quiet():
        yield


@pytest.fixture(params=list(CONFIGS))
def saved(request: Any, tmp_path: Path) -> tuple[Any, Path]:
    """Return a random model of a family and the directory that `transformers` saved it in."""
    model = model_of(request.param)
    model.save_pretrained(tmp_path / "theirs")
    return model, tmp_path / "theirs"


def test_a_family_goes_in_and_out(saved: tuple[Any, Path], tmp_path: Path) -> None:
    model, theirs = saved
    params, arch = taken_in(theirs)
    torch.testing.assert_close(
        logits(params, {"tokens": TOKENS}, arch, SINGLE), logits_of(model, TOKENS), rtol=0, atol=1e-5
    )
    carried = describe(theirs).carried
    out = export_model(tmp_path / "ours", arch, tree.flatten(params), carried=carried, tokenizer=None, file_bytes=9000)
    assert out.config["architectures"] == [type(model).__name__]
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 2
    equal(taken_in(tmp_path / "ours")[0], params)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name
    assert torch.equal(logits_of(again, TOKENS), logits_of(model, TOKENS))


def test_a_family_goes_out_without_what_an_import_kept(saved: tuple[Any, Path], tmp_path: Path) -> None:
    """As a model that was trained here does: the family is found, or another that says the same mathematics."""
    model, theirs = saved
    params, arch = taken_in(theirs)
    export_model(tmp_path / "ours", arch, tree.flatten(params), carried={}, tokenizer=None, eos=1)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    torch.testing.assert_close(logits_of(again, TOKENS), logits_of(model, TOKENS), rtol=0, atol=1e-5)


def test_the_parts_of_a_mesh_are_those_of_the_whole(saved: tuple[Any, Path]) -> None:
    _, theirs = saved
    whole, arch = taken_in(theirs, pad=8)
    shares = {"tp": 2, "ep": 2 if arch.moe is not None else 1}

    def here(mesh: Mesh) -> Params:
        return unshard(taken_in(theirs, mesh, pad=8)[0], table(False), mesh)

    for params in fake.run(here, **shares):
        equal(params, whole)


def test_the_defaults_of_a_config_are_those_of_transformers(saved: tuple[Any, Path]) -> None:
    """What a file leaves out means what the class of `transformers` says, not what a preset of ours does."""
    model, theirs = saved
    family = describe(theirs).family
    # the class of GLM-4.5 gives its 96 heads 42.7 numbers each where nothing else is said
    heads = {"num_attention_heads": 32} if family.model_type == "glm4_moe" else {}
    whole = type(model.config)(**heads).to_dict() | {"architectures": [family.architecture]}
    (theirs / "config.json").write_text(json.dumps(whole))
    said = complete(describe(theirs).spec, 1)
    needed = {name for row in family.keys if row.default is REQUIRED for name in row.theirs}
    edited(theirs, **dict.fromkeys(whole.keys() - needed - {"architectures"}, ...))
    assert complete(describe(theirs).spec, 1) == said
