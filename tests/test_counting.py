"""Parameters equal those of `transformers`; operations equal those that torch counts while a peer runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel

from ironfn import tree
from ironfn.mesh.axis import SINGLE
from ironfn.model.arch import Arch, complete
from ironfn.model.counting import flops_per_token, matmul_parameters, parameters
from ironfn.model.families import model_spec
from ironfn.model.init import abstract, init, shapes
from ironfn.model.tables import table
from tests import peers

CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {}),
    ("llama", {"tied": False}),
    ("llama", {"kv_heads": 2, "head_dim": 20}),
    ("llama", {"kv_heads": 1, "tied": False, "attention_bias": True, "mlp_bias": True}),
    ("gpt2", {}),
    ("gpt2", {"layers": 3, "ffn": 192}),
)


def published(preset: str, vocab: int, **fields: Any) -> Arch:
    return complete(model_spec(preset, **fields), vocab)


@pytest.mark.parametrize(("preset", "fields"), CASES)
def test_parameters_are_those_of_transformers(preset: str, fields: dict[str, Any]) -> None:
    arch = peers.make_arch(preset, 101, **fields)
    model, params = getattr(peers, preset)(arch)
    assert parameters(arch) == model.num_parameters() == tree.count(params)
    assert parameters(arch) == tree.count(abstract(shapes(arch))) == tree.count(init(arch, 0, table(False), SINGLE))


def test_gpt2_has_the_published_number_of_parameters() -> None:
    """`openai-community/gpt2`: 124,439,808; counted here on the meta device, where nothing is allocated."""
    arch = published("gpt2", 50257, width=768, layers=12, heads=12, context=1024)
    with torch.device("meta"):
        theirs = GPT2LMHeadModel(GPT2Config()).num_parameters()
    assert parameters(arch) == theirs == 124_439_808


def test_smollm2_and_llama_2_have_the_published_numbers() -> None:
    """SmolLM2-135M's file holds 134,515,008 numbers; Llama-2-7b's 6,738,415,616."""
    smol = published(
        "llama", 49152, width=576, layers=30, heads=9, kv_heads=3, ffn=1536, context=8192, rope_theta=1e5, tied=True
    )
    assert parameters(smol) == 134_515_008
    seven = published("llama", 32000, width=4096, layers=32, heads=32, ffn=11008, context=4096, tied=False)
    assert parameters(seven) == 6_738_415_616


@pytest.mark.parametrize(("preset", "fields"), CASES)
@pytest.mark.parametrize("length", [8, 32])
def test_operations_are_those_that_torch_counts(preset: str, fields: dict[str, Any], length: int) -> None:
    """Forward and backward of the eager peer, whose attention is two plain products over all length x length pairs.

    torch counts matrix products alone, 2 operations for each multiplication, and so do we: looking tokens up, norms,
    biases, activations, softmax and rotary turns count as nothing on either side. The causal half that is masked away
    is counted on both sides. The counts are equal, not near: nothing else is a product in these two families.
    """
    arch = peers.make_arch(preset, 101, **fields)
    model, _ = getattr(peers, preset)(arch)
    tokens = torch.randint(0, arch.vocab, (3, length))
    with FlopCounterMode(display=False) as counter:
        model(tokens, use_cache=False).logits.sum().backward()
    assert counter.get_total_flops() == flops_per_token(arch, length) * tokens.numel()


def test_the_utilisation_note_of_the_field() -> None:
    """N = 1000 matrix numbers, L 2, H 2, Q 8, T 16: 6 N + 12 L H Q T = 12144.

    A vocabulary of 13 ids at width 8 leaves 1000 - 104 = 896 for two blocks: 448 each, of which attention has
    2 x 8 x 16 + 2 x 16 x 8 = 512 with two key heads. So one key head, 2 x 128 + 2 x 64 = 384, and a feed-forward of 4:
    8 x 4 + 4 x 8 = 64.
    """
    arch = published("gpt2", 13, width=8, layers=2, heads=2, kv_heads=1, head_dim=8, ffn=4, context=16, tied=False)
    assert matmul_parameters(arch) == 1000
    assert flops_per_token(arch, 16) == 12144.0


def test_the_input_table_counts_only_where_it_is_multiplied() -> None:
    tied, free = (peers.make_arch("llama", 101, tied=tied) for tied in (True, False))
    assert parameters(free) == parameters(tied) + 101 * 48
    assert flops_per_token(free, 16) == flops_per_token(tied, 16), "tied or not, one table is a head and one is not"
    learned = peers.make_arch("gpt2", 101, context=512)
    assert flops_per_token(learned, 16) == flops_per_token(peers.make_arch("gpt2", 101), 16)


def test_a_padded_vocabulary_is_counted_as_it_is_computed() -> None:
    plain, padded = (peers.make_arch("llama", 101, pad_vocab_to=to) for to in (1, 64))
    assert parameters(padded) - parameters(plain) == 27 * 48
    assert flops_per_token(padded, 8) - flops_per_token(plain, 8) == 6 * 27 * 48
