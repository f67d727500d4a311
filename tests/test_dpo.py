"""Preferences from spec to checkpoint: the reference stays, stopping changes no bit, and no mesh changes a number."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from drivers import run as driver
from drivers.adapted import open_whole
from drivers.specs import resolve
from ironfn.rewards.model import rewards
from ironfn.spec.records import RunSpec
from tests.hf_models import quiet
from tests.ranks import Ranks
from tests.test_convert import done
from tests.tuning import MESHES, final, refused, rows, same, sets, undrawn, write_model

__all__ = ["undrawn"]

SPEC = """
name: {name}
model: {{init_from: base}}
data:
  form: {form}
  dir: {form}
  length: 48
  sets: {{mine: {{sources: [{form}.jsonl]}}}}
  split: {{validation: 0.2}}
dpo: {{beta: 0.5}}
optim: {{lr: 1e-2, schedule: {{kind: constant, warmup: 2}}, adamw: {{eps: 1e-4}}}}
train: {{steps: 8, batch: 4, threads: 1}}
checkpoint: {{every: 4}}
report: {{eval_every: 4, eval_rows: 4, prompts: ["the "], sample_tokens: 4, peak_flops: 1e11}}
"""
LORA = ("adapter.kind=lora", "adapter.rank=4")
REWARD = ("model.score=true", "report.prompts=[]", "optim.lr=1e-3")
WAYS: dict[str, tuple[str, ...]] = {
    "whole": ("optim.lr=2e-3",),
    "lora": (*LORA, "adapter.dropout=0.5"),
    "nf4": (*LORA, "adapter.base=nf4", "dpo.objective=ipo", "dpo.supervised=0.1"),
    "kept": (*LORA, "adapter.dropout=0.5", "dpo.precompute=true"),
    "orpo": ("dpo.objective=orpo", "optim.lr=2e-3", "train.micro_batch=2"),
    "kto": (*LORA, "dpo.objective=kto"),
    "reward": REWARD,
    "reward-lora": (*REWARD, *LORA),
}


def form_of(name: str) -> str:
    return "judged" if name.startswith("kto") else "pairs"


def write_rows() -> None:
    """Write pairs and judged completions: what has an x in it is preferred."""
    draw = random.Random(0)
    words = ["the", "quick", "brown", "dog", "jumps", "over", "a", "lazy", "and"]

    def said(most: int) -> str:
        return " ".join(draw.choice(words) for _ in range(draw.randint(1, most)))

    asked = [said(5) for _ in range(60)]
    pairs: list[dict[str, Any]] = [{"prompt": q, "chosen": f" {said(2)} fox", "rejected": f" {said(3)}"} for q in asked]
    pairs += [
        {
            "prompt": [{"role": "user", "content": said(2)}],
            "chosen": [{"role": "assistant", "content": f"fox {said(1)}"}],
            "rejected": [{"role": "assistant", "content": said(2)}],
        }
        for _ in range(10)
    ]
    judged = [{"prompt": p["prompt"], "completion": p["chosen"], "label": True} for p in pairs[::2]]
    judged += [{"prompt": p["prompt"], "completion": p["rejected"], "label": False} for p in pairs[1::2]]
    for name, told in (("pairs", pairs), ("judged", judged)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dpo")
    write_model(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_rows()
        done("convert", "hf", "base")
        for form in ("pairs", "judged"):
            done("prepare", spec_file("kto" if form == "judged" else "whole"), "-s", "dpo.objective=" + objective(form))
    return folder


def objective(form: str) -> str:
    return "kto" if form == "judged" else "dpo"


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def spec_file(name: str) -> Path:
    path = Path(f"{name}.yaml")
    path.write_text(SPEC.format(name=name, form=form_of(name)))
    return path


def load(name: str, *overrides: str) -> RunSpec:
    return resolve((str(spec_file(name)),), overrides)


@pytest.fixture(scope="module")
def runs(folder: Path, undrawn: None) -> Path:
    """Take eight steps in every way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for way, overrides in WAYS.items():
            assert driver.run(load(way, *overrides)) == 0
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_what_is_preferred_becomes_likelier(way: str, runs: Path) -> None:
    """On rows that are held out. A checkpoint holds what is trained alone, and no reference."""
    seen = [row for row in rows(way) if row["kind"] == "validation"]
    assert seen[-1]["loss"] < seen[0]["loss"]
    assert seen[-1]["margin"] > seen[0]["margin"]
    assert seen[-1]["accuracy"] >= 0.6
    assert math.isnan(seen[0]["perplexity"])
    assert math.isnan(seen[0]["bits_per_byte"])
    paths = {path for path in final(way) if not path.startswith("opt/")}
    assert all(path.startswith("params/") for path in paths)
    if "adapter.kind=lora" in WAYS[way]:
        assert all("_lora/" in path or path == "params/score/w" for path in paths)
    assert ("params/score/w" in paths) == way.startswith("reward")


