"""Fine-tuning from spec to export: what is frozen stays, stopping changes no bit, and no mesh changes a number."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from drivers import run as driver
from drivers.adapted import open_whole
from drivers.specs import resolve
from drivers.trained import open_model
from ironfn import tree
from ironfn.mesh.axis import SINGLE
from ironfn.model.transformer import logits
from ironfn.spec.records import RunSpec
from tests.hf_models import quiet
from tests.ranks import Ranks
from tests.test_convert import done
from tests.tuning import MESHES, final, refused, rows, same, sets, undrawn, write_model

__all__ = ["undrawn"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning"),
]
SPEC = """
name: {name}
model: {{init_from: base}}
data:
  form: examples
  dir: data
  length: 64
  sets: {{mine: {{sources: [examples.jsonl]}}}}
  split: {{validation: 0.2}}
optim: {{lr: 1e-2, schedule: {{kind: constant, warmup: 2}}, adamw: {{eps: 1e-4}}}}
train: {{steps: 8, batch: 4, threads: 1}}
checkpoint: {{every: 4}}
report: {{eval_every: 4, eval_rows: 4, prompts: ["the "], sample_tokens: 4, peak_flops: 1e11}}
"""
LORA = ("adapter.kind=lora", "adapter.rank=4")
WAYS: dict[str, tuple[str, ...]] = {
    "whole": (),
    "lora": (*LORA, "adapter.dropout=0.1"),
    "dora": (*LORA, "adapter.dora=true"),
    "nf4": (*LORA, "adapter.base=nf4"),
    "prefix": ("adapter.kind=prefix", "adapter.tokens=3", "optim.lr=0.3"),
    "prompt": ("adapter.kind=prompt", "adapter.tokens=3", "optim.lr=0.3"),
}


def examples() -> list[dict[str, Any]]:
    """Return examples of two forms, one of which is longer than a row."""
    draw = random.Random(0)
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "one", "more", "small", "word"]

    def said(most: int) -> str:
        return " ".join(draw.choice(words) for _ in range(draw.randint(1, most)))

    rows: list[dict[str, Any]] = [{"prompt": said(6), "completion": said(4)} for _ in range(30)]
    for _ in range(20):
        turns = [{"role": role, "content": said(2)} for role in ("user", "assistant", "user", "assistant")]
        rows.append({"messages": turns})
    return [*rows, {"prompt": said(3), "completion": " ".join(words * 8)}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model of ours out of one of `transformers`, with a tokenizer and a template, and prepare examples."""
    folder = tmp_path_factory.mktemp("sft")
    write_model(folder)
    (folder / "examples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in examples()))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done("convert", "hf", "base")
        told = done("prepare", spec_file("prepared"))
    assert "31 of the form completion, 20 of the form messages" in told
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


@pytest.fixture(scope="module")
def runs(folder: Path, undrawn: None) -> Path:
    """Take eight steps in every way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for way, overrides in WAYS.items():
            assert driver.run(load(way, *overrides)) == 0
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_the_loss_falls_and_a_checkpoint_holds_what_was_trained_alone(way: str, runs: Path) -> None:
    seen = [row["loss"] for row in rows(way) if row["kind"] == "validation"]
    assert seen[-1] < seen[0] - 0.05
    paths = {path for path in final(way) if path.startswith(("params/", "extra/"))}
    marks = {"whole": "", "prefix": "/prefix_", "prompt": "embed/prompt"}
    assert paths
    assert all(marks.get(way, "_lora/") in path and path.startswith("params/") for path in paths)


@pytest.mark.parametrize("way", WAYS)
def test_what_was_stopped_goes_on_as_if_it_never_was(way: str, runs: Path) -> None:
    """The adapter, the optimizer, the order of the packs, dropout and samples: bit for bit."""
    name = f"{way}-cut"
    assert driver.run(load(name, *WAYS[way], "train.steps=4")) == 0
    assert driver.run(load(name, *WAYS[way])) == 0
    assert same(final(name), final(way))
    assert rows(name) == rows(way)
    assert Path(f"runs/{name}/samples.jsonl").read_bytes() == Path(f"runs/{way}/samples.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("way", "mesh"),
    [("whole", "dp2"), ("lora", "fsdp"), ("dora", "tp2"), ("nf4", "tp2"), ("nf4", "fsdp"), ("prompt", "tp2"),
     ("prefix", "zero1")],
)  # fmt: skip
def test_two_ranks_tell_what_one_process_tells(way: str, mesh: str, runs: Path) -> None:
    name = f"{way}-{mesh}"
    with Ranks(
        2, ["sft", spec_file(name), *sets((*WAYS[way], *MESHES[mesh]))], Path(f"ranks-{name}").absolute()
    ) as ranks:
        assert ranks.wait(120) == [0, 0], [rank.errors for rank in ranks.all]
    mine, alone = rows(name), rows(way)
    kinds = ("train", "validation")
    pairs = zip(*([r for r in each if r["kind"] in kinds] for each in (mine, alone)), strict=True)
    for found, expected in pairs:
        assert found.get("batch") == expected.get("batch")
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    for path, leaf in final(name).items():
        torch.testing.assert_close(leaf, final(way)[path], rtol=2e-3, atol=2e-4, msg=lambda m, p=path: f"{p}: {m}")


@pytest.mark.parametrize("way", ["lora", "dora", "nf4"])
def test_a_run_with_an_adapter_is_a_model_wherever_one_is_asked_for(way: str, runs: Path) -> None:
    """Merged on opening, by merge, by export --merged, and through peft's directory: one and the same model."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    here = open_whole(Path(f"runs/{way}"), print)
    tokens = torch.arange(2, 40)[None]
    ours = logits(here.params, {"tokens": tokens}, here.arch, SINGLE)
    done("merge", f"runs/{way}", f"merged-{way}")
    assert same(tree.flatten(open_whole(Path(f"merged-{way}"), print).params), tree.flatten(here.params))
    done("export", "--merged", f"runs/{way}", f"hf-{way}")
    done("export", f"runs/{way}", f"peft-{way}")
    with quiet():
        theirs = AutoModelForCausalLM.from_pretrained(f"hf-{way}")
        torch.testing.assert_close(theirs(tokens).logits, ours, rtol=1e-4, atol=1e-4)
        if way != "nf4":  # there the adapter belongs to the matrices in 4 bits
            beside = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("hf"), f"peft-{way}")
            torch.testing.assert_close(beside(tokens).logits, ours, rtol=1e-4, atol=1e-4)
            done("merge", f"peft-{way}", f"again-{way}", "--base", "hf")
            again = open_whole(Path(f"again-{way}"), print)
            for path, leaf in tree.flatten(again.params).items():
                torch.testing.assert_close(leaf, tree.flatten(here.params)[path], rtol=1e-6, atol=1e-6)
    assert len(done("generate", f"runs/{way}", "-p", "the ", "--tokens", "3")) > 0


