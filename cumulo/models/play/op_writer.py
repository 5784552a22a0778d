"""OpWriter: writes the native kernels' operations (native/program.h) into a list, one call each. Decoders and draft
heads that are played as one program are written with it.
"""

import ctypes
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cumulo.kernels.cpu import library as native_library
from cumulo.kernels.cpu.library import NativeLibrary, OpStruct, QuantizedRowsStruct
from cumulo.kernels.cpu.packed_float8 import PackedFloat8
from cumulo.kernels.cpu.packed_linear import PackedWeight, QuantizedBuffer
from cumulo.kernels.low_rank import LowRankStack
from cumulo.models.adapters.bank import AdaptedMatrix
from cumulo.models.linear import Linear

_MOST_SECTIONS = 3  # of a matrix: query, key and value


@dataclass(slots=True)
class Activation:
    """A buffer of rows and, where packed matrices read it, its quantised form."""

    values: Tensor
    quantized: dict[int, QuantizedBuffer] = field(default_factory=dict)  # by activation bits

    @property
    def pointer(self) -> int:
        return self.values.data_ptr()


class ActivationRoom:
    """Makes and owns the buffers of a program for up to `rows` tokens: operations know only their addresses."""

    def __init__(self, library: NativeLibrary, rows: int) -> None:
        self.rows, self.library = rows, library
        self._low: Activation | None = None
        self._made: list[Activation] = []

    def buffer(self, columns: int) -> Activation:
        self._made.append(Activation(torch.empty((self.rows, columns), dtype=torch.float32)))
        return self._made[-1]

    def low(self, columns: int) -> Activation:
        """The buffer of the products with A; made when the first adapter is used, for the widest matrix."""
        if self._low is None:
            self._low = self.buffer(columns)
        return self._low

    def quantized(self, x: Activation, weight: object) -> QuantizedRowsStruct:
        assert isinstance(weight, PackedWeight)
        bits = weight.activation_bits
        if bits not in x.quantized:
            x.quantized[bits] = QuantizedBuffer(self.library, self.rows, x.values.shape[1], bits)
        return x.quantized[bits].struct


