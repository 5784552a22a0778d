"""ModelSpec from the metadata of a GGUF file. Called by the GGUF loader before any weight is read.

Three facts are not in the metadata but in the tensors, so a loader passes what it sees there: whether there
is an output matrix (if not, the embedding is tied), whether projections have biases, and the `rope_freqs`
tensor, in which GGUF stores Llama 3's rotary scaling as one divisor per frequency (`RopeScaling` kind
"factors"). Files of the llama architecture hold query and key rows in the order for which pairs (0,1),
(2,3), ... are rotated, so their specs say `rope_interleaved`, and a loader leaves the rows as they are.
"""

import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from cumulo.errors import ModelError
from cumulo.spec.check import checked
from cumulo.spec.model import MLASpec, ModelSpec, MoESpec, RopeScaling

Fields = dict[str, Any]
# general.file_type -> the type most weights have (ggml's numbering); others are mixtures for which the
# loader knows the bytes of every tensor.
_FILE_TYPES = {
    0: "float32", 1: "float16", 2: "q4_0", 3: "q4_1", 7: "q8_0", 8: "q5_0", 9: "q5_1",
    14: "q4_k", 15: "q4_k", 16: "q5_k", 17: "q5_k", 18: "q6_k", 32: "bfloat16",
}  # fmt: skip
# Fields that change the numbers of a model and that no supported architecture sets, with values that do nothing.
_WITHOUT_EFFECT: dict[str, tuple[float | bool, ...]] = {
    "attention.scale": (0.0,), "attention.clamp_kqv": (0.0,), "attention.max_alibi_bias": (0.0,),
    "attention.causal": (True,), "attn_logit_softcapping": (0.0,), "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0), "embedding_scale": (0.0, 1.0), "residual_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (0.0, 1.0), "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
}  # fmt: skip
_SOFTMAX, _SIGMOID = 1, 2  # ggml's numbers for {arch}.expert_gating_func


