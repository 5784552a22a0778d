"""The program of a FusedDecoder: the operations of one step, and the buffers they work in. Made by it for a cache
and so many tokens.

There are two lists of the same step: one for steps in which no row has an adapter, and one in which every adapted
matrix is followed by its grouped low-rank product.
"""

import ctypes
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from cumulo.kernels.cpu import library as native_library
from cumulo.kernels.cpu.library import NativeLibrary, OpStruct, QuantizedRowsStruct
from cumulo.kernels.cpu.packed_float8 import PackedFloat8
from cumulo.kernels.cpu.packed_linear import PackedWeight, QuantizedBuffer
from cumulo.kernels.cpu.paged_attention import attention_fields
from cumulo.kernels.low_rank import LowRankStack
from cumulo.models.adapters.bank import AdaptedMatrix
from cumulo.models.attention import Attention
from cumulo.models.batch import KVCache
from cumulo.models.decoder import Decoder, Layer
from cumulo.models.linear import Linear
from cumulo.models.moe import FeedForward
from cumulo.models.play.rank_links import RankLinks

_MOST_SECTIONS = 3  # of a matrix: query, key and value


@dataclass(slots=True)
class _Activation:
    """A buffer of rows and, where packed matrices read it, its quantised form."""

    values: Tensor
    quantized: dict[int, QuantizedBuffer] = field(default_factory=dict)  # by activation bits

    @property
    def pointer(self) -> int:
        return self.values.data_ptr()


@dataclass(slots=True)
class _Segment:
    """Operations that follow each other without a word to other ranks."""

    ops: Any  # a ctypes array of OpStruct
    partial: _Activation | None = None  # what they leave is summed over ranks
    over_outputs: bool = False


class StepBuffers:
    """What a step of up to `rows` tokens works in."""

    def __init__(self, decoder: Decoder, library: NativeLibrary, rows: int) -> None:
        self.rows, self.library = rows, library
        spec = decoder.spec
        heads = spec.heads * spec.head_dim
        self.hidden = self._buffer(spec.hidden)
        self.normed = self._buffer(spec.hidden)
        self.qkv = self._buffer(heads + 2 * spec.kv_heads * spec.head_dim)
        self.mixed = self._buffer(heads)
        self.gate_up = self._buffer(2 * spec.ffn_hidden)
        self.activated = self._buffer(spec.ffn_hidden)
        # What is wanted of the last layer is usually a few rows; from its attention on only they are computed.
        self.wanted_hidden = self._buffer(spec.hidden)
        self.wanted_mixed = self._buffer(heads)
        self._low: _Activation | None = None

    def low(self, columns: int) -> _Activation:
        """Of the products with A; made when the first adapter is used, for the widest matrix."""
        if self._low is None:
            self._low = self._buffer(columns)
        return self._low

    def quantized(self, x: _Activation, weight: object) -> QuantizedRowsStruct:
        assert isinstance(weight, PackedWeight)
        bits = weight.activation_bits
        if bits not in x.quantized:
            x.quantized[bits] = QuantizedBuffer(self.library, self.rows, x.values.shape[1], bits)
        return x.quantized[bits].struct

    def _buffer(self, columns: int) -> _Activation:
        return _Activation(torch.empty((self.rows, columns), dtype=torch.float32))


class FusedProgram:
    """The operations of one step for up to `rows` tokens over one cache."""

    def __init__(
        self,
        decoder: Decoder,
        tables: tuple[Tensor, Tensor],
        links: RankLinks | None,
        library: NativeLibrary,
        cache: KVCache,
        rows: int,
    ) -> None:
        """`tables`: cosine and sine of every position."""
        if cache.key_storage.dtype != torch.float32 or cache.key_storage.device.type != "cpu":
            raise ValueError(
                f"the fused decoder needs a float32 cache in host memory, got {cache.key_storage.dtype}"
            )
        self.cache, self.rows = cache, rows
        self.buffers = StepBuffers(decoder, library, rows)
        self._make = partial(OpList, decoder, tables, links, cache, self.buffers)
        self._lists: dict[bool, OpList] = {}

    def operations(self, adapted: bool) -> "OpList":
        """For a step without adapters, or with some."""
        if adapted not in self._lists:
            self._lists[adapted] = self._make(adapted)
        return self._lists[adapted]


