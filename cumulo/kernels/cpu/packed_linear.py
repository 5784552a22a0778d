"""PackedWeight: a quantised matrix laid out for the dot instruction, and y = x Wᵀ with it. Used by decoders.

Must move: rows * columns * bits / 8 bytes of codes plus 2-4 bytes per scale and minimum, once per call; and
compute rows * columns multiply-adds per token: 16-bit activations take two int8 products each, 8-bit one.

The weights are the file's own, exactly. Only activations are rounded, per 32 columns and token: to 16 bits by
default, because 8 are not enough to keep a greedy answer whose margin is a tenth of a logit (measured on a
135M model, the standard deviation of a logit's error is 0.14 with 8 bits everywhere, 0.001 with 16).
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cumulo.kernels.cpu.affine_blocks import AffineBlocks
from cumulo.kernels.cpu.library import (
    LINEAR,
    MAX_PARTS,
    QUANTIZE,
    NativeLibrary,
    OpStruct,
    PackedPartStruct,
    QuantizedRowsStruct,
    StepStruct,
    native,
)
from cumulo.kernels.packed import Packed

GROUP = 32  # columns that share an activation scale
SMALL_WORK = 200_000  # multiply-adds below which a second thread costs more than it brings


class QuantizedBuffer:
    """Room for the quantised form of up to `rows` activations rows of `columns`."""

    def __init__(self, library: NativeLibrary, rows: int, columns: int, activation_bits: int) -> None:
        groups = -(-columns // GROUP)
        wide = activation_bits == 16
        self.codes = torch.empty(rows * groups * (GROUP << wide), dtype=torch.int8)
        self.notes = torch.empty(rows * groups * library.notes, dtype=torch.float32)
        self.struct = QuantizedRowsStruct(self.codes.data_ptr(), self.notes.data_ptr(), groups, int(wide))


class PackedWeight:
    """[rows, columns]: parts stacked along the rows, each with its own bit width and group size."""

    def __init__(
        self, parts: list[AffineBlocks], activation_bits: int, library: NativeLibrary | None
    ) -> None:
        self.shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
        self.activation_bits = activation_bits
        self.library = library
        order = parts[0].order
        self.order = None if order is None else torch.from_numpy(order)
        self._blocks: list[AffineBlocks] | None = None
        if library is None:
            self._blocks = parts
            self.nbytes = sum(
                part.codes.nbytes + part.scale.nbytes + (0 if part.minimum is None else part.minimum.nbytes)
                for part in parts
            )
            return
        # Native layout only: the unpacked form is dropped, or a model would be in memory twice.
        self._arrays: list[np.ndarray] = []
        self.structs = (PackedPartStruct * len(parts))()
        for index, part in enumerate(parts):
            array, self.structs[index] = _pack_part(part, library)
            self._arrays.append(array)
        self.nbytes = sum(array.nbytes for array in self._arrays)

    @staticmethod
    def pack(
        parts: Sequence[AffineBlocks] | AffineBlocks,
        activation_bits: int = 16,
        library: NativeLibrary | str | None = "auto",
    ) -> "PackedWeight":
        """`library=None` keeps the torch reference, which is also what a machine without compiler gets."""
        parts = [parts] if isinstance(parts, AffineBlocks) else list(parts)
        if activation_bits not in (8, 16):
            raise ValueError(f"activation_bits must be 8 or 16, got {activation_bits}")
        if not 1 <= len(parts) <= MAX_PARTS or any(part.shape[1] != parts[0].shape[1] for part in parts):
            raise ValueError(
                f"cannot stack {[part.shape for part in parts]}: at most {MAX_PARTS}, equal columns"
            )
        if not have_one_order(parts):
            raise ValueError("cannot stack parts whose columns are stored in different orders")
        chosen = native() if library == "auto" else library
        assert not isinstance(chosen, str)
        if chosen is not None and parts[0].shape[1] % chosen.lanes:
            chosen = None  # fewer columns than half a vector: not worth a kernel
        if any(part.group != 16 and part.group % GROUP and part.group != part.shape[1] for part in parts):
            chosen = None  # groups that no file in use has
        return PackedWeight(parts, activation_bits, chosen)

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [tokens, columns] float32 -> [tokens, rows]. A token's result does not depend on the others."""
        if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != self.shape[1]:
            raise ValueError(f"expected float32 [tokens, {self.shape[1]}], got {x.dtype} {tuple(x.shape)}")
        if self.library is None:
            return self._matmul_reference(x, bias)
        x = x.contiguous() if self.order is None else x[:, self.order]
        tokens, out = x.shape[0], torch.empty((x.shape[0], self.shape[0]), dtype=torch.float32)
        if tokens == 0:
            return out
        buffer = QuantizedBuffer(self.library, tokens, self.shape[1], self.activation_bits)
        ops = [
            OpStruct(
                kind=QUANTIZE, columns=self.shape[1], x=x.data_ptr(), quantized=buffer.struct
            ),
            OpStruct(
                kind=LINEAR,
                columns=self.shape[1],
                out_columns=self.shape[0],
                out=out.data_ptr(),
                bias=None if bias is None else bias.data_ptr(),
                parts=len(self.structs),
                packed=ctypes.addressof(self.structs),
                quantized=buffer.struct,
            ),
        ]  # fmt: skip
        small = tokens * self.shape[0] * self.shape[1] < SMALL_WORK
        self.library.play(ops, StepStruct(tokens=tokens), threads=1 if small else None)
        return out

    def _matmul_reference(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The same weights in plain torch, activations unrounded; one part is dequantised at a time."""
        assert self._blocks is not None
        columns = [x @ torch.from_numpy(part.dequantize()).T for part in self._blocks]
        out = torch.cat(columns, dim=1)
        return out if bias is None else out + bias

    def rows(self, indices: Tensor) -> Tensor:
        """Chosen rows as float32 [len(indices), columns]: the look-up of a tied embedding table."""
        indices = indices.to(torch.int64).contiguous()
        if len(indices) and not (int(indices.min()) >= 0 and int(indices.max()) < self.shape[0]):
            raise IndexError(f"row {int(indices.max())} of a matrix with {self.shape[0]} rows")
        out = torch.empty((len(indices), self.shape[1]), dtype=torch.float32)
        if self.library is not None:
            self.library.dequantize_rows(self.structs, indices, self.shape[1], out)
            if self.order is None:
                return out
            return torch.empty_like(out).index_copy_(1, self.order, out)
        assert self._blocks is not None
        first = 0
        for part in self._blocks:
            inside = (indices >= first) & (indices < first + part.shape[0])
            chosen = part.take_rows((indices[inside] - first).numpy())
            out[inside] = torch.from_numpy(chosen.dequantize())
            first += part.shape[0]
        return out

    def dequantize(self) -> Tensor:
        """The whole matrix in float32."""
        return self.rows(torch.arange(self.shape[0]))


def have_one_order(parts: Sequence[AffineBlocks]) -> bool:
    """Whether all parts can read the same activations."""
    first = parts[0].order
    if first is None:
        return all(part.order is None for part in parts)
    return all(part.order is not None and np.array_equal(part.order, first) for part in parts)


class PackedStack:
    """Packed matrices stacked along the rows that one PackedWeight cannot hold."""

    def __init__(self, parts: Sequence[Packed]) -> None:
        self.parts = list(parts)
        self.shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
        self.nbytes = sum(part.nbytes for part in parts)

    def matmul(self, x: Tensor) -> Tensor:
        return torch.cat([part.matmul(x) for part in self.parts], dim=1)

    def rows(self, indices: Tensor) -> Tensor:
        out = torch.empty((len(indices), self.shape[1]), dtype=torch.float32)
        first = 0
        for part in self.parts:
            inside = (indices >= first) & (indices < first + part.shape[0])
            out[inside] = part.rows(indices[inside] - first)
            first += part.shape[0]
        return out


class PackedColumns:
    """Packed matrices side by side: each reads its own part of the input."""

    def __init__(self, parts: Sequence[PackedWeight]) -> None:
        self.parts = list(parts)
        self.shape = (parts[0].shape[0], sum(part.shape[1] for part in parts))
        self.nbytes = sum(part.nbytes for part in parts)

    def matmul(self, x: Tensor) -> Tensor:
        slices = x.split([part.shape[1] for part in self.parts], dim=1)
        first, *others = (part.matmul(one) for part, one in zip(self.parts, slices, strict=True))
        return sum(others, start=first)

    def rows(self, indices: Tensor) -> Tensor:
        return torch.cat([part.rows(indices) for part in self.parts], dim=1)


def _fits_half(values: np.ndarray | None) -> bool:
    with np.errstate(over="ignore"):
        return values is None or bool(np.array_equal(values.astype(np.float16).astype(np.float32), values))


def _pack_part(part: AffineBlocks, library: NativeLibrary) -> tuple[np.ndarray, PackedPartStruct]:
    """The layout of native/linear.h: panels of `lanes` rows, blocks of one or more times 32 columns that share
    scales: codes, scales, minima."""
    rows, columns = part.shape
    lanes, groups = library.lanes, -(-columns // GROUP)
    panels = -(-rows // lanes)
    halves = max(1, GROUP // part.group)
    span = max(1, -(-part.group // GROUP))
    blocks = groups // span
    bits = part.bits if halves == 1 else 8  # 4-bit codes in groups of 16 exist in no file; they fit a byte
    half_floats = library.has_half and _fits_half(part.scale) and _fits_half(part.minimum)
    number = np.float16 if half_floats else np.float32

    padded = np.zeros((panels * lanes, groups * GROUP), dtype=np.uint8)
    padded[:rows, :columns] = part.codes.view(np.uint8)
    if bits == 8 and library.weight_offset:
        padded += np.uint8(library.weight_offset)  # wraps: signed codes become unsigned
    # [panel, lane, group, quad, 4] -> [panel, group, quad, lane, 4]
    quads = padded.reshape(panels, lanes, groups, 8, 4).transpose(0, 2, 3, 1, 4)
    if bits == 4:
        quads = quads[:, :, :4] | np.left_shift(quads[:, :, 4:], 4, dtype=np.uint8)
    pieces = [np.ascontiguousarray(quads).reshape(panels, blocks, -1)]
    minimum = part.minimum
    if minimum is None and bits == 4:
        minimum = np.zeros_like(part.scale)  # the kernel has one path for all 4-bit formats
    for values in (part.scale, minimum):
        if values is None:
            continue
        table = np.zeros((panels * lanes, blocks * halves), dtype=number)
        table[:rows, : values.shape[1]] = values
        ordered = table.reshape(panels, lanes, blocks, halves).transpose(0, 2, 3, 1)
        pieces.append(np.ascontiguousarray(ordered).reshape(panels, blocks, -1).view(np.uint8))
    block_bytes = sum(piece.shape[2] for piece in pieces)
    # Cache-line aligned by hand; numpy promises only 16 bytes. Two blocks behind the last are read, and not used.
    storage = np.empty(panels * blocks * block_bytes + 64 + 2 * block_bytes, dtype=np.uint8)
    skip = -storage.ctypes.data % 64
    array = storage[skip : skip + panels * blocks * block_bytes].reshape(panels, blocks, block_bytes)
    offset = 0
    for piece in pieces:
        array[:, :, offset : offset + piece.shape[2]] = piece
        offset += piece.shape[2]
    struct = PackedPartStruct(
        array.ctypes.data,
        rows,
        bits,
        halves,
        int(minimum is not None),
        int(half_floats),
        span,
        0,
        block_bytes,
    )
    return array, struct
