"""A Hugging Face config.json from a ModelSpec: the inverse of `from_huggingface`. Called by the export."""

from typing import Any

from cumulo.errors import ModelError
from cumulo.spec.from_huggingface import spec_from_config
from cumulo.spec.model import ModelSpec, RopeScaling

Fields = dict[str, Any]
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM", "mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM", "glm4_moe_lite": "Glm4MoeLiteForCausalLM", "youtu": "YoutuForCausalLM",
    "dots1": "Dots1ForCausalLM", "phi3": "Phi3ForCausalLM", "ernie4_5": "Ernie4_5ForCausalLM",
    "seed_oss": "SeedOssForCausalLM", "ministral": "MinistralForCausalLM", "cwm": "CwmForCausalLM",
}  # fmt: skip

_BY_LAYER = ("qwen2", "qwen3", "ministral", "cwm", "dots1")  # that say of each layer whether it has a window


def config_from_spec(spec: ModelSpec) -> Fields:
    """What `spec_from_config` reads as exactly `spec`, or a ModelError that says what has no such form."""
    if spec.family not in _ARCHITECTURES:
        raise ModelError(f"a {spec.family!r} model has no config.json; known: {', '.join(_ARCHITECTURES)}")
    ends = spec.eos_token_ids
    config: Fields = {
        "architectures": [_ARCHITECTURES[spec.family]],
        "model_type": spec.family,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn_hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_context,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_parameters": {"rope_theta": spec.rope_theta, **_rope(spec.rope_scaling)},
        "tie_word_embeddings": spec.tied_embeddings,
        "hidden_act": "silu",
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": None if not ends else ends[0] if len(ends) == 1 else list(ends),
        "dtype": spec.dtype,
        **_biases(spec),
        **_window(spec),
        **_experts(spec),
        **_latent(spec),
    }
    if spec_from_config(config) != spec:
        raise ModelError(f"this {spec.family!r} model has settings that its config.json cannot express")
    return config


def _biases(spec: ModelSpec) -> Fields:
    if spec.family == "ernie4_5":
        return {"use_bias": spec.qkv_bias}
    fields: Fields = {"mlp_bias": spec.mlp_bias}
    if spec.family == "seed_oss":
        return fields | {"attention_bias": spec.qkv_bias, "attention_out_bias": spec.output_bias}
    return fields | {"attention_bias": spec.output_bias if spec.mla is None else spec.qkv_bias}


def _rope(scaling: RopeScaling | None) -> Fields:
    if scaling is None:
        return {"rope_type": "default"}
    if scaling.kind == "factors":
        raise ModelError("rotary factors read from a GGUF file have no form in config.json")
    fields: Fields = {
        "rope_type": scaling.kind,
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_context,
    }
    if scaling.kind == "llama3":
        fields |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        fields |= {
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.truncate,
        }
        optional = ("mscale", "mscale_all_dim", "attention_factor")
        fields |= {name: getattr(scaling, name) for name in optional if getattr(scaling, name)}
    return fields


def _window(spec: ModelSpec) -> Fields:
    fields: Fields = {"sliding_window": spec.sliding_window}
    if spec.family.startswith("qwen"):
        fields["use_sliding_window"] = spec.sliding_window is not None
    if spec.family in _BY_LAYER:
        full, windowed = "full_attention", "sliding_attention"
        kinds = [full if spec.window_of_layer(layer) is None else windowed for layer in range(spec.layers)]
        fields |= {"layer_types": kinds}
        if windowed in kinds:
            fields["max_window_layers"] = kinds.index(windowed)
    return fields


def _experts(spec: ModelSpec) -> Fields:
    moe = spec.moe
    if moe is None:
        return {}
    fields: Fields = {"num_experts_per_tok": moe.experts_per_token}
    if spec.family == "mixtral":
        return fields | {"num_local_experts": moe.experts}
    fields |= {"moe_intermediate_size": moe.expert_hidden, "norm_topk_prob": moe.normalise_weights}
    if spec.family == "qwen3_moe":
        dense = list(moe.dense_layers)
        return fields | {"num_experts": moe.experts, "decoder_sparse_step": 1, "mlp_only_layers": dense}
    fields |= {
        "n_routed_experts": moe.experts,
        "n_shared_experts": moe.shared_hidden // moe.expert_hidden,
        "routed_scaling_factor": moe.routed_scale,
        "first_k_dense_replace": len(moe.dense_layers),
        "mlp_layer_types": [
            "dense" if layer in moe.dense_layers else "sparse" for layer in range(spec.layers)
        ],
        "n_group": moe.groups,
        "topk_group": moe.top_groups,
    }
    if spec.family == "deepseek_v2":
        fields["topk_method"] = "group_limited_greedy" if moe.groups > 1 else "greedy"
    return fields


def _latent(spec: ModelSpec) -> Fields:
    mla = spec.mla
    if mla is None:
        return {}
    return {
        "q_lora_rank": mla.q_rank,
        "kv_lora_rank": mla.kv_rank,
        "qk_nope_head_dim": mla.nope_head_dim,
        "qk_rope_head_dim": mla.rope_head_dim,
        "v_head_dim": mla.value_head_dim,
        "head_dim": mla.rope_head_dim,
        "rope_interleave": spec.rope_interleaved,
    }
