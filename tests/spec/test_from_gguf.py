"""GGUF metadata to ModelSpec: the same models as config.json describes, as their converters write them."""

import dataclasses
from typing import Any

import pytest

from cumulo.errors import ModelError
from cumulo.spec.from_gguf import spec_from_gguf
from cumulo.spec.from_huggingface import spec_from_config
from cumulo.spec.model import ModelSpec
from tests.spec import published


def metadata(architecture: str, config: dict[str, Any], **extra: Any) -> dict[str, Any]:
    """What a converter writes for a configuration; `extra` uses __ for the dots in keys."""
    fields = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config.get("num_key_value_heads", config["num_attention_heads"]),
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(config.get("rope_theta", 10000.0)),
        "vocab_size": config["vocab_size"],
        **{key.replace("__", "."): value for key, value in extra.items()},
    }
    data = {"general.architecture": architecture, "general.file_type": 32}
    data |= {f"{architecture}.{key}": value for key, value in fields.items()}
    for name in ("bos", "eos"):
        if (token := config.get(f"{name}_token_id")) is not None:
            data[f"tokenizer.ggml.{name}_token_id"] = token
    return data


def from_config(config: dict[str, Any], **changes: Any) -> ModelSpec:
    return dataclasses.replace(spec_from_config(config), **changes)


UNTIED = ["token_embd.weight", "output.weight"]


def test_llama_files_rotate_neighbouring_pairs_and_are_otherwise_the_same_model() -> None:
    data = metadata("llama", published.LLAMA_2_7B, rope__dimension_count=128)
    assert spec_from_gguf(data, UNTIED) == from_config(
        published.LLAMA_2_7B, rope_interleaved=True, dtype="bfloat16"
    )


def test_rope_factors_become_the_scaling() -> None:
    config = {**published.LLAMA_31_8B, "eos_token_id": 128009}
    spec = spec_from_gguf(metadata("llama", config), UNTIED, rope_factors=[1.0] * 40 + [8.0] * 24)
    assert spec.rope_scaling is not None and spec.rope_scaling.kind == "factors"
    assert spec.rope_scaling.factors[39:41] == (1.0, 8.0)
    with pytest.raises(ModelError, match="3 rope factors for 64 frequencies"):
        spec_from_gguf(metadata("llama", config), UNTIED, rope_factors=[1.0] * 3)


def test_without_an_output_matrix_the_embedding_is_tied() -> None:
    data = metadata("llama", published.LLAMA_2_7B)
    assert spec_from_gguf(data, ["token_embd.weight"]).tied_embeddings
    assert not spec_from_gguf(data, UNTIED).tied_embeddings


def test_qwen_families() -> None:
    assert spec_from_gguf(metadata("qwen2", published.QWEN25_7B), UNTIED) == from_config(published.QWEN25_7B)
    tied = ["token_embd.weight"]
    data = metadata("qwen3", published.QWEN3_06B, attention__key_length=128, attention__value_length=128)
    assert spec_from_gguf(data, tied) == from_config(published.QWEN3_06B)
    data = metadata(
        "qwen3moe", published.QWEN3_30B_A3B, attention__key_length=128, attention__value_length=128,
        expert_count=128, expert_used_count=8, expert_feed_forward_length=768,
    )  # fmt: skip
    assert spec_from_gguf(data, UNTIED) == from_config(published.QWEN3_30B_A3B)


def test_mixtral_is_a_llama_file_with_experts() -> None:
    data = metadata("llama", published.MIXTRAL_8X7B, expert_count=8, expert_used_count=2)
    assert spec_from_gguf(data, UNTIED) == from_config(published.MIXTRAL_8X7B, rope_interleaved=True)


YARN = {
    "rope__scaling__type": "yarn", "rope__scaling__factor": 40.0,
    "rope__scaling__original_context_length": 4096, "rope__dimension_count": 64,
}  # fmt: skip


