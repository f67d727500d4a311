"""Tie GGUF's keys and tensor names to ours: one row for each architecture of llama.cpp that our model can compute.

The names are the same for all architectures (`gguf-py/gguf/constants.py` of llama.cpp); what differs is which of them
there are, whether q, k and v are one tensor, and what an architecture takes for granted (`llama-model.cpp`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from attrs import frozen

from ironfn.hf.config import Aspect, Config, Family, Fields, Key, key
from ironfn.hf.gguf_rope import FACTORS, LONGROPE, STRETCH, need
from ironfn.hf.names import Naming, Row, Rows, linear, matrix, norm
from ironfn.model.arch import Arch

_TOP = (
    Row("token_embd.weight", ("embed/tokens",)),
    Row("position_embd.weight", ("embed/positions",)),
    *norm("token_embd_norm", "embed/norm"),
    *norm("output_norm", "norm"),
    Row("output.weight", ("head/w",)),
    Row("output.bias", ("head/b",)),
)
_NORMS = (*norm("attn_norm", "norm1"), *norm("ffn_norm", "norm2"))
_OUT = linear("attn_output", "attn/wo")
_UP_DOWN = (*linear("ffn_up", "mlp/w_up"), *linear("ffn_down", "mlp/w_down"))
_SPLIT = (
    *_NORMS,
    *norm("post_attention_norm", "post_norm1"),
    *norm("post_ffw_norm", "post_norm2"),
    *(row for n in "qk" for row in norm(f"attn_{n}_norm", f"attn/{n}_norm")),
    *(row for n in "qkv" for row in linear(f"attn_{n}", f"attn/w{n}")),
    *_OUT,
    *linear("ffn_gate", "mlp/w_gate"),
    *_UP_DOWN,
    matrix("ffn_gate_inp.weight", "mlp/router/w"),
    *(matrix(f"ffn_{n}_exps.weight", f"mlp/experts/w_{n}") for n in ("gate", "up", "down")),
    *(matrix(f"ffn_{n}_shexp.weight", f"mlp/shared/w_{n}") for n in ("gate", "up", "down")),
    matrix("ffn_gate_inp_shexp.weight", "mlp/shared_gate/w"),
)
_QKV = linear("attn_qkv", "attn/wq", "attn/wk", "attn/wv")


def _naming(rows: Rows) -> Naming:
    return Naming("", "blk.{i}.", _TOP, rows, (rf"({'|'.join(FACTORS)})\.weight",))


_NAMED = _naming(_SPLIT)
_FUSED = _naming((*_NORMS, *_QKV, *_OUT, *_UP_DOWN))
_PHI3 = _naming((*_NORMS, *_QKV, *_OUT, *linear("ffn_up", "mlp/w_gate", "mlp/w_up"), *linear("ffn_down", "mlp/w_down")))

_COMMON = (
    key("vocab_size", "rows"),
    key("tied", "tied"),
    key("width", "embedding_length"),
    key("layers", "block_count"),
    key("heads", "attention.head_count"),
    key("context", "context_length"),
    key("ffn", "feed_forward_length"),
)
"""Keys behind the architecture's name; `rows` and `tied` are what the tensors say."""
_BIASES = (key("attention_bias", "attn_q.bias"), key("attention_out_bias", "attn_output.bias"))
_KV = key("kv_heads", "attention.head_count_kv", None)
_RMS = key("norm_eps", "attention.layer_norm_rms_epsilon")
_LAYER = key("norm_eps", "attention.layer_norm_epsilon")
_THETA = key("rope_theta", "rope.freq_base", 10000.0)


