"""Tiny transformers models as GGUF files, converted by the rules of llama.cpp's converter: tensor names from
the `gguf` package's own map, rows of llama's q and k interleaved, experts stacked."""

import json
import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from tests.models.gguf_writing import write_gguf

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
}
_EXPERT = re.compile(
    r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight"
)
_PART = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}


def convert(
    folder: Path,
    path: Path,
    *,
    type_name: str = "F32",
    experts: str = "stacked",
    latent: str = "whole",
    metadata: dict[str, Any] | None = None,
) -> Path:
    """Write the model in `folder` (config.json, model.safetensors) as a GGUF file.

    Matrices are stored as `type_name`, everything else as F32. `experts`: "stacked" or "single" tensors;
    `latent`: kv_b "whole", in "halves", or "both".
    """
    config = json.loads((folder / "config.json").read_text())
    tensors = {
        name: (values, type_name if _is_matrix(name, values) else "F32")
        for name, values in _tensors(config, load_file(folder / "model.safetensors"), experts, latent).items()
    }
    return write_gguf(path, _metadata(config) | (metadata or {}), tensors)


def _is_matrix(name: str, values: np.ndarray) -> bool:
    return values.ndim > 1 and "ffn_gate_inp" not in name


def _architecture(config: dict[str, Any]) -> gguf.MODEL_ARCH:
    return ARCHITECTURES[config["model_type"]]


def _tensors(
    config: dict[str, Any], source: dict[str, np.ndarray], experts: str, latent: str
) -> dict[str, np.ndarray]:
    architecture = _architecture(config)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    result: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, values in source.items():
        if match := _EXPERT.fullmatch(name):
            layer, expert, part = int(match[1]), int(match[2]), _PART[match[3]]
            if experts == "single":
                result[f"blk.{layer}.ffn_{part}.{expert}.weight"] = values
            else:
                stacks.setdefault(f"blk.{layer}.ffn_{part}_exps.weight", {})[expert] = values
            continue
        if name.endswith("e_score_correction_bias"):
            name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        if architecture is gguf.MODEL_ARCH.LLAMA and re.search(r"\.[qk]_proj\.", name):
            heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if name.endswith("kv_b_proj.weight") and latent != "whole":
            per_head = values.reshape(config["num_attention_heads"], -1, values.shape[1])
            nope = config["qk_nope_head_dim"]
            result[target.replace("kv_b", "k_b")] = per_head[:, :nope].transpose(0, 2, 1)
            result[target.replace("kv_b", "v_b")] = per_head[:, nope:]
            if latent == "halves":
                continue
        result[target] = values
    for name, members in stacks.items():
        result[name] = np.stack([members[expert] for expert in sorted(members)])
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        result["rope_freqs.weight"] = _llama3_factors(config, rope)
    return result


def _llama3_factors(config: dict[str, Any], rope: dict[str, Any]) -> np.ndarray:
    """One divisor per frequency, as the converter computes them."""
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    trained, low, high = (
        rope["original_max_position_embeddings"],
        rope["low_freq_factor"],
        rope["high_freq_factor"],
    )
    factors = []
    for exponent in range(0, dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (exponent / dim)
        if wavelength < trained / high:
            factors.append(1.0)
        elif wavelength > trained / low:
            factors.append(rope["factor"])
        else:
            smooth = (trained / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def _metadata(config: dict[str, Any]) -> dict[str, Any]:
    name = gguf.MODEL_ARCH_NAMES[_architecture(config)]
    rope = config.get("rope_parameters") or {}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    fields: dict[str, Any] = {
        "vocab_size": config["vocab_size"],
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
    }
    if rope.get("rope_type") in ("linear", "yarn"):
        fields["rope.scaling.type"] = rope["rope_type"]
        fields["rope.scaling.factor"] = rope["factor"]
        if rope["rope_type"] == "yarn":
            fields["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
            if rope.get("mscale_all_dim"):
                fields["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    experts = config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts")
    if experts:
        fields["expert_count"] = experts
        fields["expert_used_count"] = config["num_experts_per_tok"]
        if "moe_intermediate_size" in config:
            fields["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if name == "deepseek2":
        sigmoid = config["model_type"] == "deepseek_v3"
        fields |= {
            "attention.kv_lora_rank": config["kv_lora_rank"],
            "attention.key_length": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
            "attention.value_length": config["v_head_dim"],
            "rope.dimension_count": config["qk_rope_head_dim"],
            "expert_shared_count": config["n_shared_experts"],
            "expert_weights_scale": config["routed_scaling_factor"],
            "expert_weights_norm": bool(config.get("norm_topk_prob")) and sigmoid,
            "expert_gating_func": 2 if sigmoid else 1,
            "leading_dense_block_count": config["first_k_dense_replace"],
        }
        if config.get("q_lora_rank"):
            fields["attention.q_lora_rank"] = config["q_lora_rank"]
        if config.get("topk_method") != "greedy" and config.get("n_group", 1) > 1:
            fields["expert_group_count"] = config["n_group"]
            fields["expert_group_used_count"] = config["topk_group"]
    ends = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    return {"general.architecture": name, **{f"{name}.{key}": value for key, value in fields.items()}, **ends}
