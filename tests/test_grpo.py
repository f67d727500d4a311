"""A policy's own texts from prompt to reward to update: replay, references and graders; no stop and no mesh shows."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from drivers import run as driver
from drivers.specs import resolve
from ironfn import checkpoint, tree
from ironfn.report.rows import read_rows
from ironfn.spec.records import RunSpec
from tests.hf_models import quiet
from tests.ranks import Ranks
from tests.test_convert import add_tokenizer, done
from tests.test_run import PACE
from tests.tuning import TEMPLATE, refused, same

SPEC = """
name: {name}
model: {{init_from: base}}
data: {{form: prompts, length: 40, sets: {{mine: {{sources: [prompts.jsonl]}}}}, split: {{validation: 0.3}}}}
grpo:
  prompts: 4
  group: 4
  tokens: 6
  batches: 2
  epochs: 2
  tries: 2
  rewards:
    vowels: {{kind: pattern, pattern: "[aeiou]"}}
    short: {{kind: function, path: "tests.own_rewards:shortness", weight: 0.5}}
optim: {{lr: 2e-3, schedule: {{kind: constant}}, adamw: {{eps: 1e-4}}}}
train: {{steps: 8, threads: 1}}
checkpoint: {{every: 4}}
report: {{eval_every: 8, eval_rows: 3, prompts: ["the "], sample_tokens: 4, peak_flops: 1e11}}
"""
STAGES = "grpo.stages={hot: {step: 3, temperature: 1.4}}"
LORA = ("adapter.kind=lora", "adapter.rank=4")
WAYS: dict[str, tuple[str, ...]] = {
    "whole": ("grpo.refill=1", "grpo.scale=batch", "grpo.mean=rollout", "train.micro_batch=2", STAGES),
    "held": ("grpo.temperature=0.8", "grpo.kl=k3", "grpo.loss=cispo", "grpo.entropy=0.01"),
    "lora": (*LORA, "adapter.dropout=0.1", "grpo.kl=k2", "grpo.mean=constant", "grpo.whole=true"),
    "nf4": (*LORA, "adapter.base=nf4_all", "grpo.kl=k1", "grpo.kl_in=reward", "grpo.overlong=3", "grpo.loss=sapo"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=128, max_position_embeddings=128, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return prepared(tmp_path_factory.mktemp("grpo"), config)


def prepared(folder: Path, config: Any) -> Path:
    """Write a model of a config of `transformers`, converted, and prompts for it."""
    import transformers

    with quiet():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "hf")
    add_tokenizer(folder / "hf")
    (folder / "hf/chat_template.jinja").write_text(TEMPLATE)
    draw = random.Random(0)
    words = ["the", "quick", "brown", "dog", "jumps", "over", "a", "lazy", "and"]
    rows: list[dict[str, Any]] = [{"prompt": f"{n} {draw.choice(words)}", "answer": n} for n in range(20)]
    rows += [{"prompt": [{"role": "user", "content": f"{n} and?"}], "answer": n} for n in range(10)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done("convert", "hf", "base")
    return folder


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def spec_file(name: str) -> Path:
    path = Path(f"{name}.yaml")
    path.write_text(SPEC.format(name=name))
    return path


def load(name: str, *overrides: str) -> RunSpec:
    return resolve((str(spec_file(name)),), overrides)


def rows(name: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in PACE} for row in read_rows(Path("runs", name, "metrics.jsonl"))]


def final(name: str) -> dict[str, torch.Tensor]:
    return tree.flatten(checkpoint.load(Path(f"runs/{name}/checkpoints/step-00000008"))[0])


def texts(name: str) -> str:
    return Path(f"runs/{name}/completions.jsonl").read_text()


@pytest.fixture(scope="module")
def runs(folder: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for way, overrides in WAYS.items():
            assert driver.run(load(way, *overrides)) == 0
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_what_is_told_of_a_run(way: str, runs: Path) -> None:
    """The first update of a rollout is on-policy to rounding, later ones are not; every reward has its mean."""
    train = [row for row in rows(way) if row["kind"] == "train"]
    assert [("reward" in row) for row in train] == [True, False, False, False] * 2
    assert all(row["gap"] <= 1e-5 and abs(row["ratio"] - 1) <= 1e-5 for row in train[::4])
    assert any(row["gap"] > 1e-5 for row in train[2:4])
    assert [row["temperature"] for row in train[::4]] == {"whole": [1.0, 1.4], "held": [0.8] * 2}.get(way, [1.0] * 2)
    if "kl" in train[0]:
        assert abs(train[0]["kl"]) <= 1e-5, "the reference is what the run begins from, at the same temperature"
    assert sum(row["grad_norm"] > 0 for row in train) >= 4
    for row in train[::4]:
        assert 0 <= row["rewards/vowels"] <= 1
        assert row["failed"] == row["failed/short"] == 0
        assert 0 <= row["alike"] <= 1
    ends = [row for row in rows(way) if row["kind"] == "validation"]
    assert [row["step"] for row in ends] == [0, 8]
    assert {"accuracy", "pass_2", "mean_2"} <= ends[0].keys()
    told = [json.loads(line) for line in texts(way).splitlines()]
    assert [row["step"] for row in told] == [1] * 4 + [5] * 4
    assert all(len(row["completions"]) == 4 for row in told)


@pytest.mark.parametrize("way", WAYS)
def test_what_was_stopped_inside_of_a_replay_goes_on_as_if_it_never_was(way: str, runs: Path) -> None:
    name = f"{way}-cut"
    assert driver.run(load(name, *WAYS[way], "train.steps=6")) == 0
    assert driver.run(load(name, *WAYS[way])) == 0
    assert same(final(name), final(way))
    mine = [row for row in rows(name) if not (row["kind"] == "validation" and row["step"] == 6)]
    assert mine == rows(way)
    assert texts(name) == texts(way)


@pytest.mark.parametrize(
    ("way", "mesh"),
    [
        ("whole", "mesh.dp=2"), ("held", "mesh.tp=2"), ("lora", "mesh.dp=2 mesh.fsdp=true"),
        ("nf4", "mesh.tp=2 mesh.sequence_parallel=true"),
    ],
    ids=["dp", "tp", "fsdp", "sequences"],
)  # fmt: skip
def test_two_ranks_write_and_learn_what_one_process_does(way: str, mesh: str, runs: Path) -> None:
    name = f"{way}-{mesh.split()[-1].replace('=', '-').replace('.', '-')}"
    sets = [word for each in (*WAYS[way], *mesh.split()) for word in ("-s", each)]
    with Ranks(2, ["grpo", spec_file(name), *sets], Path(f"ranks-{name}").absolute()) as ranks:
        assert ranks.wait(120) == [0, 0], [rank.errors for rank in ranks.all]
    assert [json.loads(line)["prompt"] for line in texts(name).splitlines()] == [
        json.loads(line)["prompt"] for line in texts(way).splitlines()
    ]
    first, alone = (next(row for row in rows(run) if row["kind"] == "train") for run in (name, way))
    assert first["reward"] == pytest.approx(alone["reward"], rel=1e-6)
    for found, expected in zip(rows(name), rows(way), strict=True):
        if found["kind"] == "train":
            assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-3, abs=1e-6)
    for path, leaf in final(name).items():
        torch.testing.assert_close(leaf, final(way)[path], rtol=5e-3, atol=5e-4, msg=lambda m, p=path: f"{p}: {m}")


def test_graders_that_fail_are_counted_and_never_a_score(folder: Path) -> None:
    sets = ('grpo.rewards={odd: {kind: function, path: "tests.own_rewards:sometimes"}}', "train.steps=4")
    assert driver.run(load("failing", *sets)) == 0
    row = next(row for row in rows("failing") if row["kind"] == "train")
    told = [one for line in texts("failing").splitlines() for one in json.loads(line)["completions"]]
    lost = [one for one in told if one["reward"] is None]
    assert row["failed"] == len(lost) > 0
    assert all("a" in one["text"] and "no service" in one["odd"] for one in lost)
    stops = (sets[0].replace('sometimes"', 'sometimes", on_failure: stop'), sets[1])
    with pytest.raises(Exception, match="no service"):
        driver.run(load("stopping", *stops))


def test_nothing_is_learned_where_all_texts_were_cut_off_and_masked(folder: Path) -> None:
    assert driver.run(load("cut-off", "grpo.truncated=mask", "grpo.tokens=1", "train.steps=2")) == 0
    for row in [row for row in rows("cut-off") if row["kind"] == "train"]:
        assert row["loss"] == row["grad_norm"] == row["texts"] == 0
    told = next(row for row in rows("cut-off") if row["kind"] == "train")
    assert told["truncated"] == 1
    assert told["length"] == 1


def test_a_rollout_that_is_gone_is_told(runs: Path) -> None:
    assert driver.run(load("lost", *WAYS["whole"], "train.steps=6")) == 0
    for path in Path("runs/lost/rollouts").glob("*.json"):
        path.unlink()
    assert "00000004.json is gone" in refused("grpo", spec_file("lost"), *_sets(WAYS["whole"]))


@pytest.mark.parametrize("harm", ["cut", "changed", "other"])
def test_a_rollout_that_is_damaged_is_told(harm: str, runs: Path) -> None:
    name = f"harmed-{harm}"
    assert driver.run(load(name, *WAYS["held"], "train.steps=6")) == 0
    path = Path(f"runs/{name}/rollouts/00000004.json")
    data = path.read_bytes()
    harmed = {"cut": data[:-40], "changed": data.replace(b'"numbers": [', b'"numbers": [1', 1)}
    if harm == "other":
        assert driver.run(load(f"{name}-2", *WAYS["held"], "train.steps=2")) == 0
        harmed["other"] = Path(f"runs/{name}-2/rollouts/00000000.json").read_bytes()
    path.write_bytes(harmed[harm])
    assert "00000004.json is damaged" in refused("grpo", spec_file(name), *_sets(WAYS["held"]))


def test_rollouts_before_the_oldest_checkpoint_are_deleted(runs: Path) -> None:
    assert sorted(path.name for path in Path("runs/whole/rollouts").iterdir()) == ["00000004.json"]


def _sets(overrides: tuple[str, ...]) -> list[str]:
    return [word for each in overrides for word in ("-s", each)]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("grpo.rewards.new={kind: keyword}", "looks for words"),
        ("grpo.rewards.new={kind: function, path: nowhere}", "package.module:function"),
        ("grpo.rewards.new={kind: function, path: 'nowhere:f'}", "cannot be imported"),
        ("grpo.tokens=40", "no room for a prompt"),
        ("grpo.group=1", "at least 2"),
        ("grpo.stages={a: {step: 3, temperature: 0}}", "above 0"),
        ("grpo.stages={a: {step: 3}, b: {step: 3}}", "where a begins already"),
        ("grpo.truncated_share=0", "above 0"),
        ("grpo.replay_routing=true", "no experts whose choice"),
        ("grpo.batches=5", "cannot be parted"),
        ("train.batch=16", "an update learns from grpo.prompts x grpo.group texts"),
        ("data.sets.mine.weight=2", "all prompts are asked alike often"),
        ("grpo.reference=base", "nothing is held to it"),
        ("adapter={kind: prompt}", "have no prompt of their own"),
        ("data.form=pairs", "ironfn dpo"),
        ("data.sets.mine.sources=[hf/config.json]", "prompt has to be a text"),
    ],
)
def test_what_cannot_be_meant_is_refused(override: str, said: str) -> None:
    assert said in refused("grpo", spec_file("wrong"), "-s", override)
    assert not Path("runs/wrong/checkpoints").exists()


def test_a_run_without_a_reward_is_refused() -> None:
    text = SPEC.format(name="wrong")
    Path("none.yaml").write_text(text[: text.index("  rewards:")] + text[text.index("optim:") :])
    assert "grpo.rewards: names no reward" in refused("grpo", "none.yaml")