def test_vectors_before_texts_are_written_for_peft_and_not_merged(runs: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    assert "cannot be merged" in refused("merge", "runs/prefix", "no")
    assert not Path("no").exists()
    for way in ("prefix", "prompt"):
        done("export", f"runs/{way}", f"peft-{way}")
        with quiet():
            beside = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("hf"), f"peft-{way}")
        model = open_model(Path(f"runs/{way}"), print)
        ids = model.encode("the quick")
        said = [torch.tensor([ids])]
        for _ in range(6):  # without a cache, whose handling of a prefix differs from one version to the next
            said.append(beside(torch.cat(said, 1)).logits[:, -1:].argmax(-1))
        expected = model.tokenizer.decode(torch.cat(said, 1)[0, len(ids) :].tolist())
        told = done("generate", f"runs/{way}", "-p", "the quick", "--tokens", 6, "-t", 0, "--jsonl")
        assert json.loads(told.splitlines()[-1])["completion"] == expected


def test_the_model_under_an_adapter_has_to_be_the_one(runs: Path, tmp_path: Path) -> None:
    done("convert", "hf", tmp_path / "other", "--dtype", "bfloat16")
    assert "holds an adapter of another model" in refused("merge", "runs/lora", "no", "--base", tmp_path / "other")
    assert "ironfn merge" in refused("sft", spec_file("stacked"), "-s", "model.init_from=runs/lora")
    spec = spec_file("lora")
    more = sets((*WAYS["lora"], "train.steps=9"))
    moved = Path("base").rename("elsewhere")
    try:
        assert "base" in refused("generate", "runs/lora", "-p", "a")
        done("convert", tmp_path / "other", tmp_path / "hf2", "--dtype", "float32")
        done("convert", tmp_path / "hf2", "base")
        assert "beside another model" in refused("sft", spec, *more)
        done("merge", "runs/lora", "moved", "--base", moved)
    finally:
        import shutil

        shutil.rmtree("base", ignore_errors=True)
        moved.rename("base")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("data.form=documents", "data.tokenizer.file=base/tokenizer.json"), "ironfn pretrain"),
        (("adapter.base=nf4",), "nothing would be trained"),
        (("adapter.kind=lora", "adapter.targets=['blocks/(']"), "is not a regular expression"),
        (("adapter.kind=lora", "adapter.targets=[nowhere]"), "names no matrix"),
        (("adapter.kind=lora", "adapter.rank=0"), "adapter.rank"),
        (("adapter.kind=prompt", "adapter.dora=true"), "is for lora alone"),
        (("adapter.kind=lora", "train.noise_scale_every=5"), "noise scale"),
        (("adapter.kind=lora", "model.init_from=null"), "model.init_from"),
        (("data.tokenizer.file=other.json",), "other.json"),
        (("model.init_from=nowhere",), "nowhere"),
        (("model.layers=3", "model.init_from=base"), "layers"),
    ],
    ids=["documents", "nf4", "regex", "nowhere", "rank", "dora", "noise", "no-model", "tokenizer", "no-base", "other"],
)
def test_what_cannot_be_meant_is_refused(overrides: tuple[str, ...], said: str) -> None:
    assert said in refused("sft", spec_file("wrong"), *sets(overrides))
    assert not Path("runs/wrong/checkpoints").exists()


def test_pretraining_does_not_read_examples() -> None:
    assert "ironfn sft" in refused("pretrain", spec_file("wrong"))


def test_rows_are_shown_as_the_model_is_taught_them() -> None:
    told = done("data", "inspect", spec_file("shown"), "--rows", 2)
    assert "tokens trained" in told
    assert "{{" in told


def test_the_optimizer_has_what_is_beside_the_model() -> None:
    told = done("optim", "groups", spec_file("grouped"), *sets(LORA))
    assert "blocks/*/attn/wq_lora/a" in told
    assert "embed/tokens" not in told
