"""Tiny random models as folders, for engines whose ranks each load their own part: dense, with experts, and with
latent attention, shared experts and a dense first layer. Sizes that do not divide (the vocabulary) are among them.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file

from cumulo.models.files.names_huggingface import placements
from cumulo.spec.from_huggingface import spec_from_config
from tests.engine.guided_engine import EOS, TOKENIZER, VOCAB

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "torch_dtype": "float32",
    "eos_token_id": EOS, "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "tied": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1,
             "tie_word_embeddings": True},
    "experts": {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True,
                "moe_intermediate_size": 16, "decoder_sparse_step": 1, "mlp_only_layers": [1]},
    "latent": {"model_type": "deepseek_v3", "num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 10,
               "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 8,
               "num_experts_per_tok": 3, "moe_intermediate_size": 16, "n_shared_experts": 1, "n_group": 2,
               "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7},
}  # fmt: skip


def save_model(name: str, folder: Path, **changes: Any) -> Path:
    """Writes a Hugging Face folder with a tokenizer, always the same. `changes`: of its config.json."""
    path = folder / name
    path.mkdir()
    config = {**_COMMON, **CONFIGS[name], **changes}
    (path / "config.json").write_text(json.dumps(config))
    TOKENIZER.backend.decoder = tokenizers.decoders.ByteLevel()
    TOKENIZER.backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    generator = torch.Generator().manual_seed(5)
    weights = {}
    for placement in placements(spec_from_config(config)):
        noise = torch.randn(placement.shape, generator=generator)
        norm = "norm.weight" in placement.source
        weights[placement.source] = 1 + 0.2 * noise if norm else 0.25 * noise
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path
