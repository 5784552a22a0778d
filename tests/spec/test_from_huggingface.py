"""config.json to ModelSpec: published models, both spellings of the rotary fields, and named errors."""

import subprocess
import sys
from typing import Any

import pytest

from cumulo.errors import ModelError
from cumulo.spec.from_huggingface import spec_from_config
from cumulo.spec.model import MLASpec, MoESpec, RopeScaling
from tests.spec import published


def test_llama_31_has_its_rope_scaling_and_three_end_tokens() -> None:
    spec = spec_from_config(published.LLAMA_31_8B)
    assert (spec.layers, spec.heads, spec.kv_heads, spec.head_dim) == (32, 32, 8, 128)
    assert spec.rope_scaling == RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    assert spec.eos_token_ids == (128001, 128008, 128009)
    assert (spec.dtype, spec.rope_theta) == ("bfloat16", 500000.0)


def test_llama_2_without_newer_fields_gets_their_defaults() -> None:
    spec = spec_from_config(published.LLAMA_2_7B)
    assert (spec.kv_heads, spec.rope_theta, spec.rope_scaling, spec.qkv_bias) == (32, 10000.0, None, False)


def test_mistral_windows_all_layers_and_a_null_switches_the_window_off() -> None:
    assert spec_from_config(published.MISTRAL_7B).window_of_layer(31) == 4096
    assert spec_from_config({**published.MISTRAL_7B, "sliding_window": None}).sliding_window is None


def test_qwen2_windows_only_the_layers_it_says_and_only_when_switched_on() -> None:
    assert spec_from_config(published.QWEN25_7B).sliding_window is None
    on = {**published.QWEN25_7B, "use_sliding_window": True, "max_window_layers": 21}
    spec = spec_from_config(on)
    assert [layer for layer in range(28) if spec.window_of_layer(layer)] == list(range(21, 28))
    by_type = {**on, "layer_types": ["sliding_attention", "full_attention"] * 14}
    assert spec_from_config(by_type).windowed_layers == tuple(range(0, 28, 2))
    assert spec_from_config({**on, "max_window_layers": 28}).sliding_window is None


