"""Tie the tensors of Hugging Face's files to our leaves: tables of names, one row for a tensor."""

from __future__ import annotations

import re

from attrs import frozen


@frozen
class Row:
    """Tie one tensor of theirs to the leaves of ours that it holds side by side along its outputs.

    theirs: its name; in a block's row what follows the block's; ``{e}`` stands for the number of an expert.
    turned: a matrix is [out, in] there, as `nn.Linear` has it. interleaved: the leaves change with every head (BLOOM,
    GPT-NeoX).
    """

    theirs: str
    ours: tuple[str, ...]
    turned: bool = False
    interleaved: bool = False


Rows = tuple[Row, ...]


@frozen
class Naming:
    """Name a family's tensors. base: what all but the head's begin with, which some files leave out.

    block: what a block's begin with, after the base. Of several rows for one leaf a file has one; the first is written.
    passed_over: the names (regex) of known tensors that hold no weights.
    """

    base: str
    block: str
    top: Rows
    rows: Rows
    passed_over: tuple[str, ...] = ()


def linear(theirs: str, *ours: str, interleaved: bool = False, turned: bool = True) -> Rows:
    """Return the rows of a linear layer: its weight, and its bias where the model has one."""
    biases = tuple(re.sub(r"(?<=/)w(?=[^/]*$)", "b", path) for path in ours)
    return (
        Row(f"{theirs}.weight", ours, turned, interleaved),
        Row(f"{theirs}.bias", biases, interleaved=interleaved),
    )


def norm(theirs: str, ours: str) -> Rows:
    return Row(f"{theirs}.weight", (f"{ours}/scale",)), Row(f"{theirs}.bias", (f"{ours}/bias",))


def matrix(theirs: str, *ours: str) -> Row:
    return Row(theirs, ours, turned=True)


def _experts(name: str, gate: str, up: str, down: str) -> Rows:
    """Return the rows of experts that are tensors of their own."""
    parts = (("w_gate", gate), ("w_up", up), ("w_down", down))
    return tuple(matrix(f"{name}.{{e}}.{theirs}.weight", f"mlp/experts/{ours}") for ours, theirs in parts)


_HEAD = (Row("lm_head.weight", ("head/w",)), Row("lm_head.bias", ("head/b",)))
_STACKED = (
    matrix("mlp.experts.gate_up_proj", "mlp/experts/w_gate", "mlp/experts/w_up"),
    matrix("mlp.experts.down_proj", "mlp/experts/w_down"),
)
_ATTENTION = (
    *(row for n in "qkv" for row in linear(f"self_attn.{n}_proj", f"attn/w{n}")),
    *linear("self_attn.o_proj", "attn/wo"),
    *norm("self_attn.q_norm", "attn/q_norm"),
    *norm("self_attn.k_norm", "attn/k_norm"),
)
_MLP = tuple(row for n in ("gate", "up", "down") for row in linear(f"mlp.{n}_proj", f"mlp/w_{n}"))
_TWO_NORMS = (*norm("input_layernorm", "norm1"), *norm("post_attention_layernorm", "norm2"))
_QWEN_MOE = (
    matrix("mlp.gate.weight", "mlp/router/w"),
    *_experts("mlp.experts", "gate_proj", "up_proj", "down_proj"),
    *_STACKED,
    *(matrix(f"mlp.shared_expert.{n}_proj.weight", f"mlp/shared/w_{n}") for n in ("gate", "up", "down")),
    matrix("mlp.shared_expert_gate.weight", "mlp/shared_gate/w"),
)
_MIXTRAL_MOE = (
    matrix("block_sparse_moe.gate.weight", "mlp/router/w"),
    *_experts("block_sparse_moe.experts", "w1", "w3", "w2"),
    matrix("mlp.gate.weight", "mlp/router/w"),
    *_STACKED,
)
_ROTARY = (r".*\.rotary_emb\.inv_freq",)


def _llama_like(rows: Rows) -> Naming:
    top = (Row("model.embed_tokens.weight", ("embed/tokens",)), *norm("model.norm", "norm"), *_HEAD)
    return Naming("model.", "layers.{i}.", top, rows, _ROTARY)


