"""Read and write what configs say of rotary angles and of windows, in the forms of transformers 4 and 5."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ironfn.hf.config import Aspect, Config, Fields, section
from ironfn.model.arch import Arch

_NAMES = (
    "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
    "truncate", "attention_factor", "short_factor", "long_factor",
)  # fmt: skip
_KINDS = ("linear", "dynamic", "llama3", "yarn", "longrope")
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
_PASSED_OVER = ("rope_theta", "rope_type", "type", "partial_rotary_factor", "finetuned")
_ORIGINAL = "original_max_position_embeddings"


def _parameters(config: Config) -> dict[str, Any]:
    """Return what says how angles are stretched: v5's rope_parameters, v4's rope_scaling, or nothing."""
    found = section(config, "rope_scaling") or section(config, "rope_parameters")
    return {name: value for name, value in found.items() if value is not None}


def _stretch(parameters: Mapping[str, Any], config: Config, su: str) -> Fields:
    """Return the fields of ``rope``. su: what the old names ``su`` and ``yarn`` of Phi-3 mean."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        if left := parameters.keys() & {*_NAMES}:
            raise ValueError(f"rope_parameters has {', '.join(sorted(left))}, but no rope_type that says for what")
        return {}
    kind = su if su and kind in ("su", "yarn") else kind
    if kind not in _KINDS:
        raise ValueError(f"rope_type is {kind!r}, and only default, {', '.join(_KINDS)} are supported")
    if left := parameters.keys() - {*_NAMES, *_PASSED_OVER, _ORIGINAL}:
        raise ValueError(f"rope_parameters has {', '.join(sorted(left))}, which ironfn does not know")
    # Phi-3 has it beside the others, and that one counts
    known = dict(parameters) | ({_ORIGINAL: config[_ORIGINAL]} if config.get(_ORIGINAL) else {})
    if missing := [name for name in _NEEDED[kind] if name not in known]:
        raise ValueError(f"rope_parameters of {kind} lack {', '.join(missing)}")
    fields: Fields = {"rope.kind": kind} | {f"rope.{name}": known[name] for name in _NAMES if name in known}
    if kind in ("llama3", "yarn", "longrope"):
        original = known.get(_ORIGINAL, config.get("max_position_embeddings"))
        fields["rope.original_context"] = original
        if kind == "longrope" and "factor" not in known:
            fields["rope.factor"] = _ratio(config.get("max_position_embeddings"), original)
    return fields


def _ratio(longest: Any, original: Any) -> float:
    if any(type(length) is not int or length < 1 for length in (longest, original)):
        raise ValueError(f"max_position_embeddings {longest!r} over {_ORIGINAL} {original!r} is no factor of longrope")
    return longest / original


def _stretched(arch: Arch) -> dict[str, Any]:
    """Return what `_stretch` reads."""
    rope = arch.rope
    if rope.kind == "none":
        return {"rope_type": "default"}
    names = {
        "linear": ("factor",),
        "dynamic": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "yarn": ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "attention_factor"),
        "longrope": ("factor", "short_factor", "long_factor", "attention_factor"),
    }[rope.kind]
    values = {name: getattr(rope, name) for name in names}
    found = {"rope_type": rope.kind} | {name: value for name, value in values.items() if value is not None}
    return found | ({_ORIGINAL: rope.original_context or arch.context} if rope.kind in _KINDS[2:] else {})


def rotary(
    theta: float = 10000.0, fraction: float | None = None, su: str = "", old: Mapping[str, str] = MappingProxyType({})
) -> Aspect:
    """Return the aspect of rotary angles: their base, their stretching, and the share of a head that turns.

    theta, fraction: where a config leaves them out; fraction None: the family turns whole heads. old: other names that
    v4 had for keys of its own.
    """

    def read(config: Config) -> Fields:
        config = {new: config[name] for new, name in old.items() if name in config} | dict(config)
        parameters = _parameters(config)
        fields: Fields = {"rope_theta": _first("rope_theta", config, parameters, theta)}
        share = _first("partial_rotary_factor", config, parameters, 1.0 if fraction is None else fraction)
        if fraction is None and share != 1.0:
            raise ValueError(f"partial_rotary_factor is {share!r}, and this family turns whole heads")
        return fields | ({} if fraction is None else {"rope_fraction": share}) | _stretch(parameters, config, su)

    def write(arch: Arch) -> dict[str, Any]:
        stretched = _stretched(arch)
        share = {} if fraction is None else {"partial_rotary_factor": arch.rope_fraction}
        plain = stretched["rope_type"] == "default"
        config = {
            "rope_theta": arch.rope_theta,
            "rope_scaling": None if plain else stretched,
            "rope_parameters": stretched | {"rope_theta": arch.rope_theta} | share,
        }
        config |= share
        config |= {name: config[new] for new, name in old.items()}
        return config | ({_ORIGINAL: stretched[_ORIGINAL]} if su and not plain else {})

    return Aspect(read, write)