def test_deepseek_v2_files_of_the_older_layout() -> None:
    data = metadata(
        "deepseek2", published.DEEPSEEK_V2_LITE, **YARN, rope__scaling__yarn_log_multiplier=0.0707,
        attention__key_length=192, attention__value_length=128, attention__kv_lora_rank=512,
        expert_count=64, expert_used_count=6, expert_shared_count=2, expert_feed_forward_length=1408,
        leading_dense_block_count=1, expert_weights_scale=1.0,
    )  # fmt: skip
    spec = spec_from_gguf(data, UNTIED)
    expected = from_config(published.DEEPSEEK_V2_LITE)
    assert spec.rope_scaling is not None
    assert spec.rope_scaling.mscale_all_dim == pytest.approx(0.707)
    assert dataclasses.replace(spec, rope_scaling=None) == dataclasses.replace(expected, rope_scaling=None)


def test_deepseek_v3_files_of_the_layout_for_absorbed_attention() -> None:
    config = {**published.DEEPSEEK_V3, "num_key_value_heads": 1}
    data = metadata(
        "deepseek2", config, **YARN, rope__scaling__yarn_log_multiplier=0.1, attention__key_length=576,
        attention__value_length=512, attention__key_length_mla=192, attention__value_length_mla=128,
        attention__kv_lora_rank=512, attention__q_lora_rank=1536, expert_count=256, expert_used_count=8,
        expert_shared_count=1, expert_feed_forward_length=2048, leading_dense_block_count=3,
        expert_weights_scale=2.5, expert_weights_norm=True, expert_gating_func=2, expert_group_count=8,
        expert_group_used_count=4,
    )  # fmt: skip
    assert spec_from_gguf(data, [*UNTIED, "blk.3.exp_probs_b.bias"]) == from_config(published.DEEPSEEK_V3)


def test_end_tokens_of_turn_and_text_are_both_kept() -> None:
    data = metadata("llama", {**published.LLAMA_31_8B, "eos_token_id": 128001})
    data["tokenizer.ggml.eot_token_id"] = 128009
    assert spec_from_gguf(data).eos_token_ids == (128001, 128009)


def test_the_vocabulary_is_counted_when_its_size_is_not_written() -> None:
    data = metadata("llama", published.LLAMA_2_7B)
    del data["llama.vocab_size"]
    with pytest.raises(ModelError, match=r"llama\.vocab_size"):
        spec_from_gguf(data)
    assert spec_from_gguf({**data, "tokenizer.ggml.tokens": ["a"] * 77}).vocab_size == 77


def test_unknown_architectures_and_missing_fields_are_named() -> None:
    with pytest.raises(ModelError, match=r"'general.architecture'"):
        spec_from_gguf({})
    with pytest.raises(ModelError, match=r"'gemma'.*known: llama, qwen2, qwen3, qwen3moe, deepseek2"):
        spec_from_gguf({"general.architecture": "gemma"})
    data = metadata("llama", published.LLAMA_2_7B)
    optional = {"rope.freq_base", "attention.head_count_kv"}
    for key in [key for key in data if key.startswith("llama.")]:
        without = {other: value for other, value in data.items() if other != key}
        if key.removeprefix("llama.") in optional:
            spec_from_gguf(without)
        else:
            with pytest.raises(ModelError, match=key.replace(".", r"\.")):
                spec_from_gguf(without)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"llama.rope.scaling.type": "longrope"}, "unknown rope scaling 'longrope'"),
        ({"llama.rope.dimension_count": 64}, "rotates 64 of 128"),
        ({"llama.attention.head_count_kv": [8, 4]}, "differs between layers"),
        ({"llama.block_count": "many"}, "must be a whole number, got 'many'"),
        ({"llama.attention.head_count_kv": 0}, "kv_heads must be more than 0"),
    ],
)
def test_impossible_values_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        spec_from_gguf(metadata("llama", published.LLAMA_2_7B) | change)


@pytest.mark.parametrize(
    ("name", "harmless", "harmful"),
    [
        ("logit_scale", 1.0, 0.0625),
        ("embedding_scale", 1.0, 12.0),
        ("attention.causal", True, False),
        ("attn_logit_softcapping", 0.0, 50.0),
        ("rope.scaling.attn_factor", 1.0, 1.19),
    ],
)
def test_fields_that_change_the_numbers_are_not_overlooked(name: str, harmless: Any, harmful: Any) -> None:
    data = metadata("llama", published.LLAMA_2_7B)
    assert spec_from_gguf(data | {f"llama.{name}": harmless}) == spec_from_gguf(data)
    with pytest.raises(ModelError, match=f"'llama.{name}' {harmful}"):
        spec_from_gguf(data | {f"llama.{name}": harmful})
