"""ModelSpec from a parsed Hugging Face config.json. Called when a folder or a hub name is opened.

A family is one small function that turns the fields of its configuration into those of ModelSpec. Where a
field is absent, the default is the one the `transformers` class of that family has; a field without a
sensible default is demanded by name.
"""

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from cumulo.errors import ModelError
from cumulo.spec.check import checked
from cumulo.spec.model import MLASpec, ModelSpec, MoESpec, RopeScaling
from cumulo.spec.quantisation import quantisation_from_config

Config = Mapping[str, Any]
Fields = dict[str, Any]
_MOST = 1 << 28  # of any count or size: things are made per layer and per expert before the spec is checked
_MOST_LAYERS = 100_000
_DEFAULT_THETA = {"mixtral": 1e6, "ernie4_5": 500_000.0}


def spec_from_config(config: Config) -> ModelSpec:
    """The spec of a configuration, or a ModelError that names the unknown architecture or missing field."""
    if not isinstance(config, Mapping):
        raise ModelError(f"config.json must contain a table of fields, got {type(config).__name__}")
    family = config.get("model_type")
    if family is None:
        raise ModelError("config.json contains no 'model_type', so the architecture is unknown")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise ModelError(f"unknown architecture {family!r} in config.json; known: {', '.join(_FAMILIES)}")
    quantisation_from_config(config)  # refuses what the loaders do not know
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(
            f"config.json asks for hidden_act {activation!r}; {family} is supported only with 'silu'"
        )
    try:
        fields = _common(config)
        fields |= _FAMILIES[family](config)
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ModelError(
            f"config.json of a {family!r} model has a field of the wrong kind: {error}"
        ) from error
    return checked(ModelSpec(**fields), "config.json")


def _need(config: Config, *names: str) -> Any:
    """The first of these fields that is there; more than one name where releases of a family differ."""
    for name in names:
        if config.get(name) is not None:
            return config[name]
    fields = " or ".join(map(repr, names))
    raise ModelError(f"config.json of a {config['model_type']!r} model lacks the field {fields}")


def _whole(config: Config, *names: str) -> int:
    value = _need(config, *names)
    if isinstance(value, bool) or not isinstance(value, int) or not value >= 0:
        raise ModelError(
            f"config.json: {' or '.join(names)} must be a whole number, got {reprlib.repr(value)}"
        )
    if value > _MOST:
        raise ModelError(
            f"config.json: {' or '.join(names)} is {reprlib.repr(value)}; no model has more than {_MOST:,}"
        )
    return value


