"""Evaluation: sums over tokens divided once, padding left out, no graph, no overflow."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ironfn.data import eval_batches
from ironfn.layout.table import shard
from ironfn.loss.lm import lm_loss
from ironfn.mesh import fake
from ironfn.mesh.axis import SINGLE, Mesh
from ironfn.model.arch import complete
from ironfn.model.tables import table
from ironfn.report.evaluation import Evaluation, bits_per_byte, evaluate, target_bytes
from ironfn.spec.records import ModelSpec
from ironfn.types import Batch, LossSum, Params
from property_tests.strategies import params_of
from tests.data_stores import dataset, hold_store

NO_BYTES = torch.ones(16, dtype=torch.int64)


def given_nats(params: Params, batch: Batch, mesh: Mesh) -> LossSum:
    """Be a loss whose nats of each token are in the batch."""
    return LossSum((batch["nats"] * batch["weight"]).sum(), batch["weight"].sum())


def rows(*lengths_and_nats: tuple[int, float], length: int = 10) -> Batch:
    nats = torch.full((len(lengths_and_nats), length), 1e9)
    weight = torch.zeros(len(lengths_and_nats), length)
    for row, (tokens, value) in enumerate(lengths_and_nats):
        nats[row, :tokens] = value
        weight[row, :tokens] = 1.0
    return {"nats": nats, "weight": weight, "targets": torch.zeros_like(nats, dtype=torch.int64)}


def test_the_loss_is_of_tokens_not_of_batches() -> None:
    """10 tokens at 1.0 and 2 at 4.0 give 18 / 12, not the batch means' 2.5."""
    result = evaluate(given_nats, {}, [rows((10, 1.0)), rows((2, 4.0))], SINGLE, NO_BYTES)
    assert result.loss == 1.5
    assert result.perplexity == pytest.approx(4.4817, abs=5e-5)
    assert (result.tokens, result.bytes) == (12, 12)
    assert result.bits_per_byte == pytest.approx(18 / 12 / math.log(2), rel=1e-15)


@pytest.mark.parametrize("loss", [800.0, 1e30, math.inf])
def test_a_huge_loss_has_an_infinite_perplexity(loss: float) -> None:
    result = evaluate(given_nats, {}, [rows((1, loss))], SINGLE, NO_BYTES)
    assert result.perplexity == math.inf
    assert result.loss == pytest.approx(loss, rel=1e-6)


def test_a_loss_that_is_no_number_stays_one_without_a_crash() -> None:
    result = evaluate(given_nats, {}, [rows((1, math.nan))], SINGLE, NO_BYTES)
    assert math.isnan(result.loss)
    assert math.isnan(result.perplexity)
    assert math.isnan(result.bits_per_byte)


def test_bytes_are_those_of_scored_targets_whatever_the_others_hold() -> None:
    byte_lengths = torch.tensor([0, 3, 1, 7])
    batch: Batch = {
        "targets": torch.tensor([[1, 2, 3, -100, 99]]),
        "weight": torch.tensor([[1.0, 1.0, 0.0, 0.0, 0.0]]),
        "nats": torch.ones(1, 5),
    }
    assert target_bytes(batch, byte_lengths).item() == 4
    result = evaluate(given_nats, {}, [batch], SINGLE, byte_lengths)
    assert result.bits_per_byte == pytest.approx(2 / math.log(2) / 4)
    special = evaluate(given_nats, {}, [rows((3, 1.0))], SINGLE, byte_lengths)
    assert math.isnan(special.bits_per_byte)
    assert bits_per_byte(math.log(2.0) * 8, 4) == 2.0


def test_weights_scale_the_loss_and_its_divisor_alike() -> None:
    batch = rows((2, 1.0), (1, 4.0))
    batch["weight"][1] *= 0.5
    result = evaluate(given_nats, {}, [batch], SINGLE, NO_BYTES)
    assert result.loss == (1.0 + 1.0 + 2.0) / 2.5
    assert result.tokens == 3


def test_a_set_without_targets_is_refused() -> None:
    for batches in ([], [rows((0, 1.0))]):
        with pytest.raises(ValueError, match="no target of weight above 0"):
            evaluate(given_nats, {}, batches, SINGLE, NO_BYTES)


# A real model with real padding, scored by its own library alone.


@pytest.fixture(scope="module")
def llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(3)
    return LlamaForCausalLM(config).double().eval()


def texts() -> list[Tensor]:
    made = torch.Generator().manual_seed(5)
    return [torch.randint(64, (n,), generator=made) for n in (3, 9, 2, 12, 5, 7, 4, 12)]


