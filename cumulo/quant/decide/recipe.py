"""Recipe: how a model is to be quantised, checked against the model before anything is read. Made by
`cumulo quantize` from its options, carried out by `cumulo.quant.play`.

The matrices of the layers are quantised. Embedding, head, norms, routers and the expansion of latent attention stay
in 16 bits, as other tools leave them. `quantization_config` is written in the words of the tool whose format it is.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from cumulo.errors import ConfigError
from cumulo.spec.model import ModelSpec


def row_lengths(spec: ModelSpec) -> list[int]:
    """How many inputs the quantised matrices have, each length once."""
    lengths = {spec.hidden}
    if spec.mla is None:
        lengths.add(spec.heads * spec.head_dim)
    else:
        lengths.add(spec.heads * spec.mla.value_head_dim)
        if spec.mla.q_rank is not None:
            lengths.add(spec.mla.q_rank)
    if spec.moe is None or spec.moe.dense_layers:
        lengths.add(spec.ffn_hidden)
    if spec.moe is not None:
        lengths |= {spec.moe.expert_hidden, *([spec.moe.shared_hidden] if spec.moe.shared_hidden else [])}
    return sorted(lengths)


def is_quantised(module: str) -> bool:
    """Whether the matrix of a module, such as model.layers.3.mlp.up_proj, is quantised."""
    return (
        module.startswith("model.layers.")
        and module.endswith("_proj") | module.endswith((".w1", ".w2", ".w3", "kv_a_proj_with_mqa"))
        and not module.endswith("kv_b_proj")
    )


def plain_modules(modules: Iterable[str], layers: int | None) -> list[str]:
    """Those of `modules` that stay in 16 bits, by their full names; a layer's routed experts have one name.
    `layers`: only the first so many are quantised."""
    plain = ["lm_head"]
    for module in modules:
        layer = re.match(r"model\.layers\.(\d+)\.", module)
        beyond = layer is not None and layers is not None and int(layer[1]) >= layers
        if beyond or not is_quantised(module):
            plain.append(re.sub(r"\.experts\.\d+\..*", ".experts", module))
    return list(dict.fromkeys(plain))


def ignored_patterns(spec: ModelSpec, layers: int | None) -> list[str]:
    """What a quantization_config lists as left out; `re:` marks a regular expression. `layers`: only the first so
    many are quantised."""
    patterns = ["lm_head"]
    if layers is not None and layers < spec.layers:
        patterns.append(f"re:.*layers\\.({'|'.join(map(str, range(layers, spec.layers)))})\\..*")
    if spec.moe is not None:
        patterns.append("re:.*(mlp|block_sparse_moe)\\.gate$")
    if spec.mla is not None:
        patterns.append("re:.*kv_b_proj$")
    return patterns


Method = Literal["rtn", "awq", "gptq", "int8", "fp8"]
FolderFormat = Literal["compressed-tensors", "awq", "gptq", "fp8"]
Float8Scheme = Literal["channel", "tensor", "block"]
METHODS = get_args(Method)
FORMATS = get_args(FolderFormat)
SCHEMES = get_args(Float8Scheme)
_LEAST_GROUP = 8
GROUPS = (128, 64, 32)  # tried in this order where no group is asked for
FLOAT8_BLOCK = 128
_BITS = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Recipe:
    """None: decided by `settled`."""

    method: Method = "gptq"
    bits: int = 4
    group: int | None = None  # columns that share a scale
    symmetric: bool | None = None
    act_order: bool = True  # GPTQ: columns that matter most are rounded first
    damping: float = 0.01  # GPTQ: of the mean diagonal of the Hessian
    scheme: Float8Scheme = "channel"  # fp8: what shares a scale
    # fp8: one scale for all activations of a matrix, from the calibration text.
    static_activations: bool = False
    format: FolderFormat | None = None
    layers: int | None = None  # only so many from the first; None: all

    @property
    def needs_calibration(self) -> bool:
        return self.method in ("awq", "gptq") or self.static_activations

    @property
    def in_words(self) -> str:
        if self.method == "fp8":
            return f"fp8, a scale per {'block of 128 x 128' if self.scheme == 'block' else self.scheme}"
        if self.method == "int8":
            return "int8, a scale per row, 8-bit activations"
        balance = "symmetric" if self.symmetric else "asymmetric"
        return f"{self.method}, {self.bits} bits, groups of {self.group}, {balance}"


def settled(recipe: Recipe, spec: ModelSpec) -> Recipe:
    """The recipe with everything decided that was left open, or a ConfigError that says what does not fit."""
    for name, value, known in (
        ("method", recipe.method, METHODS),
        ("format", recipe.format, (None, *FORMATS)),
        ("scheme", recipe.scheme, SCHEMES),
    ):
        if value not in known:
            choices = ", ".join(str(one) for one in known if one is not None)
            raise ConfigError(f"--{name} must be one of {choices}; got {value!r}")
    if recipe.layers is not None and not 1 <= recipe.layers <= spec.layers:
        raise ConfigError(f"--layers must be 1 to {spec.layers}, which the model has; got {recipe.layers}")
    if recipe.method == "fp8":
        return _settled_float8(recipe)
    if recipe.static_activations:
        raise ConfigError("--static-activations exists for --method fp8")
    if recipe.method == "int8":
        if recipe.format not in (None, "compressed-tensors"):
            raise ConfigError(f"--method int8 is written as compressed-tensors, not as {recipe.format}")
        return replace(recipe, bits=8, group=None, symmetric=True, format="compressed-tensors")
    if recipe.bits not in _BITS:
        raise ConfigError(f"--bits must be 2, 4 or 8 for {recipe.method}; got {recipe.bits}")
    if not 0 < recipe.damping <= 1:
        raise ConfigError(f"--damping must be more than 0 and at most 1, got {recipe.damping:g}")
    recipe = replace(recipe, group=_group(recipe.group, spec), format=recipe.format or "compressed-tensors")
    if recipe.symmetric is None:
        asymmetric = recipe.method == "awq" or recipe.format == "awq"
        recipe = replace(recipe, symmetric=not asymmetric)
    _check_format(recipe)
    return recipe


def _settled_float8(recipe: Recipe) -> Recipe:
    if recipe.format in ("awq", "gptq"):
        raise ConfigError(f"--format {recipe.format} holds whole numbers; use compressed-tensors or fp8")
    if recipe.format == "fp8" and recipe.scheme != "block":
        raise ConfigError("--format fp8 is DeepSeek's, which has blocks: add --scheme block")
    if recipe.scheme == "block" and recipe.static_activations:
        raise ConfigError("--scheme block goes with dynamic activations: omit --static-activations")
    return replace(recipe, bits=8, group=None, symmetric=True, format=recipe.format or "compressed-tensors")


def _check_format(recipe: Recipe) -> None:
    if recipe.format == "fp8":
        raise ConfigError(f"--format fp8 holds 8-bit floats, which {recipe.method} does not make")
    if recipe.format == "awq" and (recipe.bits != 4 or recipe.symmetric):
        raise ConfigError("--format awq holds 4-bit asymmetric weights; use --bits 4 --asymmetric")


def _group(asked: int | None, spec: ModelSpec) -> int:
    lengths = row_lengths(spec)
    fitting = [group for group in GROUPS if all(length % group == 0 for length in lengths)]
    common = math.gcd(*lengths)
    smaller = [group for group in range(_LEAST_GROUP, GROUPS[-1]) if common % group == 0]
    if asked is None:
        if fitting:
            return fitting[0]
        use = f"use --group {smaller[-1]}, or" if smaller else "use"
        raise ConfigError(
            f"this model's matrices have rows of {_listing(lengths)} weights, which groups of 128, 64 or 32 do not "
            f"divide; {use} --method int8 or fp8"
        )
    if asked < _LEAST_GROUP:
        raise ConfigError(f"--group must be {_LEAST_GROUP} or more, got {asked}")
    if common % asked:
        works = (
            f"; {_listing(fitting or smaller)} would" if fitting or smaller else "; use --method int8 or fp8"
        )
        raise ConfigError(
            f"--group {asked} does not divide this model's rows of {_listing(lengths)} weights{works}"
        )
    return asked


def _listing(numbers: list[int]) -> str:
    words = [f"{number:,}" for number in numbers]
    return " and ".join(words) if len(words) < 3 else f"{', '.join(words[:-1])} and {words[-1]}"


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
