"""The operations of one fused step (native/program.h), built once for a decoder. `FusedDecoder` plays it for a
cache and so many tokens.

There are two lists of the same step: one for steps in which no row has an adapter, and one in which every adapted
matrix is followed by its grouped low-rank product.
"""

import ctypes
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor

from cumulo.kernels.cpu.kv_codes import KV_FORMATS
from cumulo.kernels.cpu.library import NativeLibrary, OpStruct
from cumulo.kernels.cpu.paged_attention import attention_fields
from cumulo.models.attention import Attention
from cumulo.models.batch import KVCache
from cumulo.models.decoder import Decoder, Layer
from cumulo.models.heads.tap import StreamTap
from cumulo.models.moe import FeedForward
from cumulo.models.play.op_writer import Activation, ActivationRoom, OpWriter
from cumulo.models.play.rank_links import RankLinks


@dataclass(slots=True)
class _Segment:
    """Operations that follow each other without a word to other ranks."""

    ops: Any  # a ctypes array of OpStruct
    partial: Activation | None = None  # what they leave is summed over ranks
    over_outputs: bool = False


class StepBuffers:
    """What a step of up to `rows` tokens works in."""

    def __init__(self, decoder: Decoder, library: NativeLibrary, rows: int) -> None:
        room = self.room = ActivationRoom(library, rows)
        spec = decoder.spec
        heads = spec.heads * spec.head_dim
        self.hidden = room.buffer(spec.hidden)
        self.normed = room.buffer(spec.hidden)
        self.qkv = room.buffer(heads + 2 * spec.kv_heads * spec.head_dim)
        self.mixed = room.buffer(heads)
        self.gate_up = room.buffer(2 * spec.ffn_hidden)
        self.activated = room.buffer(spec.ffn_hidden)
        # What is wanted of the last layer is usually a few rows; from its attention on only they are computed.
        self.wanted_hidden = room.buffer(spec.hidden)
        self.wanted_mixed = room.buffer(heads)


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
        tap: StreamTap | None = None,
    ) -> None:
        """`tables`: cosine and sine of every position. `tap`: of a draft head."""
        if cache.key_storage.dtype not in KV_FORMATS or cache.key_storage.device.type != "cpu":
            raise ValueError(
                "the fused decoder needs a cache in host memory, in float32 or 8 bits, got "
                f"{cache.key_storage.dtype}"
            )
        self.cache, self.rows, self.tap = cache, rows, tap
        self.buffers = StepBuffers(decoder, library, rows)
        self._make = partial(OpList, decoder, tables, links, cache, self.buffers, tap)
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
        tap: StreamTap | None,
        adapted: bool,
    ) -> None:
        """`adapted`: rows may have adapters."""
        self._decoder, self._tables, self._cache, self._buffers = decoder, tables, cache, buffers
        spec = self.spec = decoder.spec
        self._writer = writer = OpWriter(buffers.room, spec.norm_eps, adapted)
        self._sums: list[tuple[int, Activation | None, bool]] = []  # after so many operations, of what
        self._last_stage = links is None or links.part.last
        self._summed = links is not None and links.tensor is not None
        # Of the ranks that sum up, one adds the stream so far.
        self._accumulate = links is None or links.part.carries_stream
        if links is None:
            writer.embed(decoder.embed, buffers.hidden)
        ends = []
        for layer in range(spec.layers):
            if tap is not None:
                for kept in tap.places(layer):
                    writer.keep(buffers.hidden, kept)
            self._layer(layer)
            ends.append(len(writer.list))
        if self._last_stage:
            norm = decoder.final_norm.weight
            writer.norm(buffers.wanted_hidden, norm, buffers.normed, None, over_outputs=True)
        self.ops = writer.array()
        # The same operations layer by layer, for a cache that wants to be told; the rest is the last part.
        self.parts = [self._part(*bounds) for bounds in pairwise([0, *ends, len(writer.list)])]
        # And between the sums over ranks.
        self._sums.append((len(writer.list), None, False))
        begins = [0, *(end for end, _, _ in self._sums)]
        self.segments = [
            _Segment(self._part(begin, end), partial, over_outputs)
            for begin, (end, partial, over_outputs) in zip(begins, self._sums, strict=False)
            if end > begin
        ]

    def _part(self, first: int, end: int) -> Any:
        return (OpStruct * (end - first)).from_buffer(self.ops, first * ctypes.sizeof(OpStruct))

    def _sum(self, partial: Activation, over_outputs: bool) -> None:
        """What other ranks have of the same rows is added before anything goes on."""
        if self._summed:
            self._sums.append((len(self._writer.list), partial, over_outputs))

    def set_result(self, hidden: Tensor) -> None:
        self.ops[len(self.ops) - 1].out = hidden.data_ptr()

    def _layer(self, index: int) -> None:
        spec, layer, buffers = self.spec, self._decoder.layers[index], self._buffers
        writer, carries = self._writer, self._accumulate
        assert isinstance(layer, Layer)
        attention, ffn = layer.attention, layer.ffn
        assert isinstance(attention, Attention) and isinstance(ffn, FeedForward)  # why_not has checked
        cache = attention_fields(
            self._cache.keys[index], self._cache.values[index], spec.heads, attention.scale, attention.window
        )
        writer.norm(buffers.hidden, layer.attention_norm.weight, buffers.normed, attention.qkv)
        writer.linear(buffers.normed, attention.qkv, buffers.qkv)
        writer.rotate(
            buffers.qkv,
            self._tables,
            cache,
            query_norm=attention.q_norm.weight.data_ptr() if spec.qk_norm else None,
            key_norm=attention.k_norm.weight.data_ptr() if spec.qk_norm else None,
            interleaved=int(spec.rope_interleaved),
        )
        writer.attend(buffers.qkv, buffers.mixed, cache)
        last = self._last_stage and index == spec.layers - 1
        hidden, mixed = (
            (buffers.wanted_hidden, buffers.wanted_mixed) if last else (buffers.hidden, buffers.mixed)
        )
        if last:
            writer.gather(buffers.hidden, hidden)
            writer.gather(buffers.mixed, mixed)
        writer.quantize(mixed, attention.output, last)
        writer.linear(mixed, attention.output, hidden, accumulate=carries, over_outputs=last)
        self._sum(hidden, last)
        writer.norm(hidden, layer.ffn_norm.weight, buffers.normed, ffn.gate_up, last)
        writer.linear(buffers.normed, ffn.gate_up, buffers.gate_up, over_outputs=last)
        writer.silu_mul(buffers.gate_up, buffers.activated, ffn.down, last)
        writer.linear(buffers.activated, ffn.down, hidden, accumulate=carries, over_outputs=last)
        self._sum(hidden, last)
