"""IntegerMatrix and Float8Matrix: a quantised matrix as its file stores it, whatever the file's packing. Read by
the formats of this folder, made by the methods of `cumulo.quant`, turned into packed kernels by the loaders.

Both keep the file's own numbers: codes, scales and zero points, without rounding anything a second time.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cumulo.errors import ModelError
from cumulo.kernels.cpu.affine_blocks import AffineBlocks

FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    name: str  # behind the module's own: qweight, weight_scale
    shapes: tuple[tuple[int, ...], ...]  # of which it must have one
    dtypes: tuple[str, ...]
    required: bool = True


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """[..., n] uint8 to [..., n * bits / 32] int32, rounded up; what is missing of the last word is zero."""
    per_word = 32 // bits
    missing = -codes.shape[-1] % per_word
    if missing:
        codes = torch.nn.functional.pad(codes, (0, missing))
    grouped = codes.to(torch.int64).unflatten(-1, (-1, per_word))
    words: Tensor = (grouped << _shifts(bits)).sum(-1)
    return words.to(torch.int32)  # wraps into the sign bit


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes of each row of words, as uint8."""
    codes: Tensor = (words.to(torch.int64)[..., None] >> _shifts(bits)) & ((1 << bits) - 1)
    return codes.flatten(-2)[..., :count].to(torch.uint8)


def _shifts(bits: int) -> Tensor:
    return torch.arange(0, 32, bits, dtype=torch.int64)


_LEAST_PART = 32  # columns of a group: the smallest that kernels take


