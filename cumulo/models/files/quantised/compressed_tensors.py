"""The formats of compressed-tensors (llm-compressor): codes in words along the inputs (pack-quantized), or as int8
or float8 (int-quantized, float-quantized), with a scale per matrix, row, group or block. DeepSeek's fp8 is the
last of these under another name of its scale. Called by the loader and by `cumulo quantize`."""

from collections.abc import Mapping

import torch
from torch import Tensor

from cumulo.models.files.quantised.matrices import (
    FLOATS,
    Float8Matrix,
    IntegerMatrix,
    StoredTensor,
    pack_words,
    unpack_words,
)
from cumulo.spec.quantisation import Quantisation


def stored_tensors(rows: int, columns: int, how: Quantisation) -> list[StoredTensor]:
    """What a quantised module holds in place of `weight`, or next to it."""
    if how.format == "pack-quantized":
        groups, bits = _groups(columns, how), how.bits
        return [
            StoredTensor("weight_packed", ((rows, -(-columns * bits // 32)),), ("I32",)),
            StoredTensor("weight_scale", ((rows, groups),), FLOATS),
            StoredTensor("weight_shape", ((2,),), ("I64", "I32"), required=False),
            StoredTensor(
                "weight_zero_point", ((-(-rows * bits // 32), groups),), ("I32",), required=not how.symmetric
            ),
            StoredTensor("weight_g_idx", ((columns,),), ("I32", "I64"), required=how.act_order),
        ]
    scale = "weight_scale_inv" if how.format == "fp8" and how.scheme == "block" else "weight_scale"
    codes = ("I8",) if how.format == "int-quantized" else ("F8_E4M3",)
    has_zero = how.format == "int-quantized" and not how.symmetric
    return [
        StoredTensor("weight", ((rows, columns),), codes),
        StoredTensor(scale, _scale_shapes(rows, columns, how), FLOATS),
        StoredTensor("input_scale", ((), (1,)), FLOATS, required=False),
        # Activations are not rounded as the file says, so where their zero lies changes nothing.
        StoredTensor("input_zero_point", ((), (1,)), ("I8", "F8_E4M3"), required=False),
        StoredTensor("weight_zero_point", _scale_shapes(rows, columns, how), ("I8",), required=has_zero),
    ]


def _groups(columns: int, how: Quantisation) -> int:
    return columns // how.group if how.group else 1


def _scale_shapes(rows: int, columns: int, how: Quantisation) -> tuple[tuple[int, ...], ...]:
    if how.scheme == "tensor":
        return ((), (1,), (1, 1))
    if how.scheme == "block":
        assert how.block is not None
        return ((-(-rows // how.block[0]), -(-columns // how.block[1])),)
    if how.scheme == "group":
        return ((rows, _groups(columns, how)),)
    return ((rows, 1), (rows,))


def read(
    tensors: Mapping[str, Tensor], rows: int, columns: int, how: Quantisation
) -> IntegerMatrix | Float8Matrix:
    if how.format == "pack-quantized":
        codes = unpack_words(tensors["weight_packed"], how.bits, columns)
        zero = tensors.get("weight_zero_point")
        of_column = tensors.get("weight_g_idx")
        if of_column is not None and bool((of_column < 0).any()):
            of_column = None  # how "no order" is written
        return _integers(
            codes,
            tensors["weight_scale"],
            None if zero is None else unpack_words(zero.T, how.bits, rows).T,
            how.bits,
            None if of_column is None else of_column.to(torch.int64),
        )
    if how.format == "int-quantized":
        zero = tensors.get("weight_zero_point")
        return _integers(
            tensors["weight"].view(torch.uint8) ^ 128,
            _per_row(tensors["weight_scale"], rows),
            None if zero is None else _per_row(zero, rows).contiguous().view(torch.uint8) ^ 128,
            8,
        )
    scale = tensors["weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"].float()
    if how.scheme == "block":
        assert how.block is not None
        block = how.block
    elif how.group is not None:
        block = (1, how.group)
    else:
        scale = scale.reshape(-1, 1)
        block = (rows if len(scale) == 1 else 1, columns)
    return Float8Matrix(tensors["weight"], scale, block, tensors.get("input_scale"))


def _per_row(values: Tensor, rows: int) -> Tensor:
    return values.reshape(1, 1).expand(rows, 1) if values.numel() == 1 else values.reshape(rows, -1)


def _integers(
    codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int, of_column: Tensor | None = None
) -> IntegerMatrix:
    if zero is None:
        zero = torch.full(scale.shape, 1 << (bits - 1), dtype=torch.uint8)
    return IntegerMatrix(codes, scale.contiguous(), zero.contiguous(), bits, of_column)


def write_packed(matrix: IntegerMatrix, symmetric: bool) -> dict[str, Tensor]:
    """pack-quantized; zero points unless the configuration says that all matrices are symmetric."""
    tensors = {
        "weight_packed": pack_words(matrix.codes, matrix.bits),
        "weight_scale": matrix.scale.contiguous(),
        "weight_shape": torch.tensor(matrix.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = pack_words(matrix.zero.T.contiguous(), matrix.bits).T.contiguous()
    return tensors


def write_int8(matrix: IntegerMatrix) -> dict[str, Tensor]:
    """int-quantized: codes as signed bytes, a scale per row."""
    return {
        "weight": (matrix.codes ^ 128).view(torch.int8).contiguous(),
        "weight_scale": matrix.scale.contiguous(),
    }


def write_float8(matrix: Float8Matrix, per_matrix: bool, deepseek: bool = False) -> dict[str, Tensor]:
    """float-quantized, or as DeepSeek's checkpoints. `per_matrix`: there is one scale, of all weights."""
    tensors = {
        "weight": matrix.codes.contiguous(),
        ("weight_scale_inv" if deepseek else "weight_scale"): matrix.scale.reshape(1)
        if per_matrix
        else matrix.scale.contiguous(),
    }
    if matrix.input_scale is not None:
        tensors["input_scale"] = matrix.input_scale.reshape(1).float()
    return tensors
