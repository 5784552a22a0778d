"""AutoAWQ's GEMM format: matrices transposed, eight 4-bit codes of neighbouring outputs in a word, in the order its
GPU kernel unpacks them. Called by the loader and by `cumulo quantize --format awq`."""

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

BITS = 4
_ORDER = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # output that position i of a word holds
_BACK = _ORDER.argsort()


def stored_tensors(rows: int, columns: int, how: Quantisation) -> list[StoredTensor]:
    groups = columns // (how.group or columns)
    return [
        StoredTensor("qweight", ((columns, rows // 8),), ("I32",)),
        StoredTensor("qzeros", ((groups, rows // 8),), ("I32",)),
        StoredTensor("scales", ((groups, rows),), FLOATS),
    ]


def read(tensors: Mapping[str, Tensor], rows: int, columns: int, how: Quantisation) -> IntegerMatrix:
    return IntegerMatrix(
        _unpack(tensors["qweight"], rows).T.contiguous(),
        tensors["scales"].T.contiguous(),
        _unpack(tensors["qzeros"], rows).T.contiguous(),
        BITS,
    )


def write(matrix: IntegerMatrix) -> dict[str, Tensor]:
    return {
        "qweight": _pack(matrix.codes.T),
        "qzeros": _pack(matrix.zero.T),
        "scales": matrix.scale.T.to(torch.float16).contiguous(),
    }


def _pack(codes: Tensor) -> Tensor:
    return pack_words(codes.unflatten(-1, (-1, 8))[..., _ORDER].flatten(-2), BITS)


def _unpack(words: Tensor, rows: int) -> Tensor:
    codes: Tensor = unpack_words(words, BITS, rows).unflatten(-1, (-1, 8))
    return codes[..., _BACK].flatten(-2)