def _head_dim(whole: bool) -> Aspect:
    """Return the aspect of a head's size and of how much of it is turned."""

    def read(config: Config) -> Fields:
        size = config.get("attention.key_length", config["embedding_length"] // config["attention.head_count"])
        turned = config.get("rope.dimension_count", size)
        if not 0 < turned <= size:
            raise ValueError(f"rope.dimension_count {turned} of a head of {size} cannot be")
        if config.get("attention.value_length", size) != size or (whole and turned != size):
            raise ValueError("keys and values of different sizes, or heads that are turned in part, are not supported")
        return {"head_dim": size} | ({} if whole else {"rope_fraction": turned / size})

    def write(arch: Arch) -> dict[str, Any]:
        sizes = {"attention.key_length": arch.head_dim, "attention.value_length": arch.head_dim}
        return sizes | {"rope.dimension_count": arch.rotary_dim}

    return Aspect(read, write)


def _windows(pattern: tuple[bool, ...]) -> Aspect:
    """Return the aspect of layers that see a window; pattern: which do, repeated over the layers."""

    def read(config: Config) -> Fields:
        size = config.get("attention.sliding_window", 0)
        return {"windows": [size if slides else 0 for slides in pattern] if size else []}

    def write(arch: Arch) -> dict[str, Any]:
        return {"attention.sliding_window": max(arch.windows)} if any(arch.windows) else {}

    return Aspect(read, write)


def _gemma_scale(largest: int) -> Aspect:
    """Return the aspect of Gemma's scores, which its 27B, of this many layers, scales by the width of its heads."""

    def read(config: Config) -> Fields:
        if config["block_count"] != largest:
            return {}
        return {"attention_scale": (config["embedding_length"] / config["attention.head_count"]) ** -0.5}

    return Aspect(read, lambda arch: {})


def _experts(fixed: Mapping[str, Any], ffn: str = "expert_feed_forward_length") -> Aspect:
    """Return the aspect of a mixture. fixed: how its router weighs. ffn: the key of an expert's width."""

    def read(config: Config) -> Fields:
        if not config.get("expert_count"):
            return {}
        fields: Fields = {
            "moe.experts": config["expert_count"],
            "moe.top_k": need(config, "expert_used_count"),
            "moe.ffn": need(config, ffn),
        } | {f"moe.{name}": value for name, value in fixed.items()}
        return fields | (
            {"moe.shared_ffn": need(config, "expert_shared_feed_forward_length")} if "shared" in fixed else {}
        )

    def write(arch: Arch) -> dict[str, Any]:
        moe = arch.moe
        if moe is None:
            return {}
        found: dict[str, Any] = {"expert_count": moe.experts, "expert_used_count": moe.top_k, ffn: moe.ffn}
        return found | ({"expert_shared_feed_forward_length": moe.shared_ffn} if "shared" in fixed else {})

    return Aspect(read, write)


@frozen
class GgufFamily:
    """Describe an architecture of llama.cpp. turned: rows of q and k lie pair beside pair, as its Llama turns them."""

    family: Family
    turned: bool = False

    @property
    def name(self) -> str:
        """Return the value of ``general.architecture``."""
        return self.family.model_type


def _family(
    name: str, keys: tuple[Key, ...], aspects: tuple[Aspect, ...], *, naming: Naming = _NAMED, turned: bool = False,
    only: Mapping[str, Any] = MappingProxyType({}), **fixed: Any,
) -> GgufFamily:  # fmt: skip
    """Return a row. only: as in `config.Family`."""
    return GgufFamily(Family(name, name, naming, keys, aspects, fixed, only, source="GGUF's keys"), turned)


_TURN = (_head_dim(whole=True), STRETCH)
_LLAMA_KEYS = (*_COMMON, _KV, _RMS, _THETA)
_EVERY = _windows((True,))
_GEMMA: Mapping[str, Any] = {"mlp": "geglu", "embed_scale": True, "norm_offset": True}
_TIED: Mapping[str, Any] = {"tied": True}
_CAPS = (
    key("attention_softcap", "attn_logit_softcapping", 50.0),
    key("logit_softcap", "final_logit_softcapping", 30.0),
)
_QWEN: Mapping[str, Any] = {"attention_bias": True, "attention_out_bias": False}
_SOFTMAX: Mapping[str, Any] = {"score": "softmax", "renormalize": False}
_RENORMALIZED: Mapping[str, Any] = {"score": "softmax", "renormalize": True}
_LAYERED: Mapping[str, Any] = {
    "norm": "layer", "norm_bias": True, "attention_bias": True, "mlp_bias": True, "mlp": "gelu_tanh",
}  # fmt: skip
_NEOX: Mapping[str, Any] = {**_LAYERED, "mlp": "gelu"}


def _read_residual(config: Config) -> Fields:
    return dict.fromkeys(("parallel", "parallel_norms"), need(config, "use_parallel_residual"))


_RESIDUAL = Aspect(_read_residual, lambda arch: {"use_parallel_residual": arch.parallel})

FAMILIES = (
    _family("qwen2", _LLAMA_KEYS, _TURN, **_QWEN),
    _family("qwen3", _LLAMA_KEYS, _TURN, qk_norm="head"),
    _family("qwen2moe", _LLAMA_KEYS, (*_TURN, _experts({**_SOFTMAX, "shared": 1, "shared_gate": True})), **_QWEN),
    _family("qwen3moe", _LLAMA_KEYS, (*_TURN, _experts(_RENORMALIZED)), qk_norm="head"),
    _family("olmoe", _LLAMA_KEYS, (*_TURN, _experts(_SOFTMAX, "feed_forward_length")), qk_norm="width"),
    _family(
        "llama", (*_LLAMA_KEYS, *_BIASES), (*_TURN, _EVERY, _experts(_RENORMALIZED, "feed_forward_length")),
        turned=True,
    ),
    _family("gemma", _LLAMA_KEYS, _TURN, only=_TIED, **_GEMMA),
    _family(
        "gemma2", (*_LLAMA_KEYS, *_CAPS), (*_TURN, _windows((True, False)), _gemma_scale(46)),
        only=_TIED, post_norms=True, **_GEMMA,
    ),
    _family(
        "gemma3", (*_LLAMA_KEYS, key("rope_local_theta", "rope.freq_base_swa", 10000.0)),
        (*_TURN, _windows((True,) * 5 + (False,)), _gemma_scale(62)),
        post_norms=True, qk_norm="head", **_GEMMA,
    ),
    _family(
        "phi2", (*_COMMON, _KV, _LAYER, _THETA), (_head_dim(whole=False),), naming=_FUSED,
        parallel=True, head_bias=True, **_LAYERED,
    ),
    _family("phi3", _LLAMA_KEYS, (_head_dim(whole=False), LONGROPE, _EVERY), naming=_PHI3),
    _family("gpt2", (*_COMMON, _LAYER), (), naming=_FUSED, positions="learned", **_LAYERED),
    _family(
        "gptneox", (*_COMMON, _LAYER, _THETA), (_head_dim(whole=False), _RESIDUAL), naming=_FUSED,
        **_NEOX,
    ),
    _family(
        "stablelm", (*_COMMON, _KV, _LAYER, _THETA, _BIASES[0], key("parallel", "use_parallel_residual", False)),
        (_head_dim(whole=False),), norm="layer", norm_bias=True, attention_out_bias=False,
    ),
    _family(  # with a window it is OLMo 3
        "olmo2", _LLAMA_KEYS, _TURN, only={"attention.sliding_window": None}, pre_norms=False, post_norms=True,
        qk_norm="width",
    ),
    _family(
        "mpt", (*_COMMON, _LAYER, key("attention_clip", "attention.clamp_kqv", None)), (), naming=_FUSED,
        only={"attention.max_alibi_bias": 8.0}, norm="layer", mlp="gelu", positions="alibi",
    ),
    _family("bloom", (*_COMMON, _LAYER), (), naming=_FUSED, positions="alibi", embed_norm=True, **_LAYERED),
)  # fmt: skip
"""A model is written as the first that can say it."""