LLAMA = _llama_like((*_TWO_NORMS, *_ATTENTION, *_MLP))
QWEN_MOE = _llama_like((*_TWO_NORMS, *_ATTENTION, *_MLP, *_QWEN_MOE))
GLM_MOE = _llama_like(
    (
        *_TWO_NORMS,
        *_ATTENTION,
        *_MLP,
        matrix("mlp.gate.weight", "mlp/router/w"),
        Row("mlp.gate.e_score_correction_bias", ("mlp/router/bias",)),
        *_experts("mlp.experts", "gate_proj", "up_proj", "down_proj"),
        *_STACKED,
        *(matrix(f"mlp.shared_experts.{n}_proj.weight", f"mlp/shared/w_{n}") for n in ("gate", "up", "down")),
    )
)
MIXTRAL = _llama_like((*_TWO_NORMS, *_ATTENTION, *_MIXTRAL_MOE))
GEMMA2 = _llama_like(
    (
        *norm("input_layernorm", "norm1"),
        *norm("post_attention_layernorm", "post_norm1"),
        *norm("pre_feedforward_layernorm", "norm2"),
        *norm("post_feedforward_layernorm", "post_norm2"),
        *_ATTENTION,
        *_MLP,
    )
)
OLMO2 = _llama_like(
    (
        *norm("post_attention_layernorm", "post_norm1"),
        *norm("post_feedforward_layernorm", "post_norm2"),
        *_ATTENTION,
        *_MLP,
    )
)
PHI3 = _llama_like(
    (
        *_TWO_NORMS,
        *linear("self_attn.qkv_proj", "attn/wq", "attn/wk", "attn/wv"),
        *linear("self_attn.o_proj", "attn/wo"),
        *linear("mlp.gate_up_proj", "mlp/w_gate", "mlp/w_up"),
        *linear("mlp.down_proj", "mlp/w_down"),
    )
)
PHI = Naming(
    "model.",
    "layers.{i}.",
    (Row("model.embed_tokens.weight", ("embed/tokens",)), *norm("model.final_layernorm", "norm"), *_HEAD),
    (
        *norm("input_layernorm", "norm1"),
        *(row for n in "qkv" for row in linear(f"self_attn.{n}_proj", f"attn/w{n}")),
        *linear("self_attn.dense", "attn/wo"),
        *linear("mlp.fc1", "mlp/w_up"),
        *linear("mlp.fc2", "mlp/w_down"),
    ),
    _ROTARY,
)
GPT2 = Naming(
    "transformer.",
    "h.{i}.",
    (
        Row("transformer.wte.weight", ("embed/tokens",)),
        Row("transformer.wpe.weight", ("embed/positions",)),
        *norm("transformer.ln_f", "norm"),
        *_HEAD,
    ),
    (
        *norm("ln_1", "norm1"),
        *norm("ln_2", "norm2"),
        # Conv1D: its weights are [in, out], as ours are
        *linear("attn.c_attn", "attn/wq", "attn/wk", "attn/wv", turned=False),
        *linear("attn.c_proj", "attn/wo", turned=False),
        *linear("mlp.c_fc", "mlp/w_up", turned=False),
        *linear("mlp.c_proj", "mlp/w_down", turned=False),
    ),
    (r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),
)
GPT_NEOX = Naming(
    "gpt_neox.",
    "layers.{i}.",
    (
        Row("gpt_neox.embed_in.weight", ("embed/tokens",)),
        *norm("gpt_neox.final_layer_norm", "norm"),
        Row("embed_out.weight", ("head/w",)),
    ),
    (
        *_TWO_NORMS,
        *linear("attention.query_key_value", "attn/wq", "attn/wk", "attn/wv", interleaved=True),
        *linear("attention.dense", "attn/wo"),
        *linear("mlp.dense_h_to_4h", "mlp/w_up"),
        *linear("mlp.dense_4h_to_h", "mlp/w_down"),
    ),
    (r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)", *_ROTARY),
)
MPT = Naming(
    "transformer.",
    "blocks.{i}.",
    (Row("transformer.wte.weight", ("embed/tokens",)), *norm("transformer.norm_f", "norm"), *_HEAD),
    (
        *norm("norm_1", "norm1"),
        *norm("norm_2", "norm2"),
        *linear("attn.Wqkv", "attn/wq", "attn/wk", "attn/wv"),
        *linear("attn.out_proj", "attn/wo"),
        *linear("ffn.up_proj", "mlp/w_up"),
        *linear("ffn.down_proj", "mlp/w_down"),
    ),
)
BLOOM = Naming(
    "transformer.",
    "h.{i}.",
    (
        Row("transformer.word_embeddings.weight", ("embed/tokens",)),
        *norm("transformer.word_embeddings_layernorm", "embed/norm"),
        *norm("transformer.ln_f", "norm"),
        *_HEAD,
    ),
    (
        *norm("input_layernorm", "norm1"),
        *norm("post_attention_layernorm", "norm2"),
        *linear("self_attention.query_key_value", "attn/wq", "attn/wk", "attn/wv", interleaved=True),
        *linear("self_attention.dense", "attn/wo"),
        *linear("mlp.dense_h_to_4h", "mlp/w_up"),
        *linear("mlp.dense_4h_to_h", "mlp/w_down"),
    ),
)