@pytest.mark.parametrize("way", ["whole", "lora", "kept"])
def test_a_policy_that_is_its_reference_has_log_2(way: str, runs: Path) -> None:
    """Whatever the dropout: at the first step, and where nothing has been trained."""
    first = next(row for row in rows(way) if row["kind"] == "train")
    assert first["loss"] == pytest.approx(math.log(2), abs=2e-6)
    assert first["margin"] == pytest.approx(0.0, abs=1e-5)
    start = next(row for row in rows(way) if row["kind"] == "validation")
    assert start["loss"] == pytest.approx(math.log(2), abs=2e-6)


def test_a_reference_that_was_computed_beforehand_is_the_live_one(runs: Path) -> None:
    for one, other in zip(rows("kept"), rows("lora"), strict=True):
        assert one["kind"] == other["kind"]
        for name in ("loss", "margin", "logp_chosen", "kl"):
            if name in one:
                assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-4), name
    assert sorted(path.name for path in Path("pairs/mine").glob("*.reference")) == [
        "train.tokens.reference", "validation.tokens.reference",
    ]  # fmt: skip


def test_what_was_computed_beforehand_is_computed_anew_where_it_is_not_of_this(runs: Path) -> None:
    path = Path("pairs/mine/train.tokens.reference")
    whole = path.read_bytes()
    for name, damaged in (
        ("flip", whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:]),
        ("short", whole[:-8]),
        ("other", whole.replace(b'"identity": "', b'"identity": "0')),
        ("junk", b"junk"),
    ):
        path.write_bytes(damaged)
        assert driver.run(load(f"kept-{name}", *WAYS["kept"], "train.steps=2")) == 0
        assert path.read_bytes() == whole
    losses = [[r["loss"] for r in rows(name) if r["kind"] == "train"][:2] for name in ("kept-flip", "kept")]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("way", WAYS)
def test_what_was_stopped_goes_on_as_if_it_never_was(way: str, runs: Path) -> None:
    name = f"{way}-cut"
    assert driver.run(load(name, *WAYS[way], "train.steps=4")) == 0
    assert driver.run(load(name, *WAYS[way])) == 0
    assert same(final(name), final(way))
    assert str(rows(name)) == str(rows(way))
    if not way.startswith("reward"):
        assert Path(f"runs/{name}/samples.jsonl").read_bytes() == Path(f"runs/{way}/samples.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("way", "mesh"),
    [("whole", "fsdp"), ("whole", "tp2"), ("nf4", "tp2"), ("kept", "zero1"), ("kto", "dp2"), ("reward-lora", "tp2"),
     ("reward", "fsdp")],
)  # fmt: skip
def test_two_ranks_tell_what_one_process_tells(way: str, mesh: str, runs: Path) -> None:
    name = f"{way}-{mesh}"
    verb = "reward-model" if way.startswith("reward") else "dpo"
    if way == "kept":
        for path in Path("pairs/mine").glob("*.reference"):
            path.unlink()
    with Ranks(
        2, [verb, spec_file(name), *sets((*WAYS[way], *MESHES[mesh]))], Path(f"ranks-{name}").absolute()
    ) as ranks:
        assert ranks.wait(120) == [0, 0], [rank.errors for rank in ranks.all]
    kinds = ("train", "validation")
    pairs = zip(*([r for r in rows(each) if r["kind"] in kinds] for each in (name, way)), strict=True)
    for found, expected in pairs:
        assert found.get("batch") == expected.get("batch")
        for key in ("loss", "margin"):
            assert found[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-4), key
    for path, leaf in final(name).items():
        torch.testing.assert_close(leaf, final(way)[path], rtol=2e-3, atol=2e-4, msg=lambda m, p=path: f"{p}: {m}")


