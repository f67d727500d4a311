"""Reward models: the loss of trl's trainer, the scores of transformers, in and out of their directories, every mesh."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from attrs import evolve
from torch import Tensor
from trl import RewardTrainer

from ironfn import tree
from ironfn.grad.value_and_grad import value_and_grad
from ironfn.hf.directory import describe, export_model
from ironfn.hf.scorers import SCORERS
from ironfn.layout.reduce import reduce_grads
from ironfn.layout.table import shard, unshard
from ironfn.loss.reward import bradley_terry, reward_loss
from ironfn.mesh import fake
from ironfn.mesh.axis import SINGLE, Mesh, sum_over_rows
from ironfn.model.arch import Arch
from ironfn.model.init import init
from ironfn.model.tables import table
from ironfn.model.transformer import logits
from ironfn.optim.presets import labels_of, shapes_of
from ironfn.rewards.model import rewards
from ironfn.spec.records import OptimSpec
from ironfn.types import Batch, Params

from . import peers
from .hf_models import CONFIGS, VOCAB, edited, equal, quiet, taken_in

PAIRS = [([1, 2, 3], [4, 5], [6, 7, 8]), ([9], [3, 1, 2], [5]), ([2, 2], [1], [3, 3, 3, 3])]


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    with quiet():
        yield


def rows_of(pairs: list[Any], per_row: int, length: int) -> Batch:
    """Write pairs as rows, with the prompt once and the last place of each completion asked for."""
    rows: list[list[tuple[int, ...]]] = []
    for start in range(0, len(pairs), per_row):
        row: list[tuple[int, ...]] = []
        for number, (prompt, *sides) in enumerate(pairs[start : start + per_row]):
            row += [(id, 0, at, 2 * number, 2 * number + 1) for at, id in enumerate(prompt)]
            for segment, side in enumerate(sides, 2 * number):
                first, last = len(prompt) - 1, len(side)
                row += [(id, int(at == last), first + at, segment, segment) for at, id in enumerate(side, 1)]
        rows.append(row + [(0, 0, 0, -1, -1)] * (length - len(row)))
    names = ("tokens", "weight", "position", "segment", "until")
    batch = dict(zip(names, torch.tensor(rows).unbind(2), strict=True))
    return batch | {"targets": batch["tokens"], "weight": batch["weight"].double()}


def scorer(name: str, seed: int = 0) -> Any:
    """Return a random model of `transformers` that ends in a number."""
    torch.manual_seed(seed)
    config = CONFIGS[name]()
    config._attn_implementation = "eager"
    config.num_labels = 1
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(5.0) if weight.dim() > 1 else weight.add_(torch.randn_like(weight) * 0.1)
    return model


def score_alone(model: Any, ids: list[int]) -> Tensor:
    """Return their score of a text, alone in a batch, where its last token is the last."""
    return model(torch.tensor([ids])).logits[0, 0]


@pytest.mark.parametrize("center", [None, 0.1])
def test_it_is_what_trl_computes(center: float | None) -> None:
    scores = torch.randn(10, 1, requires_grad=True)
    same = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x)
    told = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=same, _metrics=defaultdict(lambda: defaultdict(list)),
        args=SimpleNamespace(center_rewards_coefficient=center), _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    inputs = {"attention_mask": torch.ones(10, 3)}
    expected = RewardTrainer.compute_loss(told, lambda **_: SimpleNamespace(logits=scores), inputs)
    found = bradley_terry(scores[:5, 0], scores[5:, 0], center or 0.0).mean()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    mine, theirs = (torch.autograd.grad(x, scores)[0] for x in (found, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in ("olmoe", "olmoe-clipped", "glm4-moe")])
def test_a_family_goes_in_and_out_and_gives_the_same_scores(name: str, tmp_path: Path) -> None:
    model = scorer(name)
    model.save_pretrained(tmp_path / "theirs")
    params, arch = taken_in(tmp_path / "theirs")
    assert arch.score
    texts = [[[5, 6, 7, 8], [5, 6, 9, 4, 4]], [list(range(3, 30))]]
    with torch.no_grad():
        expected = [[score_alone(model, text).item() for text in group] for group in texts]
    for found, theirs in zip(rewards(params, arch, texts, budget=10), expected, strict=True):
        assert found == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    carried = describe(tmp_path / "theirs").carried
    out = export_model(tmp_path / "ours", arch, tree.flatten(params), carried=carried, tokenizer=None)
    assert out.config["architectures"] == [type(model).__name__]
    equal(taken_in(tmp_path / "ours")[0], params)
    again = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "ours", attn_implementation="eager"
    ).eval()
    assert again.num_labels == 1
    for path, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[path], weight), path


def test_a_model_of_ours_goes_out(tmp_path: Path) -> None:
    arch = evolve(peers.make_arch("llama", VOCAB, kv_heads=2), score=True)
    params = init(arch, 0, table(False), SINGLE)
    export_model(tmp_path / "ours", arch, tree.flatten(params), carried={}, tokenizer=None, eos=1)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours").eval()
    assert type(model).__name__ == "LlamaForSequenceClassification"
    (found,) = rewards(params, arch, [[[5, 6, 7]]])
    with torch.no_grad():
        assert found[0] == pytest.approx(score_alone(model, [5, 6, 7]).item(), rel=1e-4, abs=1e-6)


def test_every_form_is_one_of_transformers() -> None:
    assert all(hasattr(transformers, family.architecture) for family in SCORERS)


def test_several_labels_are_no_reward(tmp_path: Path) -> None:
    scorer("llama").save_pretrained(tmp_path)
    edited(tmp_path, id2label={"0": "bad", "1": "good"})
    with pytest.raises(ValueError, match="2 labels, and a reward is a single one"):
        describe(tmp_path)
    edited(tmp_path, id2label=...)
    with pytest.raises(ValueError, match="2 labels"):
        describe(tmp_path)


def test_value_and_gradients_are_those_of_texts_alone() -> None:
    arch = evolve(peers.make_arch("llama", 17, kv_heads=2), score=True)
    causal, params = peers.llama(evolve(arch, score=False))
    config = causal.config
    config.num_labels = 1
    model = transformers.LlamaForSequenceClassification(config)
    model.model = causal.model
    model = model.double().eval()
    params = tree.map(lambda x: x.double(), {name: each for name, each in params.items() if name != "head"})
    params["score"] = {"w": model.score.weight.detach().t().clone()}
    sides = [[score_alone(model, prompt + side) for side in (chosen, rejected)] for prompt, chosen, rejected in PAIRS]
    expected = sum((bradley_terry(a, b, 0.2) for a, b in sides), torch.zeros(()))
    expected.backward()
    found, grads = value_and_grad(reward_loss(arch, center=0.2))(params, rows_of(PAIRS, 2, 18), SINGLE)
    torch.testing.assert_close(found.total, expected.detach(), rtol=1e-6, atol=1e-6)
    assert found.weight == 3
    assert found.metrics["accuracy"] == sum(bool(a > b) for a, b in sides)
    torch.testing.assert_close(grads["score"]["w"], model.score.weight.grad.t(), rtol=1e-6, atol=1e-6)  # type: ignore
    mine, theirs = grads["blocks"]["0"]["attn"]["wq"], causal.model.layers[0].self_attn.q_proj.weight.grad  # type: ignore
    torch.testing.assert_close(mine, theirs.t(), rtol=1e-6, atol=1e-6)


def outcome(mesh: Mesh, arch: Arch, params: Params) -> tuple[list[float], Params]:
    layout, batch = table(mesh.sequence_parallel), rows_of(PAIRS, 1, 12)
    mine = {name: value.tensor_split(mesh.shares)[mesh.share] for name, value in batch.items()}
    found, grads = value_and_grad(reward_loss(arch))(shard(tree.clone(params), layout, mesh), mine, mesh)
    sums = torch.stack([x.double() for x in (found.total, found.weight, *found.metrics.values())])
    return sum_over_rows(sums, mesh).tolist(), unshard(reduce_grads(grads, layout, mesh), layout, mesh)


@pytest.mark.parametrize(
    "sizes", [{"dp": 2}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"tp": 4, "dp": 2, "sequence_parallel": True}]
)
def test_it_is_the_same_on_every_mesh(sizes: dict[str, Any]) -> None:
    arch = evolve(peers.make_arch("llama", 16, kv_heads=4), score=True)
    params = init(arch, 0, table(False), SINGLE, torch.float64)
    expected, theirs = outcome(SINGLE, arch, params)
    for found, grads in fake.run(lambda mesh: outcome(mesh, arch, params), **sizes):
        assert found == pytest.approx(expected, rel=1e-9)
        for path, grad in tree.flatten(grads).items():
            torch.testing.assert_close(
                grad, tree.flatten(theirs)[path], rtol=1e-9, atol=1e-12, msg=lambda m, p=path: f"{p}: {m}"
            )


def test_it_predicts_no_token_and_its_last_matrix_is_none_of_muons() -> None:
    arch = evolve(peers.make_arch("llama", 17), score=True)
    params = init(arch, 0, table(False), SINGLE)
    with pytest.raises(ValueError, match="ends in a reward"):
        logits(params, {"tokens": torch.tensor([[1, 2]])}, arch, SINGLE)
    assert labels_of(OptimSpec(name="muon"), shapes_of(params))["score/w"] == "adamw"


@pytest.mark.parametrize(("text", "said"), [([], "0 tokens"), ([1] * 65, "65 tokens"), ([17], "outside")])
def test_texts_that_cannot_be_scored_are_refused(text: list[int], said: str) -> None:
    arch = evolve(peers.make_arch("llama", 17), score=True)
    with pytest.raises(ValueError, match=said):
        list(rewards(init(arch, 0, table(False), SINGLE), arch, [[text]]))