def _common(config: Config) -> Fields:
    if _whole(config, "num_hidden_layers") > _MOST_LAYERS:
        raise ModelError(
            f"config.json says {config['num_hidden_layers']:,} layers, which is more than any model has"
        )
    heads = _whole(config, "num_attention_heads")
    hidden = _whole(config, "hidden_size")
    theta, scaling = _rope(config)
    eos = config.get("eos_token_id")
    return {
        "family": config["model_type"],
        "vocab_size": _whole(config, "vocab_size"),
        "hidden": hidden,
        "layers": _whole(config, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or hidden // max(heads, 1),
        "ffn_hidden": _whole(config, "intermediate_size"),
        "max_context": _whole(config, "max_position_embeddings"),
        "norm_eps": float(_need(config, "rms_norm_eps")),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
        "bos_token_id": config.get("bos_token_id"),
        "eos_token_ids": () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        "dtype": config.get("dtype") or config.get("torch_dtype") or "float32",
    }


def _rope(config: Config) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_theta` + `rope_scaling` or, since transformers 5, `rope_parameters`."""
    family = config["model_type"]
    table = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in table.values()):
        raise ModelError(
            "config.json contains rotary parameters per layer type; only one set for all layers is supported"
        )
    theta = float(table.get("rope_theta") or config.get("rope_theta") or _DEFAULT_THETA.get(family, 10000.0))
    partial = table.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ModelError(f"config.json rotates only {partial} of each head; only full rotation is supported")
    kind = table.get("rope_type") or table.get("type") or "default"
    if kind == "default":
        return theta, None
    # Phi-3 calls its own scaling, by two lists of factors, yarn in older files.
    if kind not in ("linear", "llama3", "yarn") or family == "phi3":
        known = "default" if family == "phi3" else "default, linear, llama3, yarn"
        raise ModelError(
            f"unknown rope scaling {kind!r} of a {family!r} model in config.json; known: {known}"
        )
    context = _whole(config, "max_position_embeddings")
    original = table.get("original_max_position_embeddings") or context
    factor = table.get("factor")
    if factor is None and kind == "yarn":
        factor = context / original
    needed = {"factor": factor}
    if kind == "llama3":
        needed |= {name: table.get(name) for name in ("low_freq_factor", "high_freq_factor")}
    if absent := [name for name, value in needed.items() if value is None]:
        raise ModelError(f"config.json: the {kind} rope scaling lacks the field {absent[0]!r}")
    options: Fields = {
        name: float(table[name])
        for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale",
                     "mscale_all_dim", "attention_factor")
        if table.get(name) is not None
    }  # fmt: skip
    options |= {"kind": kind, "factor": float(factor or 0), "original_context": original}
    return theta, RopeScaling(**options, truncate=table.get("truncate", True))


def _llama(config: Config) -> Fields:
    bias = bool(config.get("attention_bias", False))
    return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": bool(config.get("mlp_bias", False))}


def _mistral(config: Config) -> Fields:
    # An absent field means 4,096; later releases switch the window off with an explicit null.
    return {
        "kv_heads": _whole(config, "num_key_value_heads"),
        "sliding_window": config.get("sliding_window", 4096),
    }


def _qwen_window(config: Config) -> Fields:
    """Qwen windows only the layers from `max_window_layers` on, and none unless it is switched on."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    first = config.get("max_window_layers", 28)
    return _window(config, window, lambda layer: layer >= first)


def _window(config: Config, window: int | None, by_default: Callable[[int], bool]) -> Fields:
    """The layers that see `window` tokens only: those of `layer_types` or, where it is absent, `by_default`."""
    layers, kinds = _whole(config, "num_hidden_layers"), config.get("layer_types")
    if kinds is not None:
        if len(kinds) != layers:
            raise ModelError(
                f"config.json: layer_types lists {len(kinds)} layers, but the model has {layers}"
            )
        if unknown := sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"}):
            raise ModelError(
                f"config.json: layer_types has {unknown[0]!r}; known: 'full_attention', 'sliding_attention'"
            )
    if window is None:
        return {}
    windowed = tuple(
        layer
        for layer in range(layers)
        if (by_default(layer) if kinds is None else kinds[layer] == "sliding_attention")
    )
    if len(windowed) == layers:
        return {"sliding_window": window}
    return {"sliding_window": window, "windowed_layers": windowed} if windowed else {}


def _qwen2(config: Config) -> Fields:
    return {"kv_heads": _whole(config, "num_key_value_heads"), "qkv_bias": True, **_qwen_window(config)}


def _qwen3(config: Config) -> Fields:
    return {
        **_llama(config),
        "kv_heads": _whole(config, "num_key_value_heads"),
        "head_dim": _whole(config, "head_dim"),
        "qk_norm": True,
        **_qwen_window(config),
    }


def _phi3(config: Config) -> Fields:
    return {"sliding_window": config.get("sliding_window")}


def _ernie(config: Config) -> Fields:
    bias = bool(config.get("use_bias", False))
    return {
        "kv_heads": _whole(config, "num_key_value_heads"),
        "head_dim": _whole(config, "head_dim"),
        "rope_interleaved": True,
        "tied_embeddings": bool(config.get("tie_word_embeddings", True)),
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": bias,
    }


def _seed_oss(config: Config) -> Fields:
    return {
        "kv_heads": _whole(config, "num_key_value_heads"),
        "head_dim": _whole(config, "head_dim"),
        "qkv_bias": bool(config.get("attention_bias", True)),
        "output_bias": bool(config.get("attention_out_bias", False)),
        "mlp_bias": bool(config.get("mlp_bias", False)),
    }


def _ministral(config: Config) -> Fields:
    window = _window(config, config.get("sliding_window", 4096), lambda layer: True)
    return {"kv_heads": _whole(config, "num_key_value_heads"), **window}


def _cwm(config: Config) -> Fields:
    _need(config, "rope_parameters", "rope_scaling")
    return {
        "kv_heads": _whole(config, "num_key_value_heads"),
        "head_dim": _whole(config, "head_dim"),
        "mlp_bias": bool(config.get("mlp_bias", False)),
        **_window(config, config.get("sliding_window", 8192), lambda layer: layer % 4 != 0),
    }


def _mixtral(config: Config) -> Fields:
    moe = MoESpec(
        experts=_whole(config, "num_local_experts"),
        experts_per_token=_whole(config, "num_experts_per_tok"),
        expert_hidden=_whole(config, "intermediate_size"),
    )
    return {
        "kv_heads": _whole(config, "num_key_value_heads"),
        "sliding_window": config.get("sliding_window"),
        "moe": moe,
    }


def _qwen3_moe(config: Config) -> Fields:
    step = config.get("decoder_sparse_step", 1)
    plain = config.get("mlp_only_layers") or []
    layers = _whole(config, "num_hidden_layers")
    moe = MoESpec(
        experts=_whole(config, "num_experts", "num_local_experts"),
        experts_per_token=_whole(config, "num_experts_per_tok"),
        expert_hidden=_whole(config, "moe_intermediate_size"),
        normalise_weights=bool(config.get("norm_topk_prob", False)),
        dense_layers=tuple(layer for layer in range(layers) if layer in plain or (layer + 1) % step != 0),
    )
    return {
        **_llama(config),
        "kv_heads": _whole(config, "num_key_value_heads"),
        "qk_norm": True,
        # Unlike its dense siblings it windows every layer once the window is on.
        "sliding_window": config.get("sliding_window", 4096) if config.get("use_sliding_window") else None,
        "moe": moe,
    }


def _latent(config: Config) -> Fields:
    """DeepSeek's attention, which other families took over."""
    mla = MLASpec(
        q_rank=config.get("q_lora_rank"),
        kv_rank=_whole(config, "kv_lora_rank"),
        nope_head_dim=_whole(config, "qk_nope_head_dim"),
        rope_head_dim=_whole(config, "qk_rope_head_dim"),
        value_head_dim=_whole(config, "v_head_dim"),
    )
    return {
        **_llama(config),
        "head_dim": mla.nope_head_dim + mla.rope_head_dim,
        "rope_interleaved": bool(config.get("rope_interleave", True)),
        "mla": mla,
    }


def _dense_first(config: Config, default: int) -> tuple[int, ...]:
    """Layers that are no mixtures."""
    first, every = config.get("first_k_dense_replace", default) or 0, config.get("moe_layer_freq") or 1
    layers = _whole(config, "num_hidden_layers")
    return tuple(layer for layer in range(layers) if layer < first or layer % every != 0)


def _deepseek_experts(config: Config, dense_layers: tuple[int, ...], router: Fields) -> MoESpec:
    """Shared experts next to routed ones, which other families took over."""
    width = _whole(config, "moe_intermediate_size")
    return MoESpec(
        experts=_whole(config, "n_routed_experts", "num_experts", "num_local_experts"),
        experts_per_token=_whole(config, "num_experts_per_tok"),
        expert_hidden=width,
        shared_hidden=width * (config.get("n_shared_experts") or 0),
        dense_layers=dense_layers,
        **router,
    )


def _deepseek_v2(config: Config) -> Fields:
    method, scoring = config.get("topk_method", "greedy"), config.get("scoring_func", "softmax")
    if method not in ("greedy", "group_limited_greedy") or scoring != "softmax":
        raise ModelError(
            f"config.json: deepseek_v2 routing {method!r} with scores {scoring!r} is unknown; "
            "known: 'greedy' and 'group_limited_greedy' with 'softmax'"
        )
    router: Fields = {
        "normalise_weights": bool(config.get("norm_topk_prob", False)),
        "routed_scale": float(config.get("routed_scaling_factor", 1.0)),
    }
    if method == "group_limited_greedy":
        router |= {"groups": _whole(config, "n_group"), "top_groups": _whole(config, "topk_group")}
    return {**_latent(config), "moe": _deepseek_experts(config, _dense_first(config, 0), router)}


def _sigmoid_router(config: Config, **defaults: Any) -> Fields:
    """DeepSeek-V3's, whose defaults are others in every family that took it over."""
    config = {**defaults, **config}
    return {
        "scoring": "sigmoid",
        "selection_bias": True,
        "normalise_weights": bool(_need(config, "norm_topk_prob")),
        "groups": _whole(config, "n_group"),
        "top_groups": _whole(config, "topk_group"),
        "group_score": "top2sum",
        "routed_scale": float(_need(config, "routed_scaling_factor")),
    }


def _deepseek_v3(config: Config) -> Fields:
    router = _sigmoid_router(config, norm_topk_prob=True, routed_scaling_factor=2.5)
    return {
        **_latent(config),
        "moe": _deepseek_experts(config, _dense_first(config, 3), router),
    }


def _dots1(config: Config) -> Fields:
    first = config.get("max_window_layers", 62)
    router = _sigmoid_router(config, norm_topk_prob=False, routed_scaling_factor=1.0, n_group=1, topk_group=1)
    return {
        **_llama(config),
        "kv_heads": _whole(config, "num_key_value_heads"),
        "qk_norm": True,
        **_window(config, config.get("sliding_window", 4096), lambda layer: layer >= first),
        "moe": _deepseek_experts(config, _dense_first(config, 0), router),
    }


def _glm4_moe_lite(config: Config) -> Fields:
    layers, kinds = _whole(config, "num_hidden_layers"), config.get("mlp_layer_types")
    kinds = ["dense"] + ["sparse"] * (layers - 1) if kinds is None else kinds
    if len(kinds) != layers or not set(kinds) <= {"dense", "sparse"}:
        raise ModelError(
            f"config.json: mlp_layer_types must say 'dense' or 'sparse' for each of {layers} layers"
        )
    dense = tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")
    router = _sigmoid_router(config, norm_topk_prob=True, routed_scaling_factor=1.8, n_group=1, topk_group=1)
    return {**_latent(config), "moe": _deepseek_experts(config, dense, router)}


def _youtu(config: Config) -> Fields:
    return {**_latent(config), "tied_embeddings": bool(config.get("tie_word_embeddings", True))}


_FAMILIES: dict[str, Callable[[Config], Fields]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
    "glm4_moe_lite": _glm4_moe_lite,
    "youtu": _youtu,
    "dots1": _dots1,
    "phi3": _phi3,
    "ernie4_5": _ernie,
    "seed_oss": _seed_oss,
    "ministral": _ministral,
    "cwm": _cwm,
}