class OpWriter:
    def __init__(self, room: ActivationRoom, eps: float, adapted: bool = False) -> None:
        """`eps`: of the norms. `adapted`: rows may have adapters."""
        self.room, self._eps, self._adapted = room, eps, adapted
        self._keep: list[Any] = []  # what operations point to
        self.list: list[OpStruct] = []

    def array(self) -> "ctypes.Array[OpStruct]":
        return (OpStruct * len(self.list))(*self.list)

    def _add(self, kind: int, x: Activation, over_outputs: bool = False, **more: Any) -> None:
        """An operation that reads x; `over_outputs`: of the wanted rows only."""
        op = OpStruct(
            kind=kind, over_outputs=int(over_outputs), columns=x.values.shape[1], x=x.pointer, **more
        )
        self.list.append(op)

    def embed(self, embed: Linear, to: Activation) -> None:
        op = OpStruct(kind=native_library.EMBED_FLOAT, columns=to.values.shape[1], out=to.pointer)
        if isinstance(embed.packed, PackedWeight):
            op.kind, op.parts = native_library.EMBED, len(embed.packed.structs)
            op.packed = ctypes.addressof(embed.packed.structs)
        else:
            op.weight = embed.weight.data_ptr()
        self.list.append(op)

    def norm(
        self,
        x: Activation,
        weight: Tensor,
        to: Activation,
        reader: Linear | PackedWeight | None,
        over_outputs: bool = False,
    ) -> None:
        given: dict[str, Any] = {"weight": weight.data_ptr(), "eps": self._eps}
        self._add(native_library.NORM, x, over_outputs, **given, **self._destination(to, reader))

    def quantize(self, x: Activation, reader: Linear, over_outputs: bool = False) -> None:
        """For a packed matrix; a plain one reads x itself."""
        if isinstance(reader.packed, PackedWeight):
            quantized = self.room.quantized(x, reader.packed)
            self._add(native_library.QUANTIZE, x, over_outputs, quantized=quantized)

    def gather(self, x: Activation, to: Activation) -> None:
        """The rows that are wanted."""
        self._add(native_library.GATHER, x, over_outputs=True, out=to.pointer)

    def keep(self, x: Activation, to: Tensor) -> None:
        """Rows of x into the rows of `to`, a slice of a wider table's columns, that belong to the tokens' slots."""
        self._add(native_library.KEEP, x, out_columns=to.stride(0), out=to.data_ptr())

    def likeliest(self, logits: Activation, to: Tensor) -> None:
        """The most likely token of each wanted row: its probability and, as an int32, its number."""
        self._add(native_library.LIKELIEST, logits, over_outputs=True, out=to.data_ptr())

    def rotate(
        self, qkv: Activation, tables: tuple[Tensor, Tensor], cache: dict[str, Any], **more: Any
    ) -> None:
        """Queries and keys in place, keys and values into the cache. `tables`: cosine and sine by position."""
        cosine, sine = (table.data_ptr() for table in tables)
        given: dict[str, Any] = {"out": qkv.pointer, "cosine": cosine, "sine": sine, "eps": self._eps}
        self._add(native_library.ROTATE, qkv, **given, **more, **cache)

    def attend(self, qkv: Activation, to: Activation, cache: dict[str, Any]) -> None:
        self._add(native_library.ATTEND, qkv, out_columns=to.values.shape[1], out=to.pointer, **cache)

    def silu_mul(self, x: Activation, to: Activation, reader: Linear, over_outputs: bool = False) -> None:
        self._add(native_library.SILU_MUL, x, over_outputs, **self._destination(to, reader))
        self.list[-1].columns = to.values.shape[1]  # x has gate and up side by side

    def linear(
        self,
        x: Activation,
        linear: Linear,
        to: Activation,
        accumulate: bool = False,
        over_outputs: bool = False,
    ) -> None:
        if isinstance(linear.packed, PackedWeight):
            self.packed(x, linear.packed, to, accumulate, over_outputs, linear.bias)
        else:
            op = self._product(linear.shape, to, accumulate, over_outputs, linear.bias)
            op.x = x.pointer
            if isinstance(linear.packed, PackedFloat8):
                op.kind = native_library.FLOAT8_LINEAR
                op.weight, op.scales = linear.packed.codes.data_ptr(), linear.packed.scale.data_ptr()
                op.scale_columns = linear.packed.block
            else:
                op.kind, op.weight = native_library.FLOAT_LINEAR, linear.weight.data_ptr()
            self.list.append(op)
        if self._adapted and isinstance(linear.adapted, AdaptedMatrix):
            self._low_rank(x, linear.adapted.stack, to, over_outputs)

    def packed(
        self,
        x: Activation,
        weight: PackedWeight,
        to: Activation,
        accumulate: bool = False,
        over_outputs: bool = False,
        bias: Tensor | None = None,
    ) -> None:
        op = self._product(weight.shape, to, accumulate, over_outputs, bias)
        op.kind = native_library.LINEAR
        op.parts, op.packed = len(weight.structs), ctypes.addressof(weight.structs)
        op.quantized = self.room.quantized(x, weight)
        self.list.append(op)

    @staticmethod
    def _product(
        shape: tuple[int, ...], to: Activation, accumulate: bool, over_outputs: bool, bias: Tensor | None
    ) -> OpStruct:
        return OpStruct(
            over_outputs=int(over_outputs),
            columns=shape[1],
            out_columns=shape[0],
            out=to.pointer,
            bias=None if bias is None else bias.data_ptr(),
            accumulate=int(accumulate),
        )

    def _low_rank(self, x: Activation, stack: LowRankStack, to: Activation, over_outputs: bool) -> None:
        """What adapters add to a product: two operations, the second of which reads all of the first."""
        parts = len(stack.bounds) - 1
        low = self.room.low(_MOST_SECTIONS * stack.rank_max)
        bounds = (ctypes.c_int32 * (parts + 1))(*stack.bounds)
        self._keep.append(bounds)
        for kind, source, weight, result in (
            (native_library.SHRINK, x, stack.a, low),
            (native_library.EXPAND, low, stack.b, to),
        ):
            self._add(
                kind,
                source,
                over_outputs,
                out_columns=result.values.shape[1],
                out=result.pointer,
                weight=weight.data_ptr(),
                parts=parts,
                bounds=ctypes.addressof(bounds),
                ranks=stack.ranks.data_ptr(),
                rank_max=stack.rank_max,
            )

    def _destination(
        self, to: Activation, reader: Linear | PackedWeight | None
    ) -> dict[str, int | QuantizedRowsStruct]:
        """Where an operation leaves its result: quantised if a packed matrix reads it, plain for a plain matrix and
        for adapters."""
        packed = reader.packed if isinstance(reader, Linear) else reader
        if not isinstance(packed, PackedWeight):
            return {"out": to.pointer}
        found: dict[str, int | QuantizedRowsStruct] = {"quantized": self.room.quantized(to, packed)}
        if self._adapted and isinstance(reader, Linear) and reader.adapted is not None:
            found["out"] = to.pointer
        return found
