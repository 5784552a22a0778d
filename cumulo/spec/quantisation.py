"""Quantisation: how the matrices of a checkpoint are stored, from the `quantization_config` of its config.json.
Read by the loaders of quantised folders.

Four writers are known: AutoAWQ, GPTQ (AutoGPTQ and GPTQModel), compressed-tensors (llm-compressor) and the 8-bit
floating point of DeepSeek-V3. What a file's tensors say themselves (bits, group, which matrices) is read from them;
the configuration decides how they are to be understood.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cumulo.errors import ModelError

StorageFormat = Literal["awq", "gptq", "pack-quantized", "int-quantized", "float-quantized", "fp8"]
Scheme = Literal["tensor", "channel", "group", "block"]
GPTQ_BITS = (2, 4, 8)
METHODS = ("awq", "gptq", "compressed-tensors", "fp8")
_FORMATS: dict[str, StorageFormat] = {
    "pack-quantized": "pack-quantized",
    "int-quantized": "int-quantized",
    "float-quantized": "float-quantized",
    "naive-quantized": "int-quantized",
}


@dataclass(frozen=True, slots=True)
class Quantisation:
    """`stores_zero_minus_one`: the first GPTQ format keeps zero points one too small."""

    format: StorageFormat
    bits: int
    scheme: Scheme
    group: int | None = None  # columns that share a scale, where the configuration says it
    block: tuple[int, int] | None = None  # rows and columns that share one
    stores_zero_minus_one: bool = False
    act_order: bool = False  # the file must say of every column which group it belongs to
    symmetric: bool = False  # all zero points are in the middle, whether the file has them or not
    activation_bits: int = 16
    static_activations: bool = False  # their scales are in the file

    @property
    def in_words(self) -> str:
        """For tables: 'gptq, 4 bits, groups of 128'."""
        kind = "fp8" if self.format in ("fp8", "float-quantized") else f"{self.bits} bits"
        shared = {
            "group": f"groups of {self.group}",
            "channel": "a scale per row",
            "tensor": "a scale per matrix",
            "block": f"blocks of {self.block[0]} x {self.block[1]}" if self.block else "blocks",
        }[self.scheme]
        activations = f", {self.activation_bits}-bit activations" if self.activation_bits < 16 else ""
        return f"{self.format}, {kind}, {shared}{activations}"


def quantisation_from_config(config: Mapping[str, Any]) -> Quantisation | None:
    """What config.json says about stored weights; None: they are plain. Unknown ways are refused by name."""
    table = config.get("quantization_config") or config.get("compression_config")
    if not table:
        return None
    if not isinstance(table, Mapping):
        raise ModelError(
            f"config.json: quantization_config must be a table of fields, got {type(table).__name__}"
        )
    method = table.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise ModelError(
            f"the weights are quantized with {method!r}, which is not supported; known: {', '.join(METHODS)}. "
            "Use the original model or a GGUF file"
        )
    read = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed_tensors, "fp8": _fp8}[method]
    return read(table)


def _whole(table: Mapping[str, Any], name: str, what: str) -> int:
    value = table.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelError(
            f"config.json: {name} of the {what} quantization must be a whole number, got {value!r}"
        )
    return value


def _grouped(group: int, what: str) -> tuple[Scheme, int | None]:
    if group == -1:
        return "channel", None
    if not 1 <= group <= 1 << 20:
        raise ModelError(
            f"config.json: group_size of the {what} quantization is {group}; it must be -1 or more than 0"
        )
    return "group", group


def _awq(table: Mapping[str, Any]) -> Quantisation:
    bits, version = _whole(table, "bits", "awq"), str(table.get("version", "gemm")).lower()
    if version != "gemm" or bits != 4:
        raise ModelError(
            f"the AWQ weights are stored as {version!r} with {bits} bits; only version 'gemm' with 4 bits is "
            "supported"
        )
    if table.get("zero_point") is False:
        raise ModelError(
            "the AWQ weights have no zero points; only files with zero_point: true are supported"
        )
    scheme, group = _grouped(_whole(table, "group_size", "awq"), "awq")
    return Quantisation("awq", bits, scheme, group)


def _gptq(table: Mapping[str, Any]) -> Quantisation:
    bits = _whole(table, "bits", "gptq")
    if bits not in GPTQ_BITS:
        raise ModelError(f"the GPTQ weights have {bits} bits; supported are 2, 4 and 8")
    version = table.get("checkpoint_format") or table.get("format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise ModelError(f"the GPTQ weights are stored as {version!r}; known: gptq, gptq_v2")
    scheme, group = _grouped(_whole(table, "group_size", "gptq"), "gptq")
    return Quantisation(
        "gptq",
        bits,
        scheme,
        group,
        stores_zero_minus_one=version == "gptq",
        act_order=table.get("desc_act") is True and group is not None,
        symmetric=table.get("sym") is True,
    )


def _fp8(table: Mapping[str, Any]) -> Quantisation:
    block = table.get("weight_block_size")
    static = table.get("activation_scheme") == "static"
    if block is None:
        return Quantisation("fp8", 8, "tensor", activation_bits=8, static_activations=static)
    return Quantisation("fp8", 8, "block", block=_block(block), activation_bits=8, static_activations=static)


def _block(value: Any) -> tuple[int, int]:
    if (
        not isinstance(value, (list, tuple))
        or len(value) != 2
        or not all(type(size) is int and 1 <= size <= 1 << 20 for size in value)
    ):
        raise ModelError(
            f"config.json: a block of fp8 weights has two sizes, such as [128, 128]; got {value!r}"
        )
    return value[0], value[1]


def _compressed_tensors(table: Mapping[str, Any]) -> Quantisation:
    groups = table.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ModelError("config.json: the compressed-tensors quantization has no config_groups")
    _refuse_online_transforms(table.get("transform_config"))
    found = {_compressed_group(table, group) for group in groups.values()}
    if len(found) > 1:
        listing = " and ".join(sorted(one.in_words for one in found))
        raise ModelError(f"the weights mix {listing}; one scheme for all matrices is supported")
    return found.pop()


def _refuse_online_transforms(table: Any) -> None:
    """Rotations of weights are in the weights. Those of activations (SpinQuant, QuIP) must be computed while
    serving, and without them the weights are nonsense."""
    schemes = table.get("config_groups") if isinstance(table, Mapping) else None
    for scheme in schemes.values() if isinstance(schemes, Mapping) else ():
        applied = scheme.get("apply") if isinstance(scheme, Mapping) else None
        for one in applied if isinstance(applied, list) else ():
            location = one.get("location") if isinstance(one, Mapping) else one
            if location not in ("weight_input", "weight_output"):
                raise ModelError(
                    f"the weights expect activations that are rotated (transform_config, location {location!r}), "
                    "which is not supported; use a model that was quantized without online transforms"
                )


def _compressed_group(table: Mapping[str, Any], group: Any) -> Quantisation:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise ModelError("config.json: a compressed-tensors group says nothing about its weights")
    name = group.get("format") or table.get("format")
    kind, bits = weights.get("type", "int"), _whole(weights, "num_bits", "compressed-tensors")
    if not isinstance(name, str) or name not in _FORMATS or kind not in ("int", "float"):
        raise ModelError(
            f"the weights are stored as compressed-tensors {name!r}; known: {', '.join(_FORMATS)}"
        )
    if (kind == "float" and bits != 8) or (kind == "int" and bits not in GPTQ_BITS):
        raise ModelError(
            f"the weights are {kind} numbers of {bits} bits; supported are int 2, 4, 8 and float 8"
        )
    storage: StorageFormat = _FORMATS[name]
    if storage != "pack-quantized":
        storage = "float-quantized" if kind == "float" else "int-quantized"
    if (kind == "float" and (storage == "pack-quantized" or weights.get("symmetric") is False)) or (
        kind == "int" and weights.get("strategy") == "block"
    ):
        raise ModelError(
            f"the weights are {kind} numbers stored as {storage} with scales by {weights.get('strategy')!r} and "
            f"symmetric={weights.get('symmetric')}, which is not supported"
        )
    activations = group.get("input_activations")
    activations = activations if isinstance(activations, Mapping) else {}
    strategy: Any = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    if strategy not in ("tensor", "channel", "group", "block"):
        raise ModelError(f"the weights share scales by {strategy!r}; known: tensor, channel, group, block")
    scheme, size = strategy, None
    if strategy == "group":
        scheme, size = _grouped(_whole(weights, "group_size", "compressed-tensors"), "compressed-tensors")
    return Quantisation(
        storage,
        bits,
        scheme,
        size,
        _block(weights.get("block_structure")) if strategy == "block" else None,
        act_order=size is not None and weights.get("actorder") == "group",
        symmetric=weights.get("symmetric") is not False,
        activation_bits=_whole(activations, "num_bits", "compressed-tensors") if activations else 16,
        static_activations=bool(activations) and activations.get("dynamic") is False,
    )