def padded(batch_texts: list[Tensor]) -> Batch:
    shape = (len(batch_texts), 12)
    tokens, targets, weight = torch.zeros(shape, dtype=torch.int64), torch.full(shape, -100), torch.zeros(shape)
    for row, text in enumerate(batch_texts):
        tokens[row, : len(text)] = text
        targets[row, : len(text) - 1] = text[1:]
        weight[row, : len(text) - 1] = 1.0
    return {"tokens": tokens, "targets": targets, "weight": weight}


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_padded_texts_score_as_each_alone(llama: torch.nn.Module, size: int) -> None:
    """Against each text alone, for every batch size; transformers' own loss is a float32 one."""

    def loss(params: Params, batch: Batch, mesh: Mesh) -> LossSum:
        logits = torch.func.functional_call(llama, params, (batch["tokens"],)).logits
        assert not logits.requires_grad
        nats = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="none", ignore_index=-100)
        return LossSum((nats * batch["weight"].flatten()).sum(), batch["weight"].sum())

    theirs = sum(llama(text[None], labels=text[None]).loss.item() * (len(text) - 1) for text in texts())
    alone = sum(F.cross_entropy(llama(text[None, :-1]).logits[0], text[1:], reduction="sum").item() for text in texts())
    tokens = sum(len(text) - 1 for text in texts())
    byte_lengths = torch.arange(64)
    batches = [padded(texts()[at : at + size]) for at in range(0, 8, size)]
    result = evaluate(loss, dict(llama.named_parameters()), batches, SINGLE, byte_lengths)
    assert result.tokens == tokens
    assert result.bytes == sum(int(text[1:].sum()) for text in texts())
    assert result.loss == pytest.approx(alone / tokens, rel=1e-12)
    assert result.loss == pytest.approx(theirs / tokens, rel=1e-7)
    assert result.bits_per_byte == pytest.approx(alone / math.log(2) / result.bytes, rel=1e-12)


def test_no_graph_is_kept() -> None:
    weight = torch.ones(4, requires_grad=True)
    totals: list[Tensor] = []

    def loss(params: Params, batch: Batch, mesh: Mesh) -> LossSum:
        totals.append((weight * 2.0).sum())
        return LossSum(totals[-1], torch.tensor(4.0), {"seen": weight.sum()})

    result = evaluate(loss, {}, [rows((4, 0.0))] * 3, SINGLE, NO_BYTES)
    assert [total.grad_fn for total in totals] == [None] * 3
    assert result.loss == 2.0
    assert result.metrics == {"seen": 1.0}
    assert torch.is_grad_enabled()


def test_many_small_sums_are_added_without_loss() -> None:
    """In float32 the 10,000 small batches would vanish beside the large one."""
    large = {"nats": torch.full((1, 1), 2.0**26), "weight": torch.ones(1, 1), "targets": torch.zeros(1, 1).long()}
    small = {"nats": torch.full((1, 1), 1.0), "weight": torch.ones(1, 1), "targets": torch.zeros(1, 1).long()}
    result = evaluate(given_nats, {}, [large] + [small] * 10_000, SINGLE, NO_BYTES)
    assert result.loss == (2.0**26 + 10_000) / 10_001


# Several ranks, as threads with their places in a fake mesh.


@pytest.mark.parametrize("sizes", ["dp 2", "ep 2", "dp 2 ep 2"])
def test_ranks_give_the_scores_of_one_even_with_unequal_shares(sizes: str) -> None:
    """10 tokens at 1.0 and 2 at 4.0 on two ranks are 1.5 (perplexity 4.4817); ranks without a row add nothing."""
    words = sizes.split()
    mesh = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    shares = [rows((10, 1.0)), rows((2, 4.0)), rows((0, 0.0)), rows((0, 0.0))]
    found = fake.run(lambda mesh: evaluate(given_nats, {}, [shares[mesh.share]], mesh, NO_BYTES), **mesh)
    for each in found:
        assert each == evaluate(given_nats, {}, shares[:2], SINGLE, NO_BYTES)
        assert (each.loss, each.tokens) == (1.5, 12)
        assert each.perplexity == pytest.approx(4.4817, abs=5e-5)


@pytest.mark.parametrize("attend", ["document", "row"])
@pytest.mark.parametrize("batch", [1, 2, 8])
def test_a_model_scores_the_same_on_every_mesh_and_in_every_batch(batch: int, attend: str) -> None:
    """Seven windows: neither two nor four ranks get equally many, and a rank that stood aside would stop the others."""
    documents = [[*range(1 + n % 3, 10 - n % 4), 0] for n in range(9)]
    data = dataset((hold_store(documents, vocab_size=12),), 8, attend=attend)
    arch = complete(ModelSpec(width=16, layers=1, heads=2, ffn=8, context=8, init_std=0.5, pad_vocab_to=2), 12)
    params = params_of(arch)

    def score(mesh: Mesh) -> Evaluation:
        batches = (
            {**b, "weight": b["weight"].double()} for b in eval_batches(data, batch, None, mesh.share, mesh.shares)
        )
        return evaluate(lm_loss(arch), shard(params, table(False), mesh), batches, mesh, data.byte_lengths)

    whole = score(SINGLE)
    assert whole.tokens == data.tokens
    for sizes in ({"dp": 2}, {"dp": 4}, {"dp": 2, "ep": 2}, {"dp": 2, "tp": 2}):
        for found in fake.run(score, **sizes):
            assert (found.tokens, found.bytes) == (whole.tokens, whole.bytes)
            assert found.loss == pytest.approx(whole.loss, rel=1e-12)
