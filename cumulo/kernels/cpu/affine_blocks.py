"""AffineBlocks: a quantised matrix exactly as its file stores it, whatever the file format. Made by the readers of
GGUF, AWQ, GPTQ and compressed-tensors files, consumed by `PackedWeight`.

All these formats are affine: a weight is `scale * code + minimum`, where scale and minimum belong to a group of
consecutive columns of one row. Keeping codes, scales and minima apart keeps the file's own weights exactly;
nothing is quantised a second time.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class AffineBlocks:
    """A [rows, columns] matrix: w[r, k] = scale[r, k // group] * codes[r, k] + minimum[r, k // group].

    Four-bit codes are unsigned (0..15, uint8); eight-bit codes are signed (-128..127, int8). With `order` the
    columns are stored in another order, so that groups are neighbours (GPTQ's act-order): column k of the codes
    is column order[k] of the matrix.
    """

    codes: np.ndarray  # [rows, columns] uint8 (bits 4) or int8 (bits 8)
    scale: np.ndarray  # [rows, columns / group] float32
    minimum: np.ndarray | None  # [rows, columns / group] float32; None: zero everywhere
    bits: int  # 4 or 8
    group: int
    order: np.ndarray | None = None  # [columns] int64, a permutation

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        if self.bits not in (4, 8) or self.group < 1:
            raise ValueError(f"bits {self.bits}, group {self.group}: expected bits 4 or 8, group 1 or more")
        if self.codes.dtype != (np.uint8 if self.bits == 4 else np.int8):
            raise ValueError(f"{self.bits}-bit codes have dtype {self.codes.dtype}")
        if columns % self.group:
            raise ValueError(f"{columns} columns are not a multiple of the group size {self.group}")
        for name in ("scale", "minimum"):
            array = getattr(self, name)
            if array is not None and (
                array.dtype != np.float32 or array.shape != (rows, columns // self.group)
            ):
                raise ValueError(
                    f"{name} is {array.dtype} {array.shape}, expected float32 {(rows, columns // self.group)}"
                )
        if self.order is not None and not np.array_equal(np.sort(self.order), np.arange(columns)):
            raise ValueError(f"the order of columns is no permutation of 0..{columns - 1}")

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self) -> np.ndarray:
        """The float32 matrix, computed as the reference readers do: one multiplication, one addition."""
        rows, columns = self.shape
        blocks = self.codes.reshape(rows, columns // self.group, self.group).astype(np.float32)
        blocks *= self.scale[:, :, None]
        if self.minimum is not None:
            blocks += self.minimum[:, :, None]
        found = blocks.reshape(rows, columns)
        if self.order is None:
            return found
        matrix = np.empty_like(found)
        matrix[:, self.order] = found
        return matrix

    def take_rows(self, indices: np.ndarray | slice) -> "AffineBlocks":
        """The matrix with rows chosen or reordered (GGUF permutes the rows of Llama's q and k)."""
        minimum = None if self.minimum is None else self.minimum[indices]
        return AffineBlocks(
            self.codes[indices], self.scale[indices], minimum, self.bits, self.group, self.order
        )

    def take_columns(self, columns: slice) -> "AffineBlocks":
        """The matrix with a run of its columns, which begins and ends between groups."""
        if self.order is not None or columns.start % self.group or columns.stop % self.group:
            raise ValueError(
                f"columns {columns.start} to {columns.stop} are not whole groups of {self.group}"
            )
        groups = slice(columns.start // self.group, columns.stop // self.group)
        minimum = None if self.minimum is None else np.ascontiguousarray(self.minimum[:, groups])
        codes = np.ascontiguousarray(self.codes[:, columns])
        scale = np.ascontiguousarray(self.scale[:, groups])
        return AffineBlocks(codes, scale, minimum, self.bits, self.group)
