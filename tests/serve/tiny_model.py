"""A tiny random Llama with a tokenizer and a chat template, for tests that need a real server but no sense; also
with experts, and with latent attention.

It loads in no time and answers in microseconds per token, so thousands of requests fit into a test. Everything is
seeded: two calls write the same model.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

from cumulo.models.files.names_huggingface import placements
from cumulo.spec.from_huggingface import spec_from_config

NAME = "tiny-random"
_TEXT = [
    "the cat sat on the mat and the dog saw that the cat was there",
    '{"name": "Ann", "age": 42, "city": "Paris", "numbers": [1, 2, 3.5], "true": false}',
    "She said: “naïve café”, and he answered — we have seen 3 of 10 cases.",
    "def add(first, second):\n    return first + second  # 12345\n\n",
] * 3
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Sizes:
    layers: int = 2
    hidden: int = 48
    ffn: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16


# Fields of config.json that make another family of it.
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8,
                "num_experts_per_tok": 3, "norm_topk_prob": True, "moe_intermediate_size": 32,
                "decoder_sparse_step": 1, "mlp_only_layers": []},
    "latent": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": 4,
               "kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
               "v_head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
               "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
               "routed_scaling_factor": 1.7},
}  # fmt: skip


def save_tiny_model(
    folder: Path, max_context: int = 512, sizes: Sizes = Sizes(), kind: str = "dense"
) -> Path:
    """Writes a Hugging Face folder named NAME into `folder`, and returns it."""
    path = folder / NAME
    path.mkdir(parents=True)
    vocabulary = _save_tokenizer(path)
    ends = vocabulary - len(_SPECIAL) + _SPECIAL.index("<|im_end|>")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocabulary,
        "hidden_size": sizes.hidden, "intermediate_size": sizes.ffn, "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads, "num_key_value_heads": sizes.kv_heads, "head_dim": sizes.head_dim,
        "max_position_embeddings": max_context, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "float32", "eos_token_id": ends,
        **KINDS[kind],
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    weights = _weights(vocabulary, sizes) if kind == "dense" else _weights_of(config)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _save_tokenizer(path: Path) -> int:
    """Byte-level BPE, so that every text has tokens; the number of tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(_TEXT, trainer)
    backend.add_special_tokens(_SPECIAL)
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "chat_template": _TEMPLATE})
    )
    return int(backend.get_vocab_size())


def _weights_of(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    generator, weights = torch.Generator().manual_seed(0), {}
    for placement in placements(spec_from_config(config)):
        noise = torch.randn(placement.shape, generator=generator)
        norm = "norm.weight" in placement.source
        scale = 2.0 if "embed" in placement.source else 1.4
        weights[placement.source] = (
            torch.ones_like(noise) if norm else noise * scale * placement.shape[-1] ** -0.5
        )
    return weights


def _weights(vocabulary: int, sizes: Sizes) -> dict[str, torch.Tensor]:
    """Scaled so that greedy answers wander, and depend on the whole prompt."""
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int, scale: float = 1.4) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * scale * columns**-0.5

    weights = {
        "model.embed_tokens.weight": matrix(vocabulary, sizes.hidden, 2.0),
        "model.norm.weight": torch.ones(sizes.hidden),
        "lm_head.weight": matrix(vocabulary, sizes.hidden),
    }
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    for layer in range(sizes.layers):
        place = f"model.layers.{layer}"
        for name, rows, columns in (
            ("self_attn.q_proj", queries, sizes.hidden), ("self_attn.k_proj", keys, sizes.hidden),
            ("self_attn.v_proj", keys, sizes.hidden), ("self_attn.o_proj", sizes.hidden, queries),
            ("mlp.gate_proj", sizes.ffn, sizes.hidden), ("mlp.up_proj", sizes.ffn, sizes.hidden),
            ("mlp.down_proj", sizes.hidden, sizes.ffn),
        ):  # fmt: skip
            weights[f"{place}.{name}.weight"] = matrix(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{place}.{name}.weight"] = torch.ones(sizes.hidden)
    return weights
