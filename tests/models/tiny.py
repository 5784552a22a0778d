"""Tiny random models of every family, made and saved by `transformers`: the oracle of the model tests.

`save(name, folder)` writes config.json and model.safetensors and returns the transformers model;
`reference_logits` and `reference_greedy` ask that model. Everything is seeded: two calls give one model.
Weights are scaled up, and norms, biases and routing biases randomised, so that greedy output wanders and a
forgotten term shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests import peers

VOCABULARY = 199
_SIZE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
_YARN_ROPE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.7,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7,
}  # fmt: skip

# name -> (model_type, what differs from _SIZE)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_biased": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "llama3_rope": ("llama", {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama_linear_rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}},
    ),
    "smollm2": ("llama", {"num_attention_heads": 6, "num_key_value_heads": 3, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 13, "head_dim": 16}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_windowed": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen2_yarn": (
        "qwen2",
        {"rope_parameters": {k: v for k, v in _YARN_ROPE.items() if not k.startswith("mscale")}},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "mixtral": ("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True,
            "decoder_sparse_step": 1, "mlp_only_layers": [1], "head_dim": 16,
        },
    ),
    "qwen3_moe_sparse": (
        "qwen3_moe",
        {
            "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": False,
            "decoder_sparse_step": 2, "head_dim": 16, "tie_word_embeddings": True,
        },
    ),
    "deepseek_v2": ("deepseek_v2", {**_LATENT, "q_lora_rank": 20}),
    "deepseek_v2_lite": (
        "deepseek_v2",
        {
            **_LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 4,
            "topk_group": 2, "rope_parameters": {**_YARN_ROPE, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **_LATENT, "q_lora_rank": 20, "n_group": 4, "topk_group": 2, "norm_topk_prob": True,
            "rope_parameters": _YARN_ROPE, "num_hidden_layers": 4,
        },
    ),
    "deepseek_v3_tied": (
        "deepseek_v3",
        {
            **_LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
            "tie_word_embeddings": True, "attention_bias": True,
        },
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        {
            **_LATENT, "q_lora_rank": 20, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-4,
            "mlp_layer_types": ["dense", "sparse", "dense"],
        },
    ),
    "youtu": (
        "youtu",
        {
            "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8, "v_head_dim": 10, "tie_word_embeddings": True,
        },
    ),
    "dots1": (
        "dots1",
        {
            "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2,
            "first_k_dense_replace": 1, "routed_scaling_factor": 1.7, "n_group": 4, "topk_group": 2,
            "norm_topk_prob": True, "head_dim": 16, "sliding_window": 9, "max_window_layers": 1,
        },
    ),
    "phi3": ("phi3", {"sliding_window": 13}),
    "ernie4_5": ("ernie4_5", {"use_bias": True, "head_dim": 16, "tie_word_embeddings": True}),
    "seed_oss": ("seed_oss", {"head_dim": 16}),
    "seed_oss_biased": (
        "seed_oss",
        {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True, "head_dim": 16},
    ),
    "ministral": (
        "ministral",
        {
            "head_dim": 16, "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "cwm": ("cwm", {"sliding_window": 11, "head_dim": 16, "rope_parameters": _LLAMA3_ROPE}),
}  # fmt: skip


def build(name: str, seed: int = 0, **overrides: Any) -> peers.transformers.PreTrainedModel:
    """The tiny transformers model of a row of FAMILIES, float32, on the CPU, ready to be asked."""
    model_type, changes = FAMILIES[name]
    config = peers.transformers.AutoConfig.for_model(model_type, **{**_SIZE, **changes, **overrides})
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = peers.transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        _randomise(model)
    return model


def save(name: str, folder: Path, seed: int = 0, **overrides: Any) -> peers.transformers.PreTrainedModel:
    """Build and write it as a Hugging Face folder; `max_shard_size="40KB"` makes it a sharded one."""
    shard = overrides.pop("max_shard_size", "1GB")
    model = build(name, seed, **overrides)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


@torch.no_grad()
def _randomise(model: peers.transformers.PreTrainedModel) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" in name:
            continue
        if "e_score_correction_bias" in name:
            tensor.uniform_(-0.3, 0.3)
        elif tensor.ndim == 1:
            norm = "norm" in name
            tensor.uniform_(0.5, 1.5) if norm else tensor.uniform_(-0.3, 0.3)
        elif "embed" in name:
            tensor.normal_(std=0.3)
        else:
            tensor.normal_(std=1.4 * tensor.shape[-1] ** -0.5)


@torch.no_grad()
def reference_logits(model: peers.transformers.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), vocabulary]: the logits after every prefix."""
    return model(torch.tensor([tokens])).logits[0]


@torch.no_grad()
def reference_greedy(model: peers.transformers.PreTrainedModel, tokens: list[int], count: int) -> list[int]:
    """`count` greedy tokens after the prompt; end-of-sequence tokens do not end it."""
    output = model.generate(
        torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens)), do_sample=False,
        max_new_tokens=count, min_new_tokens=count, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return output[0, len(tokens) :].tolist()


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
