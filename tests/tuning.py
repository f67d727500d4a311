"""Runs that teach a small model: what the tests of every way to teach one have in common."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from drivers import run as driver
from ironfn import checkpoint, tree
from ironfn.report.rows import read_rows

from .hf_models import quiet
from .test_convert import add_tokenizer, ironfn
from .test_run import PACE

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MESHES = MappingProxyType(
    {
        "dp2": ("mesh.dp=2",),
        "zero1": ("mesh.dp=2", "mesh.zero1=true"),
        "fsdp": ("mesh.dp=2", "mesh.fsdp=true"),
        "tp2": ("mesh.tp=2", "mesh.sequence_parallel=true"),
    }
)


def refused(*words: object) -> str:
    result = ironfn(*words)
    assert result.exit_code in (1, 2, 78), result.output
    return result.output


def sets(overrides: Iterable[str]) -> list[str]:
    """Return overrides as words of a command line."""
    return [word for each in overrides for word in ("-s", each)]


def write_model(folder: Path) -> None:
    """Write a small Llama of `transformers`, with a tokenizer and a template, into ``folder``/hf."""
    import transformers

    with quiet():
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=300, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=128, max_position_embeddings=128, bos_token_id=0, eos_token_id=1,
        )  # fmt: skip
        transformers.LlamaForCausalLM(config).save_pretrained(folder / "hf")
    add_tokenizer(folder / "hf")
    (folder / "hf/chat_template.jinja").write_text(TEMPLATE)


def rows(name: str) -> list[dict[str, Any]]:
    """Return what a run told of its steps, but for how long they took."""
    return [{k: v for k, v in row.items() if k not in PACE} for row in read_rows(Path("runs", name, "metrics.jsonl"))]


def final(name: str) -> dict[str, torch.Tensor]:
    return tree.flatten(checkpoint.load(Path(f"runs/{name}/checkpoints/step-00000008"))[0])


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, b[path]) for path, x in a.items())


@pytest.fixture(scope="module")
def undrawn() -> Any:
    """Write no report after a run: that is most of a short one's time, and tests of its own hold it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "draw", lambda *_: True)
        yield
