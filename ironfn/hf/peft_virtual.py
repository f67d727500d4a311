"""Say a trained prompt or prefix as `peft` does: one tensor, ``prompt_embeddings``, and a config of its kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ironfn import tree
from ironfn.model.arch import Arch
from ironfn.model.virtual import KEYS, PROMPT, VALUES
from ironfn.spec.adapter_records import AdapterSpec
from ironfn.types import Params

KINDS: Mapping[str, str] = MappingProxyType({"PROMPT_TUNING": "prompt", "PREFIX_TUNING": "prefix"})
NAME = "prompt_embeddings"


def read_virtual(
    config: Mapping[str, Any], arch: Arch, read: Callable[[str, tuple[int, ...]], Tensor]
) -> tuple[AdapterSpec, Params]:
    """Return the spec and the leaves. read: the tensor of that name and shape. ValueError for an impossible config."""
    tokens: Any = config.get("num_virtual_tokens")
    if type(tokens) is not int or not 0 < tokens <= 1 << 20:
        raise ValueError(f"num_virtual_tokens {tokens!r} is no number of vectors")
    if KINDS[config["peft_type"]] == "prompt":
        table = read(NAME, (tokens, arch.width))
        return AdapterSpec("prompt", tokens=tokens), {"embed": {PROMPT: table}}
    each = arch.kv_heads * arch.head_dim
    parts = read(NAME, (tokens, arch.layers * 2 * each)).split(each, 1)
    names = (f"blocks/{layer}/attn/{name}" for layer in range(arch.layers) for name in (KEYS, VALUES))
    found = {name: part.contiguous() for name, part in zip(names, parts, strict=True)}
    return AdapterSpec("prefix", tokens=tokens), tree.unflatten(found)


def write_virtual(spec: AdapterSpec, arch: Arch, adapter: Params, base: str | None) -> tuple[dict[str, Any], Tensor]:
    """Return the keys of adapter_config.json, of which `peft` fills in those of the model, and the tensor."""
    flat = tree.flatten(adapter)
    if spec.kind == "prompt":
        tensor = flat[f"embed/{PROMPT}"]
    else:
        names = [f"blocks/{layer}/attn/{name}" for layer in range(arch.layers) for name in (KEYS, VALUES)]
        tensor = torch.cat([flat[name] for name in names], 1)
    (kind,) = (theirs for theirs, ours in KINDS.items() if ours == spec.kind)
    config = {"peft_type": kind, "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True}
    return config | {"num_virtual_tokens": spec.tokens}, tensor