def test_mixture_of_experts_families() -> None:
    assert spec_from_config(published.MIXTRAL_8X7B).moe == MoESpec(8, 2, 14336)
    qwen = spec_from_config({**published.QWEN3_30B_A3B, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert qwen.moe is not None and qwen.moe.dense_layers == tuple(sorted({*range(0, 48, 2), 3}))
    deepseek = spec_from_config(published.DEEPSEEK_V3)
    assert deepseek.mla == MLASpec(1536, 512, 128, 64, 128)
    assert deepseek.moe == MoESpec(
        256, 8, 2048, 2048, "sigmoid", True, 2.5, 8, 4, "top2sum", True, dense_layers=(0, 1, 2)
    )
    assert (deepseek.kv_key_dim, deepseek.kv_value_dim, deepseek.rope_dim) == (576, 0, 64)


def test_an_absent_field_has_the_default_of_its_family() -> None:
    config = {key: value for key, value in published.DEEPSEEK_V3.items() if key != "routed_scaling_factor"}
    moe = spec_from_config(config).moe
    assert moe is not None and moe.routed_scale == 2.5  # of DeepSeek-V2 it is 1
    ernie = {**published.LLAMA_2_7B, "model_type": "ernie4_5", "head_dim": 128, "num_key_value_heads": 4}
    spec = spec_from_config(
        {key: value for key, value in ernie.items() if not key.startswith(("rope", "tie"))}
    )
    assert (spec.rope_theta, spec.tied_embeddings, spec.rope_interleaved) == (500_000.0, True, True)


@pytest.mark.parametrize("name", published.ALL)
def test_the_rotary_fields_of_transformers_5_mean_the_same(name: str) -> None:
    old = published.ALL[name]
    new = {key: value for key, value in old.items() if key not in ("rope_theta", "rope_scaling")}
    scaling = dict(old.get("rope_scaling") or {"rope_type": "default"})
    new["rope_parameters"] = {"rope_theta": old.get("rope_theta", 10000.0), **scaling}
    new["dtype"] = new.pop("torch_dtype")
    assert spec_from_config(new) == spec_from_config(old)


def test_an_unknown_architecture_is_named_with_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"'mamba'.*known: llama, mistral, .*deepseek_v3"):
        spec_from_config({"model_type": "mamba"})
    with pytest.raises(ModelError, match="no 'model_type'"):
        spec_from_config({})
    with pytest.raises(ModelError, match="table of fields, got list"):
        spec_from_config([])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", published.ALL)
def test_every_missing_field_is_either_optional_or_named(name: str) -> None:
    config = published.ALL[name]
    needed = set()
    for field in config:
        try:
            spec_from_config({key: value for key, value in config.items() if key != field})
        except ModelError as error:
            assert repr(field) in str(error) or field == "model_type"
            needed.add(field)
    assert needed >= {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps"}
    assert not needed & {"bos_token_id", "eos_token_id", "rope_theta", "rope_scaling", "torch_dtype"}


@pytest.mark.parametrize(
    ("base", "change", "words"),
    [
        ("llama_31_8b", {"rope_scaling": {"rope_type": "longrope"}}, "'longrope'.*known: default"),
        ("llama_31_8b", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks.*'low_freq_factor'"),
        ("llama_31_8b", {"rope_scaling": {"rope_type": "linear"}}, "lacks the field 'factor'"),
        ("llama_31_8b", {"partial_rotary_factor": 0.5}, "rotates only 0.5"),
        ("llama_31_8b", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("llama_31_8b", {"num_key_value_heads": 5}, "32 heads cannot share 5"),
        ("llama_31_8b", {"vocab_size": 0}, "vocab_size must be more than 0"),
        ("llama_31_8b", {"hidden_size": "big"}, "hidden_size must be a whole number, got 'big'"),
        ("llama_31_8b", {"quantization_config": {"quant_method": "hqq"}}, "quantized with 'hqq'"),
        ("mixtral_8x7b", {"num_experts_per_tok": 9}, "9 experts per token cannot be chosen from 8"),
        ("deepseek_v3", {"n_group": 7}, "256 experts cannot form 7 equal groups"),
        ("deepseek_v2_lite", {"topk_method": "noaux_tc"}, "routing 'noaux_tc'"),
        ("llama_31_8b", {"eos_token_id": 1.5}, "field of the wrong kind"),
        ("llama_31_8b", {"rope_scaling": "llama3"}, "field of the wrong kind"),
        ("mistral_7b", {"sliding_window": "wide"}, "sliding_window must be a whole number, got 'wide'"),
        ("deepseek_v3", {"kv_lora_rank": 511}, "even kv_rank"),
        (
            "llama_2_7b",
            {"model_type": "phi3", "rope_scaling": {"type": "yarn", "factor": 2.0}},
            "'yarn' of a 'phi3'",
        ),
        (
            "llama_31_8b",
            {"model_type": "cwm", "head_dim": 128, "rope_scaling": None},
            "lacks.*'rope_parameters'",
        ),
        (
            "llama_31_8b",
            {"model_type": "ministral", "layer_types": ["chunked_attention"] * 32},
            "'chunked_attention'",
        ),
        (
            "llama_31_8b",
            {"model_type": "ministral", "layer_types": ["full_attention"]},
            "lists 1 layers.* has 32",
        ),
        ("deepseek_v3", {"model_type": "glm4_moe_lite", "mlp_layer_types": ["odd"]}, "'dense' or 'sparse'"),
        ("llama_31_8b", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
    ],
)
def test_impossible_or_unknown_values_are_refused_with_their_name(
    base: str, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        spec_from_config({**published.ALL[base], **change})


def test_specs_import_no_torch() -> None:
    modules = "check, counting, from_gguf, from_huggingface, model, model_file"
    code = f"import sys; from cumulo.spec import {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