def _first(name: str, config: Config, parameters: Mapping[str, Any], default: Any) -> Any:
    """Return a value of v5's rope_parameters, else of the config itself, as v4 has it."""
    return parameters.get(name, default if config.get(name) is None else config[name])


def read_gemma3(config: Config) -> Fields:
    """Return Gemma 3's angles: one base for the layers with a window, another, which may be stretched, for the rest."""
    nested = section(config, "rope_parameters")
    full, local = section(nested, "full_attention"), section(nested, "sliding_attention")
    whole = section(config, "rope_scaling") or full
    if local.get("rope_type", "default") != "default":
        raise ValueError("rope_parameters stretch the layers with a window, and only the others can be")
    return {
        "rope_theta": _first("rope_theta", config, full, 1_000_000.0),
        "rope_local_theta": local.get("rope_theta", config.get("rope_local_base_freq", 10_000.0)),
    } | _stretch({name: value for name, value in whole.items() if value is not None}, config, "")


def write_gemma3(arch: Arch) -> dict[str, Any]:
    """Return what `read_gemma3` reads."""
    stretched = _stretched(arch)
    local = arch.rope_theta if arch.rope_local_theta is None else arch.rope_local_theta
    return {
        "rope_theta": arch.rope_theta,
        "rope_local_base_freq": local,
        "rope_scaling": None if stretched["rope_type"] == "default" else stretched,
        "rope_parameters": {
            "full_attention": stretched | {"rope_theta": arch.rope_theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


GEMMA3_ROTARY = Aspect(read_gemma3, write_gemma3)


def shortest(windows: list[int]) -> list[int]:
    """Return the shortest list whose repetition begins with these windows; [] where none is above 0.

    >>> shortest([4, 0, 4, 0, 4]), shortest([0, 0]), shortest([4, 4])
    ([4, 0], [], [4])
    """
    if not any(windows):
        return []
    count = len(windows)
    return next(windows[:n] for n in range(1, count + 1) if all(windows[i] == windows[i % n] for i in range(count)))


def window_everywhere(default: int | None) -> Aspect:
    """Return the aspect of a window that all layers have (Mistral); default: where a config leaves it out."""

    def read(config: Config) -> Fields:
        return {"windows": [size] if (size := config.get("sliding_window", default)) else []}

    def write(arch: Arch) -> dict[str, Any]:
        return {"sliding_window": arch.window(0) or None}

    return Aspect(read, write)


def windows_by_layer(
    slides: Callable[[Config, int], bool], old: Callable[[Arch], dict[str, Any]], used: bool = True
) -> Aspect:
    """Return the aspect of windows that some layers have.

    slides: whether a layer has one where the config does not list ``layer_types``. old: the keys besides layer_types
    that say it. used: whether there are windows where ``use_sliding_window`` is left out.
    """

    def read(config: Config) -> Fields:
        layers = config.get("num_hidden_layers")
        if type(layers) is not int or not 0 < layers <= 10_000:
            raise ValueError(f"num_hidden_layers is {layers!r}")
        types = config.get("layer_types") or [
            "sliding_attention" if slides(config, layer) else "full_attention" for layer in range(layers)
        ]
        if len(types) != layers or set(types) - {"sliding_attention", "full_attention"}:
            raise ValueError(f"layer_types has to say sliding_attention or full_attention for {layers} layers")
        size = config.get("sliding_window", 4096) if config.get("use_sliding_window", used) else 0
        return {"windows": shortest([(size or 0) if kind == "sliding_attention" else 0 for kind in types])}

    def write(arch: Arch) -> dict[str, Any]:
        windows = [arch.window(layer) for layer in range(arch.layers)]
        types = ["sliding_attention" if size else "full_attention" for size in windows]
        return {"layer_types": types, "sliding_window": max(windows) or None} | old(arch)

    return Aspect(read, write)


def _qwen_slides(config: Config, layer: int) -> bool:
    return layer >= config.get("max_window_layers", 28)


def _qwen_old(arch: Arch) -> dict[str, Any]:
    full = next((layer for layer in range(arch.layers) if arch.window(layer)), arch.layers)
    return {"use_sliding_window": any(arch.windows), "max_window_layers": full}


def _gemma3_slides(config: Config, layer: int) -> bool:
    pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", 6))
    return (layer + 1) % pattern != 0


QWEN_WINDOWS = windows_by_layer(_qwen_slides, _qwen_old, used=False)
GEMMA2_WINDOWS = windows_by_layer(lambda _, layer: layer % 2 == 0, lambda _: {})
GEMMA3_WINDOWS = windows_by_layer(_gemma3_slides, lambda arch: {"sliding_window_pattern": len(arch.windows) or 1})
