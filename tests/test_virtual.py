"""Prompt and prefix tuning: `peft`'s logits and tensors, and texts that do not see what stands before others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor

from ironfn import tree
from ironfn.grad.value_and_grad import value_and_grad
from ironfn.hf.directory import describe
from ironfn.hf.peft import WEIGHTS, load_adapter, save_adapter
from ironfn.loss.lm import lm_loss
from ironfn.mesh.axis import SINGLE
from ironfn.model.adapters import adapting, first_adapter, merge
from ironfn.model.arch import Arch
from ironfn.model.attention import by_mask, by_span, written_out
from ironfn.model.forward import Forward
from ironfn.model.tables import table
from ironfn.model.transformer import logits
from ironfn.model.virtual import with_virtual
from ironfn.spec.adapter_records import AdapterSpec
from ironfn.types import Batch, Params
from property_tests.strategies import batch_of, params_of
from property_tests.test_func_law import packed
from tests.hf_models import VOCAB, logits_of, model_of, quiet, taken_in
from tests.peers import make_arch

N = 3
CLOSE = {"rtol": 1e-9, "atol": 1e-10}
TOKENS = torch.randint(0, VOCAB, (2, 10), generator=torch.Generator().manual_seed(0))
CONFIGS = {"prompt": PromptTuningConfig, "prefix": PrefixTuningConfig}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning"),
]


def ours(base: Params, adapter: Params, spec: AdapterSpec, arch: Arch) -> Tensor:
    """Return the logits of the texts' own tokens."""
    how = Forward(adapt=adapting(spec))
    return logits(tree.merge(base, adapter), with_virtual({"tokens": TOKENS}, N), arch, SINGLE, how)[:, N:]


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gpt-neox"])
def test_it_is_pefts(name: str, kind: str, tmp_path: Path) -> None:
    """Of learned positions and of rotary ones, scaled embeddings, windows, fewer heads of keys."""
    with quiet():
        model_of(name).save_pretrained(tmp_path / "base")
    theirs = get_peft_model(model_of(name), CONFIGS[kind](task_type="CAUSAL_LM", num_virtual_tokens=N)).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    base, arch = taken_in(tmp_path / "base")
    family = describe(tmp_path / "base").family
    loaded = load_adapter(tmp_path / "theirs", arch, family)
    assert (loaded.spec.kind, loaded.spec.tokens) == (kind, N)
    expected = logits_of(theirs, TOKENS)[:, -TOKENS.shape[1] :]
    found = ours(base, loaded.params, loaded.spec, arch)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (found - logits_of(model_of(name), TOKENS)).abs().max() > 1e-2
    save_adapter(tmp_path / "ours", loaded.spec, arch, loaded.params, family, str(tmp_path / "base"))
    mine, other = (load_file(tmp_path / at / WEIGHTS) for at in ("ours", "theirs"))
    assert mine.keys() == other.keys() == {"prompt_embeddings"}
    assert torch.equal(mine["prompt_embeddings"], other["prompt_embeddings"])
    again = PeftModel.from_pretrained(model_of(name), str(tmp_path / "ours")).eval()
    assert torch.equal(logits_of(again, TOKENS)[:, -TOKENS.shape[1] :], expected)


def made(kind: Any, preset: str = "llama") -> tuple[Arch, Params, Params, AdapterSpec]:
    arch, spec = make_arch(preset, 61), AdapterSpec(kind, tokens=N)
    return arch, params_of(arch), first_adapter(spec, arch, {}, 0, table(False), dtype=torch.float64), spec


@pytest.mark.parametrize("attention", [by_span, by_mask, written_out], ids=["span", "mask", "written out"])
@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_a_text_is_the_same_alone_or_packed(kind: str, attention: Any) -> None:
    arch, base, adapter, spec = made(kind)
    texts = [torch.randint(0, arch.vocab, (n,)) for n in (4, 7, 2)]
    vg = value_and_grad(lm_loss(arch, Forward(attention=attention, adapt=adapting(spec))))
    together, grads = vg(adapter, with_virtual(packed(texts, 16), N, 4), SINGLE, base)
    total, sums = torch.zeros((), dtype=torch.float64), tree.map(torch.zeros_like, adapter)
    for text in texts:
        alone, part = vg(adapter, with_virtual(packed([text], len(text) - 1), N), SINGLE, base)
        total, sums = total + alone.total, tree.map(torch.add, sums, part)
    torch.testing.assert_close(together.total, total, **CLOSE)
    assert together.weight == sum(map(len, texts)) - len(texts)
    for mine, other in zip(tree.leaves(grads), tree.leaves(sums), strict=True):
        torch.testing.assert_close(mine, other, **CLOSE)
        assert mine.abs().max() > 1e-6


def test_places_lie_before_every_text_and_are_not_learned() -> None:
    batch = packed([torch.arange(1, 4), torch.arange(5, 10)], 8)
    found = with_virtual(batch, 2, 8)
    assert found["tokens"].tolist() == [[0, 0, 1, 2, 0, 0, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0]]
    assert found["targets"][0, :10].tolist() == [0, 0, 2, 3, 0, 0, 6, 7, 8, 9]
    assert found["weight"].tolist() == [[0, 0, 1, 1, 0, 0, 1, 1, 1, 1, *[0] * 6]]
    assert found["segment"].tolist() == [[*[0] * 4, *[1] * 6, *[-1] * 6]]
    assert found["position"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, *[0] * 6]]
    plain: Batch = {"tokens": torch.tensor([[7, 8]]), "lengths": torch.tensor([[2, 2]]), "row": torch.tensor([3])}
    found = with_virtual(plain, 1)
    assert found["lengths"].tolist() == [[3, 3, 3]]
    assert found["position"].tolist() == [[0, 1, 2]]
    assert found["row"].tolist() == [3]
    with pytest.raises(ValueError, match="given experts"):
        with_virtual(plain | {"experts": torch.zeros(1, 2, 1, 1)}, 1)


def test_only_the_vectors_move() -> None:
    for kind in ("prompt", "prefix"):
        arch, base, adapter, spec = made(kind)
        batch = with_virtual(batch_of(arch, 2, 8, 0, True), N)
        _, grads = value_and_grad(lm_loss(arch, Forward(adapt=adapting(spec))))(adapter, batch, SINGLE, base)
        assert tree.flatten(grads).keys() == tree.flatten(adapter).keys()
        with pytest.raises(ValueError, match=f"a {kind} stands before the texts"):
            merge(spec, arch, base, adapter)
