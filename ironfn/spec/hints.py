"""Guess what an unknown key was meant to be, from the fields that exist and from the names other trainers use."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ironfn.spec.structure import Path

SYNONYMS = MappingProxyType(
    {
        "batch_size": "train.batch",
        "global_batch_size": "train.batch",
        "block_size": "data.length",
        "d_model": "model.width",
        "dim": "model.width",
        "dtype": "train.precision.compute",
        "eval_interval": "report.eval_every",
        "eval_steps": "report.eval_every",
        "ffn_hidden_size": "model.ffn",
        "grad_clip": "optim.clip",
        "gradient_accumulation_steps": "train.micro_batch",
        "gradient_checkpointing": "train.remat",
        "gradient_clip_val": "optim.clip",
        "hidden_dim": "model.width",
        "hidden_size": "model.width",
        "intermediate_size": "model.ffn",
        "learning_rate": "optim.lr",
        "log_interval": "report.log_every",
        "logging_steps": "report.log_every",
        "lr_scheduler": "optim.schedule.kind",
        "lr_scheduler_type": "optim.schedule.kind",
        "max_grad_norm": "optim.clip",
        "max_iters": "train.steps",
        "max_lr": "optim.lr",
        "max_position_embeddings": "model.context",
        "max_seq_len": "data.length",
        "max_seq_length": "data.length",
        "max_steps": "train.steps",
        "micro_batch_size": "train.micro_batch",
        "min_lr": "optim.schedule.final",
        "n_embd": "model.width",
        "n_head": "model.heads",
        "n_heads": "model.heads",
        "n_kv_heads": "model.kv_heads",
        "n_layer": "model.layers",
        "n_layers": "model.layers",
        "num_attention_heads": "model.heads",
        "num_epochs": "train.steps",
        "num_hidden_layers": "model.layers",
        "num_key_value_heads": "model.kv_heads",
        "num_layers": "model.layers",
        "num_train_epochs": "train.steps",
        "output_dir": "out",
        "per_device_train_batch_size": "train.micro_batch",
        "pipeline_parallel_size": "mesh",
        "report_to": "report.trackers",
        "rms_norm_eps": "model.norm_eps",
        "run_name": "name",
        "save_steps": "checkpoint.every",
        "save_total_limit": "checkpoint.keep",
        "seq_len": "data.length",
        "seq_length": "data.length",
        "sequence_length": "data.length",
        "tensor_model_parallel_size": "mesh.tp",
        "tensor_parallel_size": "mesh.tp",
        "tie_word_embeddings": "model.tied",
        "torch_compile": "train.compile",
        "train_batch_size": "train.batch",
        "warmup_steps": "optim.schedule.warmup",
    }
)
"""What other trainers call our fields."""


def hint(path: Path, fields: Mapping[Path, Any]) -> str:
    """Say what the unknown key at the end of ``path`` may have been meant to be. fields: all that exist, by path."""
    key = str(path[-1]).lower().replace("-", "_")
    here = [str(place[-1]) for place in fields if len(place) == len(path) and matches(path[:-1], place[:-1])]
    everywhere: dict[str, list[str]] = {}
    for place in fields:
        everywhere.setdefault(str(place[-1]), []).append(".".join(map(str, place)))
    written = [name for name, places in everywhere.items() if any("*" not in place for place in places)]
    meant = (
        ([key] if key in here else [])
        or everywhere.get(key)
        or ([SYNONYMS[key]] if key in SYNONYMS else [])
        or difflib.get_close_matches(key, here, 1, 0.7)
        or [place for name in difflib.get_close_matches(key, written, 1, 0.75) for place in everywhere[name]]
        or [SYNONYMS[name] for name in difflib.get_close_matches(key, SYNONYMS, 1, 0.75)]
    )
    if meant:
        return f"unknown key; did you mean {' or '.join(sorted(meant)[:3])}?"
    return f"unknown key; the keys here are {', '.join(here)}"


def matches(path: Path, pattern: Path) -> bool:
    """Tell whether a path fits a pattern in which ``*`` stands for any name."""
    return len(path) == len(pattern) and all(want in ("*", name) for name, want in zip(path, pattern, strict=True))