@dataclass(frozen=True, slots=True, eq=False)
class IntegerMatrix:
    """w[r, k] = scale[r, g] * (codes[r, k] - zero[r, g]), where g is the group of column k.

    Codes and zero points are unsigned, 0 .. 2**bits - 1; a symmetric matrix has the zero point 2**(bits - 1)
    everywhere. Groups are runs of columns of equal length, unless `group_of_column` says otherwise (act-order).
    """

    codes: Tensor  # [rows, columns] uint8
    scale: Tensor  # [rows, groups], of the file's own type
    zero: Tensor  # [rows, groups] uint8
    bits: int
    group_of_column: Tensor | None = None  # [columns] int64

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        if self.codes.dtype != torch.uint8 or self.scale.shape != self.zero.shape or len(self.scale) != rows:
            raise ValueError(
                f"codes {tuple(self.codes.shape)}, scales {tuple(self.scale.shape)}, zeros {tuple(self.zero.shape)}"
            )
        if columns % self.groups:
            raise ValueError(f"{columns} columns cannot have {self.groups} groups of one length")
        of_column = self.group_of_column
        if of_column is not None and not 0 <= int(of_column.min()) <= int(of_column.max()) < self.groups:
            raise ModelError(f"g_idx names a group outside 0..{self.groups - 1}; the file is damaged")

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def groups(self) -> int:
        return self.scale.shape[1]

    @property
    def group(self) -> int:
        return self.codes.shape[1] // self.groups

    @property
    def symmetric(self) -> bool:
        return bool((self.zero == 1 << (self.bits - 1)).all())

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        of_column = self.group_of_column
        if of_column is None:
            of_column = torch.arange(self.shape[1]) // self.group
        centred = self.codes.to(dtype) - self.zero.to(dtype)[:, of_column]
        return centred * self.scale.to(dtype)[:, of_column]

    def sliced(self, rows: slice, columns: slice) -> "IntegerMatrix":
        """A part of it, as one rank of several holds: any rows, and columns where a group begins, or a part of one
        that kernels take. The numbers are the same: parts of a group share its scale."""
        part = replace(self, codes=self.codes[rows], scale=self.scale[rows], zero=self.zero[rows])
        if columns.stop - columns.start == self.shape[1]:
            return part
        if self.group_of_column is not None:
            raise ModelError(
                "weights in act-order cannot be cut by columns, because their groups are spread over all ranks; "
                "use pp instead of tp, or a model that was quantized without desc_act"
            )
        if self.groups == 1:  # a scale per row
            return replace(part, codes=part.codes[:, columns])
        parts = math.gcd(self.group, columns.start, columns.stop)
        if parts < min(self.group, _LEAST_PART):
            raise ModelError(
                f"weights in groups of {self.group} columns cannot be cut at column "
                f"{columns.start if columns.start % self.group else columns.stop}; use a smaller tp, or pp"
            )
        places = torch.arange(columns.start, columns.stop, parts) // self.group
        return replace(
            part, codes=part.codes[:, columns], scale=part.scale[:, places], zero=part.zero[:, places]
        )

    def affine_blocks(self) -> AffineBlocks:
        """The form that the CPU's kernels take: columns so ordered that groups are runs."""
        codes, order, wide = self.codes, self._order(), self.bits > 4
        if order is not None:
            codes = codes[:, order]
        scale = self.scale.float()
        # Eight-bit codes are signed there: 128 less.
        minimum: Tensor | None = scale * (128 * wide - self.zero.float())
        if wide and self.symmetric:
            minimum = None
        stored = codes.bitwise_xor(128).view(torch.int8) if wide else codes
        return AffineBlocks(
            stored.contiguous().numpy(),
            scale.contiguous().numpy(),
            None if minimum is None else minimum.contiguous().numpy(),
            8 if wide else 4,
            self.group,
            None if order is None else order.numpy(),
        )

    def _order(self) -> Tensor | None:
        of_column = self.group_of_column
        if of_column is None or torch.equal(of_column, torch.arange(self.shape[1]) // self.group):
            return None
        counts = torch.bincount(of_column, minlength=self.groups)
        if len(counts) != self.groups or bool((counts != self.group).any()):
            raise ModelError("the groups of an act-order matrix do not all have the same number of columns")
        return of_column.argsort(stable=True)


@dataclass(frozen=True, slots=True, eq=False)
class Float8Matrix:
    """w[r, k] = scale[r // block_rows, k // block_columns] * codes[r, k], codes in float8 (e4m3).

    A scale per row is a block of one row and all columns, a scale per matrix a block of everything.
    """

    codes: Tensor  # [rows, columns] float8_e4m3fn
    scale: Tensor  # [rows / block rows, columns / block columns] float32, rounded up
    block: tuple[int, int]
    input_scale: Tensor | None = None  # of all activations, where they are static

    def __post_init__(self) -> None:
        wanted = tuple(-(-size // step) for size, step in zip(self.codes.shape, self.block, strict=True))
        if tuple(self.scale.shape) != wanted:
            raise ValueError(f"{tuple(self.scale.shape)} scales for {wanted} blocks")

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def row_scales(self) -> Tensor:
        """[rows, columns / block columns]: each row's own."""
        return self.scale.float().repeat_interleave(self.block[0], 0)[: self.shape[0]]

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        scale = self.row_scales().to(dtype).repeat_interleave(self.block[1], 1)[:, : self.shape[1]]
        return self.codes.to(dtype) * scale

    def sliced(self, rows: slice, columns: slice) -> "Float8Matrix":
        """A part of it: any rows, and columns that begin between blocks (or all share one scale)."""
        width = self.block[1]
        scale = self.row_scales()[rows]
        codes = self.codes[rows, columns]
        if scale.shape[1] == 1:
            return Float8Matrix(codes, scale, (1, codes.shape[1]), self.input_scale)
        if columns.start % width:
            raise ModelError(
                f"fp8 weights in blocks of {width} columns cannot be cut at column {columns.start}; use a smaller "
                "tp, or pp"
            )
        blocks = slice(columns.start // width, -(-columns.stop // width))
        return Float8Matrix(codes, scale[:, blocks], (1, width), self.input_scale)


QuantisedMatrix = IntegerMatrix | Float8Matrix