@pytest.mark.parametrize("way", ["reward", "reward-lora"])
def test_a_reward_is_a_sequence_classifier_of_transformers(way: str, runs: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    if way == "reward":
        done("convert", f"runs/{way}", f"hf-{way}")
    else:
        done("merge", f"runs/{way}", f"merged-{way}")
        done("convert", f"merged-{way}", f"hf-{way}")
    here = open_whole(Path(f"runs/{way}"), print)
    texts = [[2, 3, 4, 5], [7, 8, 9]]
    (ours,) = rewards(here.params, here.arch, [texts])
    with quiet(), torch.no_grad():
        model = AutoModelForSequenceClassification.from_pretrained(f"hf-{way}").eval()
        assert type(model).__name__ == "LlamaForSequenceClassification"
        assert ours == pytest.approx([model(torch.tensor([text])).logits.item() for text in texts], rel=1e-3, abs=1e-5)
    assert "ends in a reward" in refused("generate", f"runs/{way}", "-p", "the ")


def test_a_reference_has_to_stay_as_it_was(runs: Path) -> None:
    done("convert", "hf", "changed")
    overrides = ("dpo.reference=changed", *WAYS["whole"])
    assert driver.run(load("held", *overrides, "train.steps=4")) == 0
    done("convert", "hf", "half", "--dtype", "bfloat16")
    Path("changed").rename("before")
    Path("half").rename("changed")
    assert "was held to another reference" in refused("dpo", spec_file("held"), *sets(overrides))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("data.form=examples",), "ironfn sft"),
        (("model.score=true", "report.prompts=[]"), "ironfn reward-model"),
        (("dpo.objective=kto",), "does not learn from pairs"),
        (("dpo.objective=ipo", "dpo.smoothing=0.1"), "has no effect on ipo"),
        (("dpo.objective=robust",), "below 1/2"),
        (("dpo.objective=simpo", "dpo.reference=base"), "knows no reference"),
        (("dpo.objective=simpo", "dpo.precompute=true"), "knows no reference"),
        (("model.init_from=null",), "model.init_from"),
        (("adapter.kind=prompt",), "adapter.kind"),
        (("train.compile=true",), "not compiled"),
        (("train.noise_scale_every=2",), "noise scale"),
        (("sft.overlong=split",), "would part a pair"),
        (("dpo.beta=0",), "dpo.beta"),
        (("dpo.reference=nowhere",), "nowhere"),
    ],
)
def test_what_cannot_be_meant_is_refused(overrides: tuple[str, ...], said: str) -> None:
    assert said in refused("dpo", spec_file("wrong"), *sets(overrides))
    assert not Path("runs/wrong/checkpoints").exists()


def test_micro_batches_would_part_the_baseline_of_kto() -> None:
    overrides = ("dpo.objective=kto", "train.micro_batch=2")
    assert "micro-batches would part" in refused("dpo", spec_file("kto-wrong"), *sets(overrides))


@pytest.mark.parametrize("way", ["whole", "reward", "kto"])
def test_rows_are_shown_with_each_prompt_once_before_what_answers_it(way: str) -> None:
    """The fault: a completion that is shown without what it answers."""
    shown = done("data", "inspect", spec_file(way), *sets(WAYS[way]), "--rows", 200)
    if way == "reward":  # scored as a whole, at its end
        shown = shown.replace("]\n{{ ", "]\n ").replace("}}[end]", "[end]")
    found = set(re.findall(r"\[pair \d+\]\n\{\{(.*)\}\}\n\[pair \d+, (.*)\]\n(.*)\[end\](?:\n.*\n(.*)\[end\])?", shown))
    given = [json.loads(line) for line in Path(f"{form_of(way)}.jsonl").read_text().splitlines()]
    if way == "kto":
        expected = {(row["prompt"], "liked" if row["label"] else "not liked", row["completion"]) for row in given[:20]}
        found = {each[:3] for each in found}
    else:
        expected = {(row["prompt"], "chosen", row["chosen"], row["rejected"]) for row in given[:60]}
    assert len(found & expected) > len(expected) * 0.6, "but for those of the validation split"
    table = done("data", "inspect", spec_file(way), *sets(WAYS[way]), "--rows", 1, "--tokens")
    assert "reads '" in table
