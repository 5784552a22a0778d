"""The quantization_config of a written folder, in the words of the tool whose format it is."""

from collections.abc import Sequence
from typing import Any

from cumulo.quant.decide.matrices import ignored_patterns
from cumulo.quant.decide.recipe import FLOAT8_BLOCK, Recipe
from cumulo.spec.model import ModelSpec

Fields = dict[str, Any]


def quantization_config(recipe: Recipe, spec: ModelSpec, plain: Sequence[str]) -> Fields:
    """For a settled recipe. `plain`: full names of the modules that stay in 16 bits. Some readers of these lists
    look for a part of a module's name and others for all of it, so only whole names mean the same to all."""
    if recipe.format == "awq":
        return {
            "quant_method": "awq", "bits": recipe.bits, "group_size": recipe.group, "zero_point": True,
            "version": "gemm", "modules_to_not_convert": list(plain),
        }  # fmt: skip
    if recipe.format == "gptq":
        return {
            "quant_method": "gptq", "bits": recipe.bits, "group_size": recipe.group, "desc_act": False,
            "static_groups": recipe.act_order, "sym": recipe.symmetric, "lm_head": False,
            "damp_percent": recipe.damping, "true_sequential": True, "checkpoint_format": "gptq",
            "modules_to_not_convert": list(plain),
            "dynamic": {  # how GPTQModel, vLLM and SGLang are told what is left out
                f"-:{pattern.removeprefix('re:')}": {} for pattern in ignored_patterns(spec, recipe.layers)
            },
        }  # fmt: skip
    if recipe.format == "fp8":
        return {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [FLOAT8_BLOCK, FLOAT8_BLOCK],
            "modules_to_not_convert": list(plain),
        }  # fmt: skip
    storage = {"fp8": "float-quantized", "int8": "int-quantized"}.get(recipe.method, "pack-quantized")
    return {
        "quant_method": "compressed-tensors",
        "format": storage,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": _weights(recipe),
                "input_activations": _activations(recipe),
                "output_activations": None,
                "format": storage,
            }
        },
        "ignore": ignored_patterns(spec, recipe.layers),
        "kv_cache_scheme": None,
    }


def _weights(recipe: Recipe) -> Fields:
    fields: Fields = {
        "num_bits": recipe.bits,
        "type": "float" if recipe.method == "fp8" else "int",
        "symmetric": recipe.symmetric,
        "dynamic": False,
        "observer": "minmax",
    }
    if recipe.method == "fp8" and recipe.scheme == "block":
        return fields | {"strategy": "block", "block_structure": [FLOAT8_BLOCK, FLOAT8_BLOCK]}
    if recipe.method in ("fp8", "int8"):
        return fields | {"strategy": "channel" if recipe.method == "int8" else recipe.scheme}
    return fields | {
        "strategy": "group",
        "group_size": recipe.group,
        "actorder": "static" if recipe.method == "gptq" and recipe.act_order else None,
    }


def _activations(recipe: Recipe) -> Fields | None:
    if recipe.method == "int8":
        return {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    if recipe.method != "fp8":
        return None
    fields: Fields = {"num_bits": 8, "type": "float", "symmetric": True}
    if recipe.static_activations:
        return fields | {"strategy": "tensor", "dynamic": False}
    if recipe.scheme == "block":
        return fields | {"strategy": "group", "group_size": FLOAT8_BLOCK, "dynamic": True}
    return fields | {"strategy": "token" if recipe.scheme == "channel" else "tensor", "dynamic": True}