class _Metadata:
    """The fields of one architecture: `number("block_count")` is `llama.block_count`, or a named error."""

    def __init__(self, fields: Mapping[str, Any], tensors: Collection[str]) -> None:
        self.fields = fields
        self.tensors = tensors
        self.architecture = fields.get("general.architecture")

    def get(self, name: str, default: Any = None) -> Any:
        value = self.fields.get(f"{self.architecture}.{name}")
        return default if value is None else value

    def need(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise ModelError(f"the GGUF metadata lacks the field '{self.architecture}.{name}'")
        return value

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number; where a file lists one per layer they must be equal."""
        value = self.need(name) if default is None else self.get(name, default)
        values = set(value) if isinstance(value, list) else {value}
        if len(values) != 1:
            raise ModelError(f"'{self.architecture}.{name}' differs between layers, which is not supported")
        (value,) = values
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(f"'{self.architecture}.{name}' must be a whole number, got {value!r}")
        return value


def spec_from_gguf(
    metadata: Mapping[str, Any],
    tensors: Collection[str] = (),
    rope_factors: Sequence[float] | None = None,
) -> ModelSpec:
    """The spec of a GGUF file.

    `metadata` holds plain values by key, `tensors` the names of the file's tensors, `rope_factors` the
    numbers of its `rope_freqs.weight`, if it has one.
    """
    data = _Metadata(metadata, tensors)
    if data.architecture is None:
        raise ModelError("the GGUF metadata lacks the field 'general.architecture'")
    if data.architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ModelError(f"unknown architecture {data.architecture!r} in the GGUF file; known: {known}")
    for name, values in _WITHOUT_EFFECT.items():
        if (value := data.get(name)) is not None and value not in values:
            raise ModelError(
                f"the GGUF metadata has '{data.architecture}.{name}' {reprlib.repr(value)}, which is not supported"
            )
    try:
        fields = _common(data)
        fields |= _ARCHITECTURES[data.architecture](data)
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ModelError(f"the GGUF metadata has a field of the wrong kind: {error}") from error
    if rope_factors is not None:
        if fields["rope_scaling"] is not None:
            raise ModelError(
                "the GGUF file contains both a rope scaling and rope_freqs.weight; only one of them is possible"
            )
        factors = tuple(float(factor) for factor in rope_factors)
        fields["rope_scaling"] = RopeScaling("factors", 1.0, fields["max_context"], factors=factors)
    return checked(ModelSpec(**fields), "the GGUF metadata")


def _common(data: _Metadata) -> Fields:
    heads = data.number("attention.head_count")
    hidden = data.number("embedding_length")
    tokenizer = {
        name: data.fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom")
    }
    ends = [tokenizer[name] for name in ("eos", "eot", "eom") if tokenizer[name] is not None]
    head_dim = data.number("attention.key_length", hidden // max(heads, 1))
    rotated = data.number("rope.dimension_count", head_dim)
    if rotated != head_dim and data.architecture != "deepseek2":
        raise ModelError(
            f"the GGUF file rotates {rotated} of {head_dim} dimensions of a head; only full rotation is supported"
        )
    return {
        "family": data.architecture,
        "vocab_size": _vocabulary(data),
        "hidden": hidden,
        "layers": data.number("block_count"),
        "heads": heads,
        "kv_heads": data.number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        # Files whose every layer has experts may leave the plain width out: no layer uses it.
        "ffn_hidden": data.number("feed_forward_length", data.get("expert_feed_forward_length")),
        "max_context": data.number("context_length"),
        "norm_eps": float(data.need("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(data.get("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(data),
        "tied_embeddings": bool(data.tensors) and "output.weight" not in data.tensors,
        "sliding_window": data.get("attention.sliding_window") or None,
        "bos_token_id": tokenizer["bos"],
        "eos_token_ids": tuple(dict.fromkeys(ends)),
        "dtype": _FILE_TYPES.get(data.fields.get("general.file_type", 0), "float32"),
    }


def _vocabulary(data: _Metadata) -> int:
    tokens = data.fields.get("tokenizer.ggml.tokens")
    return data.number("vocab_size", None if tokens is None else len(tokens))


def _rope_scaling(data: _Metadata) -> RopeScaling | None:
    kind = data.get("rope.scaling.type", "none")
    factor = float(data.get("rope.scaling.factor", 1.0))
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind not in ("linear", "yarn"):
        raise ModelError(f"unknown rope scaling {kind!r} in the GGUF file; known: none, linear, yarn")
    # Converters store a tenth of mscale_all_dim and drop mscale: the two are equal in every DeepSeek release.
    mscale = 10.0 * float(data.get("rope.scaling.yarn_log_multiplier", 0.0))
    return RopeScaling(
        kind,
        factor,
        data.number("rope.scaling.original_context_length", data.number("context_length")),
        beta_fast=float(data.get("rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=float(data.get("rope.scaling.yarn_beta_slow", 1.0)),
        mscale=mscale,
        mscale_all_dim=mscale,
    )


def _has(data: _Metadata, suffix: str) -> bool:
    return any(name.endswith(suffix) for name in data.tensors)


def _llama(data: _Metadata) -> Fields:
    fields: Fields = {
        "rope_interleaved": True,
        "qkv_bias": _has(data, ".attn_q.bias"),
        "output_bias": _has(data, ".attn_output.bias"),
        "mlp_bias": _has(data, ".ffn_down.bias"),
    }
    experts = data.number("expert_count", 0)
    if experts:
        moe = MoESpec(experts, data.number("expert_used_count"), data.number("feed_forward_length"))
        fields |= {"family": "mixtral", "moe": moe}
    return fields


def _qwen2(data: _Metadata) -> Fields:
    return {"qkv_bias": True, "output_bias": _has(data, ".attn_output.bias")}


def _qwen3(data: _Metadata) -> Fields:
    return {
        "qk_norm": True,
        "qkv_bias": _has(data, ".attn_q.bias"),
        "output_bias": _has(data, ".attn_output.bias"),
    }


def _qwen3_moe(data: _Metadata) -> Fields:
    moe = MoESpec(
        experts=data.number("expert_count"),
        experts_per_token=data.number("expert_used_count"),
        expert_hidden=data.number("expert_feed_forward_length"),
    )
    return {**_qwen3(data), "family": "qwen3_moe", "moe": moe}


def _deepseek2(data: _Metadata) -> Fields:
    rope_dim = data.number("rope.dimension_count")
    # Older files keep the widths of the expanded heads under key_length, newer ones (converted for the
    # absorbed form) under key_length_mla, where key_length is that of the latent.
    key_dim = data.number("attention.key_length_mla", data.number("attention.key_length"))
    mla = MLASpec(
        q_rank=data.get("attention.q_lora_rank") or None,
        kv_rank=data.number("attention.kv_lora_rank"),
        nope_head_dim=key_dim - rope_dim,
        rope_head_dim=rope_dim,
        value_head_dim=data.number("attention.value_length_mla", data.number("attention.value_length")),
    )
    gating = data.number("expert_gating_func", _SOFTMAX)
    if gating not in (_SOFTMAX, _SIGMOID):
        raise ModelError(f"unknown 'deepseek2.expert_gating_func' {gating}; known: 1 (softmax), 2 (sigmoid)")
    sigmoid = gating == _SIGMOID
    width = data.number("expert_feed_forward_length")
    moe = MoESpec(
        experts=data.number("expert_count"),
        experts_per_token=data.number("expert_used_count"),
        expert_hidden=width,
        shared_hidden=width * data.number("expert_shared_count", 0),
        scoring="sigmoid" if sigmoid else "softmax",
        normalise_weights=bool(data.get("expert_weights_norm", False)),
        routed_scale=float(data.get("expert_weights_scale", 1.0)) or 1.0,
        groups=data.number("expert_group_count", 1) or 1,
        top_groups=data.number("expert_group_used_count", 1) or 1,
        group_score="top2sum" if sigmoid else "max",
        selection_bias=_has(data, ".exp_probs_b.bias") if data.tensors else sigmoid,
        dense_layers=tuple(range(data.number("leading_dense_block_count", 0))),
    )
    return {
        "family": "deepseek_v3" if sigmoid else "deepseek_v2",
        "head_dim": key_dim,
        "kv_heads": data.number("attention.head_count"),
        "rope_interleaved": True,
        "mla": mla,
        "moe": moe,
    }


_ARCHITECTURES: dict[str, Callable[[_Metadata], Fields]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "deepseek2": _deepseek2,
}