class OpList:
    """One list of operations, whole and in parts."""

    def __init__(
        self,
        decoder: Decoder,
        tables: tuple[Tensor, Tensor],
        links: RankLinks | None,
        cache: KVCache,
        buffers: StepBuffers,
        adapted: bool,
    ) -> None:
        """`adapted`: rows may have adapters."""
        self._decoder, self._tables, self._cache, self._buffers = decoder, tables, cache, buffers
        self._adapted = adapted
        self._keep: list[Any] = []  # what operations point to
        spec = self.spec = decoder.spec
        self._list: list[OpStruct] = []
        self._sums: list[tuple[int, _Activation | None, bool]] = []  # after so many operations, of what
        self._last_stage = links is None or links.part.last
        self._summed = links is not None and links.tensor is not None
        # Of the ranks that sum up, one adds the stream so far.
        self._accumulate = links is None or links.part.carries_stream
        if links is None:
            self._embed()
        ends = []
        for layer in range(spec.layers):
            self._layer(layer)
            ends.append(len(self._list))
        if self._last_stage:
            norm = decoder.final_norm.weight
            self._norm(buffers.wanted_hidden, norm, buffers.normed, None, over_outputs=True)
        self.ops = (OpStruct * len(self._list))(*self._list)
        # The same operations layer by layer, for a cache that wants to be told; the rest is the last part.
        self.parts = [self._part(*bounds) for bounds in pairwise([0, *ends, len(self._list)])]
        # And between the sums over ranks.
        self._sums.append((len(self._list), None, False))
        begins = [0, *(end for end, _, _ in self._sums)]
        self.segments = [
            _Segment(self._part(begin, end), partial, over_outputs)
            for begin, (end, partial, over_outputs) in zip(begins, self._sums, strict=False)
            if end > begin
        ]

    def _part(self, first: int, end: int) -> Any:
        return (OpStruct * (end - first)).from_buffer(self.ops, first * ctypes.sizeof(OpStruct))

    def _sum(self, partial: _Activation, over_outputs: bool) -> None:
        """What other ranks have of the same rows is added before anything goes on."""
        if self._summed:
            self._sums.append((len(self._list), partial, over_outputs))

    def set_result(self, hidden: Tensor) -> None:
        self.ops[len(self.ops) - 1].out = hidden.data_ptr()

    # -- operations ------------------------------------------------------------------------------------
    def _embed(self) -> None:
        embed, buffers = self._decoder.embed, self._buffers
        if isinstance(embed.packed, PackedWeight):
            self._list.append(
                OpStruct(
                    kind=native_library.EMBED,
                    columns=self.spec.hidden,
                    out=buffers.hidden.pointer,
                    parts=len(embed.packed.structs),
                    packed=ctypes.addressof(embed.packed.structs),
                )
            )
            return
        self._list.append(
            OpStruct(
                kind=native_library.EMBED_FLOAT,
                columns=self.spec.hidden,
                out=buffers.hidden.pointer,
                weight=embed.weight.data_ptr(),
            )
        )

    def _layer(self, index: int) -> None:
        spec, layer, buffers = self.spec, self._decoder.layers[index], self._buffers
        assert isinstance(layer, Layer)
        attention, ffn = layer.attention, layer.ffn
        assert isinstance(attention, Attention) and isinstance(ffn, FeedForward)  # why_not has checked
        cache_fields = attention_fields(
            self._cache.keys[index], self._cache.values[index], spec.heads, attention.scale, attention.window
        )
        self._norm(buffers.hidden, layer.attention_norm.weight, buffers.normed, attention.qkv)
        self._linear(buffers.normed, attention.qkv, buffers.qkv)
        self._list.append(
            OpStruct(
                kind=native_library.ROTATE,
                columns=buffers.qkv.values.shape[1],
                out=buffers.qkv.pointer,
                query_norm=attention.q_norm.weight.data_ptr() if spec.qk_norm else None,
                key_norm=attention.k_norm.weight.data_ptr() if spec.qk_norm else None,
                cosine=self._tables[0].data_ptr(),
                sine=self._tables[1].data_ptr(),
                interleaved=int(spec.rope_interleaved),
                eps=spec.norm_eps,
                **cache_fields,
            )
        )
        self._list.append(
            OpStruct(
                kind=native_library.ATTEND,
                columns=buffers.qkv.values.shape[1],
                out_columns=buffers.mixed.values.shape[1],
                x=buffers.qkv.pointer,
                out=buffers.mixed.pointer,
                **cache_fields,
            )
        )
        last = self._last_stage and index == spec.layers - 1
        hidden, mixed = (
            (buffers.wanted_hidden, buffers.wanted_mixed) if last else (buffers.hidden, buffers.mixed)
        )
        if last:
            self._gather(buffers.hidden, hidden)
            self._gather(buffers.mixed, mixed)
        self._quantize(mixed, attention.output, last)
        self._linear(mixed, attention.output, hidden, accumulate=self._accumulate, over_outputs=last)
        self._sum(hidden, last)
        self._norm(hidden, layer.ffn_norm.weight, buffers.normed, ffn.gate_up, last)
        self._linear(buffers.normed, ffn.gate_up, buffers.gate_up, over_outputs=last)
        self._list.append(
            OpStruct(
                kind=native_library.SILU_MUL,
                over_outputs=int(last),
                columns=spec.ffn_hidden,
                x=buffers.gate_up.pointer,
                **self._destination(buffers.activated, ffn.down),
            )
        )
        self._linear(buffers.activated, ffn.down, hidden, accumulate=self._accumulate, over_outputs=last)
        self._sum(hidden, last)

    def _norm(
        self,
        x: _Activation,
        weight: Tensor,
        to: _Activation,
        reader: Linear | None,
        over_outputs: bool = False,
    ) -> None:
        self._list.append(
            OpStruct(
                kind=native_library.NORM,
                over_outputs=int(over_outputs),
                columns=x.values.shape[1],
                x=x.pointer,
                weight=weight.data_ptr(),
                eps=self.spec.norm_eps,
                **self._destination(to, reader),
            )
        )

    def _quantize(self, x: _Activation, reader: Linear, over_outputs: bool) -> None:
        if isinstance(reader.packed, PackedWeight):
            self._list.append(
                OpStruct(
                    kind=native_library.QUANTIZE,
                    over_outputs=int(over_outputs),
                    columns=x.values.shape[1],
                    x=x.pointer,
                    quantized=self._buffers.quantized(x, reader.packed),
                )
            )

    def _gather(self, x: _Activation, to: _Activation) -> None:
        self._list.append(
            OpStruct(
                kind=native_library.GATHER,
                over_outputs=1,
                columns=x.values.shape[1],
                x=x.pointer,
                out=to.pointer,
            )
        )

    def _linear(
        self,
        x: _Activation,
        linear: Linear,
        to: _Activation,
        accumulate: bool = False,
        over_outputs: bool = False,
    ) -> None:
        op = OpStruct(
            over_outputs=int(over_outputs),
            columns=linear.shape[1],
            out_columns=linear.shape[0],
            out=to.pointer,
            bias=None if linear.bias is None else linear.bias.data_ptr(),
            accumulate=int(accumulate),
        )
        if isinstance(linear.packed, PackedWeight):
            op.kind = native_library.LINEAR
            op.parts, op.packed = len(linear.packed.structs), ctypes.addressof(linear.packed.structs)
            op.quantized = self._buffers.quantized(x, linear.packed)
        elif isinstance(linear.packed, PackedFloat8):
            op.kind, op.x = native_library.FLOAT8_LINEAR, x.pointer
            op.weight, op.scales = linear.packed.codes.data_ptr(), linear.packed.scale.data_ptr()
            op.scale_columns = linear.packed.block
        else:
            op.kind, op.x, op.weight = native_library.FLOAT_LINEAR, x.pointer, linear.weight.data_ptr()
        self._list.append(op)
        if self._adapted and isinstance(linear.adapted, AdaptedMatrix):
            self._low_rank(x, linear.adapted.stack, to, over_outputs)

    def _low_rank(self, x: _Activation, stack: LowRankStack, to: _Activation, over_outputs: bool) -> None:
        """What adapters add to a product: two operations, the second of which reads all of the first."""
        parts = len(stack.bounds) - 1
        low = self._buffers.low(_MOST_SECTIONS * stack.rank_max)
        bounds = (ctypes.c_int32 * (parts + 1))(*stack.bounds)
        self._keep.append(bounds)
        for kind, source, weight, result in (
            (native_library.SHRINK, x, stack.a, low),
            (native_library.EXPAND, low, stack.b, to),
        ):
            self._list.append(
                OpStruct(
                    kind=kind,
                    over_outputs=int(over_outputs),
                    columns=source.values.shape[1],
                    out_columns=result.values.shape[1],
                    x=source.pointer,
                    out=result.pointer,
                    weight=weight.data_ptr(),
                    parts=parts,
                    bounds=ctypes.addressof(bounds),
                    ranks=stack.ranks.data_ptr(),
                    rank_max=stack.rank_max,
                )
            )

    def _destination(self, to: _Activation, reader: Linear | None) -> dict[str, int | QuantizedRowsStruct]:
        """Where an operation leaves its result: quantised if a packed matrix reads it, plain for a plain matrix and
        for adapters."""
        if reader is None or not isinstance(reader.packed, PackedWeight):
            return {"out": to.pointer}
        found: dict[str, int | QuantizedRowsStruct] = {
            "quantized": self._buffers.quantized(to, reader.packed)
        }
        if self._adapted and reader.adapted is not None:
            found["out"] = to.pointer
        return found
