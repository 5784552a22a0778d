"""The format of AutoGPTQ and GPTQModel: matrices transposed, codes of neighbouring inputs in a word, and the group
of every input in `g_idx`. Called by the loader and by `cumulo quantize --format gptq`."""

from collections.abc import Mapping

import torch
from torch import Tensor

from cumulo.models.files.quantised.matrices import (
    FLOATS,
    IntegerMatrix,
    StoredTensor,
    pack_words,
    unpack_words,
)
from cumulo.spec.quantisation import Quantisation


def stored_tensors(rows: int, columns: int, how: Quantisation) -> list[StoredTensor]:
    groups, per_word = -(-columns // (how.group or columns)), 32 // how.bits
    return [
        StoredTensor("qweight", ((columns // per_word, rows),), ("I32",)),
        StoredTensor("qzeros", ((groups, rows // per_word),), ("I32",)),
        StoredTensor("scales", ((groups, rows),), FLOATS),
        StoredTensor("g_idx", ((columns,),), ("I32", "I64"), required=how.act_order),
    ]


def read(tensors: Mapping[str, Tensor], rows: int, columns: int, how: Quantisation) -> IntegerMatrix:
    scale, bits = tensors["scales"].T.contiguous(), how.bits
    zero = unpack_words(tensors["qzeros"], bits, rows).T.contiguous()
    if how.stores_zero_minus_one:
        zero = (zero + 1) & ((1 << bits) - 1)
    of_column = tensors.get("g_idx")
    if of_column is not None:
        of_column = of_column.to(torch.int64)
    codes = unpack_words(tensors["qweight"].T, bits, columns)
    return IntegerMatrix(codes.contiguous(), scale, zero, bits, of_column)


def write(matrix: IntegerMatrix) -> dict[str, Tensor]:
    """In the first format, which every reader knows: zero points are stored one too small."""
    of_column = matrix.group_of_column
    if of_column is None:
        of_column = torch.arange(matrix.shape[1]) // matrix.group
    stored_zero = (matrix.zero - 1) & ((1 << matrix.bits) - 1)
    return {
        "qweight": pack_words(matrix.codes, matrix.bits).T.contiguous(),
        "qzeros": pack_words(stored_zero.T.contiguous(), matrix.bits),
        "scales": matrix.scale.T.to(torch.float16).contiguous(),
        "g_idx": of_column.to(torch.int32),
    }
